"""Charts of the first page as files: the throughput of a model's plans over time, and the errors of predictions."""

from collections.abc import Sequence

from pipeplan.errors import InvalidInputError
from pipeplan.protocol.plans import PlanSummary
from pipeplan.protocol.runs import RunSummary
from planner_service.documents.chart_files import Format, Row, csv_text, svg_text
from planner_service.overview.drawings import Errors, History, errors, history, measured, played
from planner_service.platform.axes import FILE

HEIGHT = 240.0


def throughput_rows(plans: Sequence[PlanSummary]) -> list[Row]:
    """A row a played plan, the oldest first."""
    heads: Row = ("plan_id", "created_at", "schedule", "devices", "batch_size", "samples_per_s")
    rows = (
        (plan.id, plan.created_at.isoformat(), plan.schedule, plan.devices, plan.batch_size, rate)
        for plan, rate in played(plans)
    )
    return [heads, *rows]


def error_rows(runs: Sequence[RunSummary]) -> list[Row]:
    """A row a measured run, the oldest first; `error` is measured / predicted - 1."""
    heads: Row = ("run_id", "created_at", "model", "predicted_samples_per_s", "measured_samples_per_s", "error")
    rows = (
        (it.id, it.created_at.isoformat(), it.model, it.predicted_samples_per_s, it.measured_samples_per_s, error)
        for it, error in measured(runs)
    )
    return [heads, *rows]


def throughput_file(kind: Format, model: str, plans: Sequence[PlanSummary]) -> str:
    """The chart of a model's card. Raises InvalidInputError where there is nothing to draw."""
    if kind == "csv":
        return csv_text(throughput_rows(plans))
    return _svg("throughput", f"Throughput of the newest played plans of {model}, over time", history(plans, FILE))


def errors_file(kind: Format, runs: Sequence[RunSummary]) -> str:
    """The chart of predictions against runs. Raises InvalidInputError where there is nothing to draw."""
    if kind == "csv":
        return csv_text(error_rows(runs))
    title = "How much faster or slower than predicted the newest measured runs were"
    return _svg("errors", title, errors(runs, FILE))


def _svg(name: str, title: str, chart: History | Errors | None) -> str:
    if chart is None:
        what = "no played plan of this model" if name == "throughput" else "no measured run"
        raise InvalidInputError("chart", f"cannot be drawn: there is {what}", name)
    return svg_text("overview/chart.svg", title=title, height=HEIGHT, name=name, chart=chart)
