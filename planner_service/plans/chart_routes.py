"""Routes of a plan's charts, as files: CSV for spreadsheets, self-contained SVG."""

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from pipeplan.documents.plan import Plan
from pipeplan.errors import InvalidInputError, require
from pipeplan.programs.text import format_instruction
from pipeplan.programs.timeline import Timeline
from planner_service.access.auth import scope
from planner_service.documents.chart_files import (
    ANSWERS,
    Format,
    Row,
    chart_response,
    csv_text,
    legend_of_parts,
    svg_text,
)
from planner_service.plans import charts
from planner_service.plans import service as plans
from planner_service.plans.drawings import draw, last_batches, stage_drawing
from planner_service.platform.context import Context
from planner_service.platform.requests import Batches, Services

router = APIRouter(prefix="/v1/plans", tags=["plans"])

Chart = Literal["stages", "memory", "front", "search", "schedule"]
Degree = Annotated[str | None, Query(json_schema_extra={"enum": [*charts.DEGREES, None]}, description="of search only")]

STAGES_HEIGHT, HEIGHT = 46.0, 240.0


@router.get(
    "/{plan_id}/charts/{chart}.{kind}", dependencies=[scope("read")], response_class=Response, responses=ANSWERS
)
def get_plan_chart(
    services: Services,
    request: Request,
    plan_id: str,
    chart: Chart,
    kind: Format,
    across: Degree = None,
    down: Degree = None,
    batches: Batches = 2,
) -> Response:
    """A chart of a plan's page, as a table or as a picture. `across` and `down` are the degrees of the search's map,
    `batches` those that the schedule shows.
    """
    rule = f"must be one of {', '.join(charts.DEGREES)}"
    for field, degree in (("across", across), ("down", down)):  # of whichever chart: they are in its entity tag
        require(degree is None or degree in charts.DEGREES, field, rule, degree)
    plan = plans.get(services, plan_id)
    name = f"plan-{plan_id[:8]}-{chart}"
    varies = (across or "", down or "", batches, "played" if plan.simulated else "")
    make = partial(_file, services, plan_id, plan, chart, kind, across, down, batches)
    return chart_response(request, plan_id, kind, name, make, *varies)


def _file(
    context: Context,
    plan_id: str,
    plan: Plan,
    chart: Chart,
    kind: Format,
    across: str | None,
    down: str | None,
    batches: int,
) -> str:
    svg = partial(svg_text, "plans/chart.svg", title=f"{chart} of plan {plan_id}", name=chart)
    if chart == "stages":
        if kind == "csv":
            return csv_text(stage_rows(plan))
        stages = stage_drawing(plan)
        require(stages is not None, "chart", "cannot be drawn: the plan has too many stages", chart)
        return svg(height=STAGES_HEIGHT, chart=stages)
    if chart == "schedule":
        timeline = plans.timeline(context, plan_id, batches)
        if kind == "csv":
            return csv_text(event_rows(timeline))
        window, title = last_batches(timeline, batches), f"The first {batches} batches"
        schedule = draw(timeline, window, title=title, most_rows=len(timeline.lanes))
        return svg(height=schedule.height, legend=schedule.legend, chart=schedule)
    found = _drawn(context, plan, chart, across, down)
    if kind == "csv":
        return csv_text(found.rows)
    height = found.height if isinstance(found, charts.SearchMap) else HEIGHT
    legend = legend_of_parts(found.kinds) if isinstance(found, charts.MemoryChart) else ()
    return svg(height=height, legend=legend, chart=found)


def _drawn(
    context: Context, plan: Plan, chart: Chart, across: str | None, down: str | None
) -> charts.MemoryChart | charts.FrontChart | charts.SearchMap:
    if chart == "memory":
        return charts.memory_chart(plan, plans.capacities(context, plan))
    if chart == "search":
        return charts.search_map(plan, across, down)
    front = charts.front_chart(plan)
    if front is None:
        raise InvalidInputError("chart", "cannot be drawn: the plan states no throughput or no memory", chart)
    return front


def stage_rows(plan: Plan) -> list[Row]:
    """A row a stage."""
    heads = ("stage", "start", "stop", "replicas", "recompute", "time_s", "forward_s", "backward_s", "memory_bytes")
    return [
        heads,
        *(
            (
                index,
                it.start,
                it.stop,
                it.replicas,
                it.recomputes,
                it.time_s,
                of.forward_s,
                of.backward_s,
                it.memory_bytes,
            )
            for index, (it, of) in enumerate(zip(plan.stages, plan.costs, strict=True))
        ),
    ]


def event_rows(timeline: Timeline) -> list[Row]:
    """A row an instruction."""
    return [
        ("rank", "stage", "replica", "instruction", "start_s", "end_s", "memory_bytes"),
        *(
            (
                lane.rank,
                lane.stage,
                lane.replica,
                format_instruction(it.instruction),
                it.start_s,
                it.end_s,
                it.memory_bytes,
            )
            for lane in timeline.lanes
            for it in lane.events()
        ),
    ]
