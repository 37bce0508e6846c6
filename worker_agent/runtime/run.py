"""Run: executes a plan on this node and writes the results (`RunDirectory`)."""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pipeplan.calibration.missed import costs_as_measured, missed
from pipeplan.documents.files import dump, plan_document
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Plan
from pipeplan.errors import EndedBySignalError, InvalidInputError, PipeplanError, RunFailedError, require
from pipeplan.programs.timeline import Summary, Timeline, summarise
from pipeplan.programs.timeline_document import timeline_document
from pipeplan.protocol.runs import PLAN, REPORT, TIMELINE
from pipeplan.simulation.predict import predict, predict_ends
from pipeplan.simulation.report import Compared, Repredicted, RunReport, report_run
from pipeplan.simulation.trace import MOST_BYTES, chrome_trace
from worker_agent.engine.processes import Place
from worker_agent.engine.results import DivergedError, RankResult
from worker_agent.models.spec import described
from worker_agent.runtime.checkpoint import newest_finite
from worker_agent.runtime.job import STEPS, TRACE, RunJob, read_job
from worker_agent.runtime.launch import join, launch
from worker_agent.runtime.manifest import is_sealed, steps_in
from worker_agent.runtime.measured import RunMeasurements, last_batches, losses_before, measured_steps, rows_of_attempt
from worker_agent.runtime.resume import option_values, resumed, stored_job
from worker_agent.runtime.stop import heeding_signals
from worker_agent.runtime.watch import OnProgress

_log = logging.getLogger(__name__)

INTERRUPTIONS = (EndedBySignalError, KeyboardInterrupt)

State = Literal["running", "succeeded", "failed", "interrupted"]
"""How far a run has come, as its report says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """A run's results: the report and the recorded timeline, for a long run that of its last batches."""

    report: RunReport
    timeline: Timeline


def execute(
    job: RunJob, on_progress: OnProgress, place: Place | None = None, *, tell: Callable[[str], None] = _log.warning
) -> RunOutcome:
    """Runs the job and writes the files of its directory that are for the user. Raises as `launch` does.

    With a place this is the first of several nodes, and all of them see the directory. A signal ends the run with a
    checkpoint (`stop`), which `tell` receives. However the run ends, its report says how.
    """
    rule = "must be the blocks' own order, or none: the executor runs chains"
    require(job.plan.order in (None, tuple(range(job.plan.stages[-1].stop))), "plan.order", rule, job.plan.order)
    job.program()  # refuses exchanges that the schedule cannot make before a process starts
    try:
        job.directory.ranks.mkdir(parents=True, exist_ok=True)
        job.directory.stop.unlink(missing_ok=True)
    except OSError as error:
        raise RunFailedError(f"cannot prepare the run's folder {job.directory.root}: {error}") from error
    _keep_steps(job)
    try:
        with heeding_signals(job.directory, tell):
            _write_state(job, "running")
            return _reported(job, launch(job, on_progress, place))
    except BaseException as error:
        reason = error
        if isinstance(error, DivergedError):
            good = newest_finite(job.directory.checkpoints).manifest
            words = "there is no checkpoint before it"
            if good is not None:
                words = (
                    f"the last good checkpoint is step-{good.step}: --resume goes on from it (--change learning-rate)"
                )
            reason = DivergedError(f"{error}; {words}", rank=error.rank)
        with suppress(RunFailedError):  # whose cause may be the error's, such as a full disk
            _write_state(job, "interrupted" if isinstance(error, INTERRUPTIONS) else "failed", reason)
        raise reason from error.__cause__


def _reported(job: RunJob, results: tuple[RankResult, ...]) -> RunOutcome:
    """Writes the files of a run that has ended well."""
    begun = replace(read_job(job.directory.job), out=job.out)  # the ranks have found out which stages share weights
    measured = RunMeasurements(begun, results)
    window, first = measured.window, begun.first_step
    predicted, expected = _predicted(begun, begun.plan, window)
    ranks = measured.ranks()
    report = report_run(
        schedule=job.plan.schedule,
        predicted=expected,
        measured=measured.summary(),
        first_step=job.first_step,
        losses=measured.losses,
        ranks=ranks,
    )

    timeline = measured.timeline()
    if window is not None:  # of the two ends only the last one is compared by kind
        last = first + begun.batches - window
        played = predict(begun.plan, batches=window, first_batch=last, among_stages=begun.among_stages)
    else:
        played = predicted
    causes = missed(
        begun.plan,
        played,
        timeline,
        report.throughput_samples_per_s,
        others_took=measured.others([rank.off_processor_fraction for rank in ranks]),
    )
    again = _predicted_again(begun, measured, report.throughput_samples_per_s.measured)
    report = replace(report, missed=causes, repredicted=again)

    root = job.directory.root
    _write(root / PLAN, dump(plan_document(job.plan)))
    timeline = _write_timeline(root / TIMELINE, timeline, most_bytes=None if job.recorded_batches else MOST_BYTES)
    _written(root / STEPS, partial(measured.write_steps, before=root / STEPS))
    report = replace(report, earlier_losses=losses_before(root / STEPS, first))
    recorded = measured.recorded() | {"timeline_batches": timeline.batches}
    ends = "the first {first_batches:,} and the last {last_batches:,} of {of:,} batches were recorded"
    notes = {"recorded": ends.format(of=begun.batches, **recorded)} if recorded["left_out"] else {}
    most_bytes = None if begun.recorded_batches else MOST_BYTES
    timelines = {"measured": measured.ends, "predicted": predicted}
    _write(root / TRACE, chrome_trace(timelines, most_bytes=most_bytes, notes=notes))
    document = _document(job, "succeeded") | asdict(report) | {"recorded": recorded}
    _write(root / REPORT, dump(document))
    return RunOutcome(report=report, timeline=timeline)


