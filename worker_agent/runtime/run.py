"""Run: executes a plan on this node and writes the results (`RunDirectory`)."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from pipeplan.calibration.missed import costs_as_measured, missed
from pipeplan.documents.files import dump, plan_document
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Plan
from pipeplan.errors import InvalidInputError, RunFailedError, require
from pipeplan.programs.timeline import Summary, Timeline, summarise
from pipeplan.programs.timeline_document import timeline_document
from pipeplan.protocol.runs import PLAN, REPORT, TIMELINE
from pipeplan.simulation.predict import predict, predict_ends
from pipeplan.simulation.report import Compared, Repredicted, RunReport, report_run
from pipeplan.simulation.trace import chrome_trace
from worker_agent.engine.processes import Place
from worker_agent.models.spec import parse_spec
from worker_agent.runtime.job import STEPS, TRACE, RunJob, read_job
from worker_agent.runtime.launch import join, launch
from worker_agent.runtime.manifest import newest
from worker_agent.runtime.measured import RunMeasurements, rows_of_attempt
from worker_agent.runtime.watch import OnProgress

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """A run's results: the report and the recorded timeline, for a long run that of its last batches."""

    report: RunReport
    timeline: Timeline


def execute(job: RunJob, on_progress: OnProgress, place: Place | None = None) -> RunOutcome:
    """Runs the job and writes the files of its directory that are for the user. Raises as `launch` does.

    With a place this is the first of several nodes, and all of them see the directory.
    """
    rule = "must be the blocks' own order, or none: the executor runs chains"
    require(job.plan.order in (None, tuple(range(job.plan.stages[-1].stop))), "plan.order", rule, job.plan.order)
    job.program()  # refuses exchanges that the schedule cannot make before a process starts
    _keep_steps(job)
    results = launch(job, on_progress, place)
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

    document = {"plan_id": content_id(job.plan), "model": job.model, "data": job.data, "seed": job.seed}
    root = job.directory.root
    _write(root / PLAN, dump(plan_document(job.plan)))
    _write(root / TIMELINE, dump(timeline_document(timeline)))
    _written(root / STEPS, partial(measured.write_steps, before=root / STEPS))
    _write(root / TRACE, chrome_trace({"measured": measured.ends(), "predicted": predicted}))
    _write(root / REPORT, dump(document | asdict(report) | {"recorded": measured.recorded()}))
    return RunOutcome(report=report, timeline=timeline)


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


def take_part(job: RunJob, on_progress: OnProgress, place: Place) -> None:
    """Runs this node's part of a job that the first node `execute`s. Raises as `launch` does."""
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
            return execute(job, on_progress)
        except RunFailedError as error:
            if left == 0 or error.rank is None:
                raise
            tell(str(error))  # at once: searching for a whole checkpoint means reading all of it
            try:
                job = resumed(replace(job, first_step=0), before=job.steps, tell=tell)
            except InvalidInputError as refused:
                raise RunFailedError(f"{error}; it cannot start again ({refused})", rank=error.rank) from error
            tell(f"starting again from step {job.first_step} ({left - 1} restarts left)")
    raise ValueError("restarts must be at least 0")


def resumed(job: RunJob, *, before: int | None = None, tell: Callable[[str], None] = _log.warning) -> RunJob:
    """The job from its folder's newest whole checkpoint on; unchanged, from step 0, if none was ever finished.

    `tell` receives which newer ones cannot be used. Checkpoints from the step `before` on are ignored. Raises
    InvalidInputError if all are damaged, or the checkpoint is of another plan, model, data or seed.
    """
    found = newest(job.directory.checkpoints, before=before)
    damaged = [str(defect) for defect in found.defects if not defect.unfinished]
    if found.manifest is None:
        rule = f"must have a whole checkpoint ({'; '.join(damaged)}); without them --resume starts at step 0"
        require(not damaged, "resume", rule, str(job.directory.checkpoints))
        return job
    if found.defects:
        tell(f"{'; '.join(map(str, found.defects))}: going on from step-{found.manifest.step}")

    # The checkpoint must be of the job's own plan, model, data and seed.
    its, own = found.manifest, job.manifest(found.manifest.step)
    rule = "must be the one that wrote the checkpoint"
    for key, given in own.plan.items() if own.plan_id != its.plan_id else ():
        require(given == its.plan.get(key), "plan", f"{rule}, whose {key} is {its.plan.get(key)}", given)
    require(own.plan_id == its.plan_id, "plan", f"{rule}, {its.plan_id}", own.plan_id)
    for field in ("model", "data", "seed"):
        given, written = getattr(own, field), getattr(its, field)
        same = given == written
        if not same and field != "seed":  # SPECs may name the same, with the same options, in other words
            one, other = (parse_spec(str(text), field=field) for text in (given, written))
            same = (one.target, one.options) == (other.target, other.options)
        require(same, field, f"{rule}, {written}", given)
    rule = f"must be given: it was {its.steps}, the steps that the checkpoint's run was to have"
    decays = job.lr_schedule != "constant" and job.decay_steps is None
    require(not decays or job.steps == its.steps, "decay_steps", rule, None)
    return replace(job, first_step=its.step)


def _keep_steps(job: RunJob) -> None:
    """Writes the steps of an attempt that did not end, up to the checkpoint: its ranks' files are removed now."""
    if not job.first_step or not job.directory.job.exists():
        return
    try:
        earlier = replace(read_job(job.directory.job), out=job.out)
    except (InvalidInputError, ValueError) as error:  # of another version, or cut off
        _log.warning("the steps that the earlier attempt measured are not kept: %s", error)
        return
    rows = rows_of_attempt(earlier, job.first_step)
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
