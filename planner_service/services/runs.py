"""Runs: executions of plans, as their jobs report them."""

from planner_service.contract.documents import parse, parse_plan
from planner_service.contract.listing import Page
from planner_service.contract.runs import Run, RunSummary
from planner_service.core.errors import NotFoundError
from planner_service.core.predict import predict
from planner_service.core.timeline import Timeline
from planner_service.core.trace import chrome_trace
from planner_service.services.context import Context, found
from planner_service.services.jobs import settle
from planner_service.services.plans import playable_batches
from planner_service.storage import plans
from planner_service.storage import runs as storage
from planner_service.storage.listing import Cut


def get(context: Context, run_id: str) -> Run:
    """The run. Raises NotFoundError."""
    settle(context)
    with context.database.read() as connection:
        return found("run", run_id, storage.get(connection, run_id))


def newest(context: Context, cut: Cut, plan_id: str | None = None) -> Page[RunSummary]:
    """A page of runs, newest first; of one plan only where one is named."""
    settle(context)
    with context.database.read() as connection:
        return storage.page(connection, cut, plan_id)


def timeline_document(context: Context, run_id: str) -> str:
    """The measured timeline's JSON text. Raises NotFoundError where there is no run, or none measured yet."""
    run = get(context, run_id)
    with context.database.read() as connection:
        document = storage.timeline(connection, run_id)
    if document is None:
        raise NotFoundError(f"run {run_id} has no timeline: it is {run.state}")
    return document


def timelines(context: Context, run_id: str) -> dict[str, Timeline]:
    """What was predicted for the run's batches, and what was measured."""
    measured = parse(Timeline, timeline_document(context, run_id))
    run = get(context, run_id)
    with context.database.read() as connection:
        plan = parse_plan(found("plan", run.plan_id, plans.content(connection, run.plan_id)))
    first_batch = 0 if run.report is None else run.report.first_step
    batches = min(measured.batches, playable_batches(plan))
    predicted = {"predicted": predict(plan, batches=batches, first_batch=first_batch)} if batches else {}
    return {**predicted, "measured": measured}


def trace(context: Context, run_id: str) -> str:
    """Both timelines as one Chrome trace, side by side."""
    return chrome_trace(timelines(context, run_id))
