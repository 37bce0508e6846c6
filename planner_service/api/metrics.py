"""The metrics of this process, in Prometheus' text form."""

from fastapi import APIRouter, Response

from planner_service.api.auth import scope
from planner_service.api.bodies import Services
from planner_service.metrics import MEDIA_TYPE

router = APIRouter(tags=["health"], dependencies=[scope("read")])

EXAMPLE = 'pipeplan_http_requests_total{method="GET",route="/v1/plans/{plan_id}",status="200"} 17.0\n'


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "The metrics", "content": {"text/plain": {"example": EXAMPLE}}}},
)
def get_metrics(services: Services) -> Response:
    """Requests, solve times, the queue, leases, agents, how far predictions were off: in Prometheus' text form."""
    return Response(services.metrics.text(), headers={"Content-Type": MEDIA_TYPE})