def _document(job: RunJob, state: State, error: BaseException | None = None) -> dict[str, Any]:
    """What the report says of every run: how it was begun, how far it is, and why it ended."""
    sentence = None
    if error is not None:
        sentence = str(error) if isinstance(error, PipeplanError) else described(error)
    sealed = [step for step in steps_in(job.directory.checkpoints) if is_sealed(job.directory.checkpoints, step)]
    return {
        "plan_id": content_id(job.plan),
        "model": job.model,
        "data": job.data,
        "seed": job.seed,
        "state": state,
        "error": sentence,
        "step": job.first_step + (0 if state == "running" else measured_steps(job)),
        "checkpoint": max(sealed, default=None),
        "options": option_values(job),
        "changes": [asdict(c) | {"old": json.loads(c.old), "new": json.loads(c.new)} for c in job.changes],
    }


def _write_state(job: RunJob, state: State, error: BaseException | None = None) -> None:
    _written(
        job.directory.root / REPORT,
        lambda aside: aside.write_text(dump(_document(job, state, error)), encoding="utf-8"),
        when=f"the run is {state}:",
    )


def _write_timeline(path: Path, timeline: Timeline, *, most_bytes: int | None) -> Timeline:
    """Writes, and returns, the last batches of a timeline that fit in `most_bytes`, at least one."""
    text = dump(timeline_document(timeline), indent=None)
    while most_bytes is not None and len(text) > most_bytes and timeline.batches > 1:
        timeline = last_batches(timeline, max(int(0.95 * timeline.batches * most_bytes / len(text)), 1))
        text = dump(timeline_document(timeline), indent=None)
    _write(path, text)
    return timeline


def _predicted(job: RunJob, plan: Plan, window: int | None) -> tuple[Timeline, Summary]:
    """The play of the job's batches with a plan's costs, all or both ends, and the summary of all."""
    first, among = job.first_step, job.among_stages
    if window is not None:
        return predict_ends(plan, batches=job.batches, window=window, first_batch=first, among_stages=among)
    played = predict(plan, batches=job.batches, first_batch=first, among_stages=among)
    return played, summarise(played)


def _predicted_again(job: RunJob, measured: RunMeasurements, samples_per_s: float) -> Repredicted | None:
    """The prediction that the run's first second gives. It is made after the run: no rank waits for it."""
    found = measured.beginning()
    if found is None:
        return None
    begun, others = found
    plan, batches = job.plan, begun.batches
    played = predict(plan, batches=batches, first_batch=job.first_step, among_stages=job.among_stages)
    costs = costs_as_measured(plan, played, begun, others)
    _, expected = _predicted(job, replace(plan, costs=costs), measured.window)
    throughput = Compared(predicted=expected.throughput_samples_per_s, measured=samples_per_s)
    return Repredicted(batches=batches, elapsed_s=begun.makespan_s, throughput_samples_per_s=throughput)


def take_part(
    job: RunJob, on_progress: OnProgress, place: Place, *, tell: Callable[[str], None] = _log.warning
) -> None:
    """Runs this node's part of a job that the first node `execute`s. Raises as `launch` does."""
    with heeding_signals(job.directory, tell):
        join(job, on_progress, place)


def execute_again(job: RunJob, on_progress: OnProgress, *, restarts: int, tell: Callable[[str], None]) -> RunOutcome:
    """`execute`; where a rank was lost, again from the newest whole checkpoint, up to `restarts` times.

    `tell` receives the reason. Steps after that checkpoint are repeated with the same result, bit for bit, because data
    and random state belong to the step. If the checkpoint is that of the last step, only the run's report is missing:
    then the steps since the checkpoint before it are repeated. The outcome is that of the last start. Raises as
    `execute` does, once no restart is left.
    """
    for left in reversed(range(restarts + 1)):
        try:
            return execute(job, on_progress, tell=tell)
        except RunFailedError as error:
            if left == 0 or error.rank is None or isinstance(error, DivergedError):  # which would come again
                raise
            tell(str(error))  # at once: searching for a whole checkpoint means reading all of it
            try:
                job = resumed(replace(job, first_step=0), before=job.steps, tell=tell)
            except InvalidInputError as refused:
                raise RunFailedError(f"{error}; it cannot start again ({refused})", rank=error.rank) from error
            tell(f"starting again from step {job.first_step} ({left - 1} restarts left)")
    raise ValueError("restarts must be at least 0")


def _keep_steps(job: RunJob) -> None:
    """Writes the steps of an attempt that did not end, up to the checkpoint: its ranks' files are removed now."""
    if not job.first_step:
        return
    earlier = stored_job(job.directory.job, lambda why: _log.warning("the steps measured before are not kept: %s", why))
    if earlier is None:
        return
    rows = rows_of_attempt(replace(earlier, out=job.out), job.first_step)
    if rows is not None:
        steps = job.directory.root / STEPS
        _written(steps, partial(rows.write, before=steps), when="the training does not go on:")


def _write(path: Path, text: str) -> None:
    _written(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def _written(path: Path, write: Callable[[Path], object], *, when: str = "the training is done, but") -> None:
    """Writes a file, whole or not at all."""
    aside = path.with_name(path.name + ".part")
    try:
        write(aside)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise RunFailedError(f"{when} {path} cannot be written: {error}") from error
