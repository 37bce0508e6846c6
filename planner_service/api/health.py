"""Whether the service is alive, and whether it can work."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from pipeplan.errors import ServiceError
from planner_service.api.auth import scope
from planner_service.api.bodies import Services
from planner_service.storage.migrations import head, revision_of

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """A yes: a no is a problem."""

    status: Literal["ok"] = "ok"


class Readiness(Health):
    """A yes, and the revision of the database's tables."""

    revision: str


@router.get("/healthz")
async def healthz() -> Health:
    """The process answers."""
    return Health()


@router.get("/readyz", dependencies=[scope("read", "agent")])
def readyz(services: Services) -> Readiness:
    """The database answers and has this version's tables."""
    revision = revision_of(services.database)
    if revision != head():
        raise ServiceError(f"the database is at revision {revision}, not at {head()}: run `pipeplan db upgrade`")
    return Readiness(revision=head())
