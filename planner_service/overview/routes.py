"""Routes of the overview: health, metrics for Prometheus, ids by their first digits, and the first page's charts."""

import hashlib
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from pipeplan.errors import ServiceError
from pipeplan.protocol.listing import IdQuery, Matches, Name
from planner_service.access.auth import scope
from planner_service.documents.chart_files import ANSWERS, Format, chart_response
from planner_service.overview import charts
from planner_service.overview import service as overview
from planner_service.platform.metrics import MEDIA_TYPE
from planner_service.platform.migrations import head, revision_of
from planner_service.platform.requests import Services

EXAMPLE = 'pipeplan_http_requests_total{method="GET",route="/v1/plans/{plan_id}",status="200"} 17.0\n'
METRICS = {"text/plain": {"schema": {"type": "string"}, "example": EXAMPLE}}

router = APIRouter(tags=["health"])
metrics_router = APIRouter(tags=["health"], dependencies=[scope("read")])
ids_router = APIRouter(prefix="/v1/ids", tags=["ids"])
charts_router = APIRouter(prefix="/v1/overview/charts", tags=["overview"], dependencies=[scope("read")])


class Health(BaseModel):
    """The positive answer; a negative one is a problem."""

    status: Literal["ok"] = "ok"


class Readiness(Health):
    """The positive answer, with the revision of the database's tables."""

    revision: str


@router.get("/healthz")
async def get_health() -> Health:
    """The process answers."""
    return Health()


@router.get("/readyz", dependencies=[scope("read", "agent")])
def get_readiness(services: Services) -> Readiness:
    """The database answers and has this version's tables."""
    revision = revision_of(services.database)
    if revision != head():
        raise ServiceError(f"the database is at revision {revision}, not at {head()}: run `pipeplan db upgrade`")
    return Readiness(revision=head())


@metrics_router.get(
    "/metrics", response_class=Response, responses={200: {"description": "The metrics", "content": METRICS}}
)
def get_metrics(services: Services) -> Response:
    """Requests, solve times, the queue, leases, agents, how far predictions were off: in Prometheus' text form."""
    return Response(services.metrics.text(), headers={"Content-Type": MEDIA_TYPE})


@ids_router.get("", dependencies=[scope("read")])
def get_ids(services: Services, query: Annotated[IdQuery, Query()]) -> Matches:
    """At most ten ids of a noun with this prefix: people do not type whole ids."""
    return overview.ids(services, query)


@charts_router.get("/throughput.{kind}", response_class=Response, responses=ANSWERS)
def get_throughput_chart(
    services: Services, request: Request, kind: Format, model: Annotated[Name, Query(description="the model's name")]
) -> Response:
    """The throughput of a model's newest played plans over time, as a table or as a picture."""
    made = charts.throughput_file(kind, model, overview.newest_plans(services, model))
    return chart_response(request, _hash(made), kind, "throughput", lambda: made)


@charts_router.get("/errors.{kind}", response_class=Response, responses=ANSWERS)
def get_errors_chart(services: Services, request: Request, kind: Format) -> Response:
    """How far the newest measured runs were from their predictions, as a table or as a picture."""
    made = charts.errors_file(kind, overview.measured_runs(services))
    return chart_response(request, _hash(made), kind, "errors", lambda: made)


def _hash(text: str) -> str:
    # These charts' data have no id: their content is their tag.
    return hashlib.sha256(text.encode()).hexdigest()[:32]
