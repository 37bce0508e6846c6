"""Routes of the overview: health, this process's metrics for Prometheus, and ids by their first digits."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from pipeplan.errors import ServiceError
from pipeplan.protocol.listing import IdQuery, Matches
from planner_service.access.auth import scope
from planner_service.overview import service as overview
from planner_service.platform.metrics import MEDIA_TYPE
from planner_service.platform.migrations import head, revision_of
from planner_service.platform.requests import Services

EXAMPLE = 'pipeplan_http_requests_total{method="GET",route="/v1/plans/{plan_id}",status="200"} 17.0\n'

router = APIRouter(tags=["health"])
metrics_router = APIRouter(tags=["health"], dependencies=[scope("read")])
ids_router = APIRouter(prefix="/v1/ids", tags=["ids"])


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


@metrics_router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "The metrics", "content": {"text/plain": {"example": EXAMPLE}}}},
)
def get_metrics(services: Services) -> Response:
    """Requests, solve times, the queue, leases, agents, how far predictions were off: in Prometheus' text form."""
    return Response(services.metrics.text(), headers={"Content-Type": MEDIA_TYPE})


@ids_router.get("", dependencies=[scope("read")])
def get_ids(services: Services, query: Annotated[IdQuery, Query()]) -> Matches:
    """The ids of a noun that begin so, ten at most: for people, who do not write whole ids."""
    return overview.ids(services, query)
