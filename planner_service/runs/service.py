"""Runs: executions of plans, as their jobs report them."""

import gzip
import math
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from pipeplan.documents.identity import canonical_json
from pipeplan.errors import NotFoundError, require
from pipeplan.programs.timeline import Timeline
from pipeplan.programs.timeline_columns import timeline_columns
from pipeplan.programs.timeline_document import TimelineDocument
from pipeplan.protocol.listing import Page
from pipeplan.protocol.runs import Losses, OverlayColumns, Run, RunQuery, RunSummary
from pipeplan.simulation.overlay import holds, overlaid
from pipeplan.simulation.predict import predict
from pipeplan.simulation.trace import MOST_BYTES, chrome_trace
from planner_service.plans import service as plans
from planner_service.platform.context import Context, found
from planner_service.platform.listing import Cut
from planner_service.runs import store as storage
from planner_service.runs.timelines import (
    EARLIER_LOSSES,
    Extent,
    TimelineWindow,
    earlier_losses,
    extent_of,
    read,
    read_losses,
)

MAX_INSTRUCTIONS = 250_000
"""The upper bound on a timeline's instructions in one answer: some 20 MB of JSON, and a second of one core."""

MORE_BATCHES = 2
"""Batches that are read and played in addition to those that an overlay shows."""

WIDER = 4
"""How many times as much is read of a timeline whose end holds too few batches."""


def get(context: Context, run_id: str) -> Run:
    """The run. Raises NotFoundError."""
    with context.database.read() as connection:
        return found("run", run_id, storage.get(connection, run_id))


def page(context: Context, query: RunQuery) -> Page[RunSummary]:
    """The runs that the query asks for."""
    with context.database.read() as connection:
        return storage.page(connection, query)


def newest(context: Context, cut: Cut, plan_id: str | None = None) -> Page[RunSummary]:
    """A page of runs, newest first; of one plan only where one is named."""
    return page(context, RunQuery(limit=cut.limit, cursor=cut.cursor, plan_id=plan_id))


def losses(context: Context, run_id: str, start: int, stop: int | None) -> Losses:
    """The losses of the run's steps [start, stop), counted from the first that is known. Raises NotFoundError."""
    run = get(context, run_id)
    first_step = 0 if run.report is None else run.report.first_loss_step
    with context.database.read() as connection:
        earlier = earlier_losses(connection, run_id)
        before = read_losses(connection, run_id, start, stop, EARLIER_LOSSES)
        after_stop = None if stop is None else max(stop - earlier, 0)
        values = before + read_losses(connection, run_id, max(start - earlier, 0), after_stop)
    return Losses(run_id=run_id, first_step=first_step + start, losses=values)


def timeline(context: Context, run_id: str, window: TimelineWindow | None = None) -> TimelineDocument:
    """The measured timeline, in the window if one is given.

    Raises NotFoundError where there is no run, or nothing measured yet; InvalidInputError where it is too much.
    """
    with context.database.read() as connection:
        head = _head(connection, run_id)
        extent = extent_of(connection, run_id, window)
        asked = None if window is None else f"[{window.start_s:g}, {window.stop_s:g})"
        span = f"the {extent.instructions} instructions there span {extent.first_s:g} to {extent.last_s:g} s"
        rule = (
            f"must, with stop, name a window of at most {MAX_INSTRUCTIONS} instructions ({span}): "
            "ask for less, as in ?start=0&stop=60"
        )
        require(extent.instructions <= MAX_INSTRUCTIONS, "start", rule, asked)
        return read(connection, run_id, head, window)


def timelines(context: Context, run_id: str) -> dict[str, Timeline]:
    """The predicted and the measured timeline of the run's batches; for a very long run, the end of both."""
    run = get(context, run_id)
    with context.database.read() as connection:
        head = _head(connection, run_id)
        whole = extent_of(connection, run_id)
        if whole.instructions <= MAX_INSTRUCTIONS:
            measured = read(connection, run_id, head).timeline()
        else:  # its end, with the batches of this share of the time
            share = MAX_INSTRUCTIONS / whole.instructions / 2
            last = read(connection, run_id, head, _end_of(whole, share)).timeline()
            measured = replace(last, batches=max(1, round(share * last.batches)))

    plan = plans.get(context, run.plan_id)
    batches = min(measured.batches, plans.playable_batches(plan))
    if not batches or run.report is None:
        return {"measured": measured}
    first_batch = run.report.first_step + run.report.steps - measured.batches
    return {"predicted": predict(plan, batches=batches, first_batch=first_batch), "measured": measured}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """A run's last batches as measured and, if the plan is not too large to be played, as predicted."""

    predicted: Timeline | None
    measured: Timeline


def overlay(context: Context, run_id: str, batches: int) -> Overlay:
    """The run's last batches, at most `batches`.

    Raises NotFoundError if there is no such run, or nothing measured yet.
    """
    run = get(context, run_id)
    if run.report is None:
        raise NotFoundError(f"run {run_id} has no timeline: it is {run.state}")
    plan, report = plans.get(context, run.plan_id), run.report
    # The pipeline must be full at the beginning of the batches that are shown.
    more = batches + MORE_BATCHES + -(-plan.depth // plan.microbatches)
    played = min(more, report.steps, plans.playable_batches(plan))
    first_batch = report.first_step + report.steps - played
    predicted = predict(plan, batches=played, first_batch=first_batch) if played else None
    with context.database.read() as connection:
        head, whole = _head(connection, run_id), extent_of(connection, run_id)
        share = min((more + MORE_BATCHES) / report.steps, MAX_INSTRUCTIONS / max(whole.instructions, 1))
        measured = read(connection, run_id, head, _end_of(whole, share)).timeline()
        # a checkpoint may have taken as long as many batches
        while share < 1 and predicted is not None and not holds(measured, predicted, batches):
            share *= WIDER
            window = _end_of(whole, share)
            if extent_of(connection, run_id, window).instructions > MAX_INSTRUCTIONS:
                break
            measured = read(connection, run_id, head, window).timeline()
    if predicted is None:
        return Overlay(predicted=None, measured=overlaid(measured, measured, batches)[1])
    predicted, measured = overlaid(predicted, measured, batches)
    return Overlay(predicted=predicted, measured=measured)


def _end_of(whole: Extent, share: float) -> TimelineWindow:
    """The last part of a timeline, by time."""
    start_s = whole.last_s - share * (whole.last_s - whole.first_s) if share < 1 else -math.inf
    return TimelineWindow(start_s=start_s, stop_s=math.inf)


def overlay_packed(context: Context, run_id: str, batches: int) -> bytes:
    """The overlay's columns as JSON, compressed by gzip; read and played once, then cached. Raises NotFoundError."""
    identity = f"{run_id}.{batches}"
    ready = context.documents.get("timelines", identity)
    if ready is None:
        made = overlay(context, run_id, batches)
        columns = OverlayColumns(
            predicted=None if made.predicted is None else timeline_columns(made.predicted),
            measured=timeline_columns(made.measured),
        )
        ready = gzip.compress(canonical_json(columns).encode(), mtime=0)
        context.documents.put("timelines", identity, ready)
    return ready


def trace(context: Context, run_id: str) -> str:
    return chrome_trace(timelines(context, run_id), most_bytes=MOST_BYTES)


def _head(connection: Connection, run_id: str) -> str:
    state, head = found("run", run_id, storage.timeline_head(connection, run_id))
    if head is None:
        raise NotFoundError(f"run {run_id} has no timeline: it is {state}")
    return head
