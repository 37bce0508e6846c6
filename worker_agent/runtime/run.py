"""Run: executes a plan on this node and writes what came of it: run.json, timeline.json, trace.json, checkpoints."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from planner_service.contract.documents import dump, plan_document
from planner_service.contract.run_files import PLAN, REPORT, TIMELINE
from planner_service.core.errors import InvalidInputError, RunFailedError, require
from planner_service.core.identity import content_id
from planner_service.core.predict import predict, program_of
from planner_service.core.report import RankReport, RunReport, report_run
from planner_service.core.timeline import Timeline
from planner_service.core.trace import chrome_trace
from worker_agent.models.spec import parse_spec
from worker_agent.place import Place
from worker_agent.runtime.job import RunJob, read_job
from worker_agent.runtime.launch import Progress, join, launch
from worker_agent.runtime.manifest import Manifest, newest
from worker_agent.runtime.results import RankResult

_log = logging.getLogger(__name__)

MOST_INSTRUCTIONS = 500_000
"""A rank's longest stream: some 10,000 steps of 8 microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """What a run gave: the report and the recorded timeline."""

    report: RunReport
    timeline: Timeline


def resumed(job: RunJob, *, before: int | None = None, tell: Callable[[str], None] = _log.warning) -> RunJob:
    """The job from its folder's newest whole checkpoint on; as it is, from step 0, if none was ever finished.

    `tell` hears which newer ones cannot be used. Checkpoints from the step `before` on are left aside. Raises
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
    _require_same(job, found.manifest)
    return replace(job, first_step=found.manifest.step)


def _require_same(job: RunJob, found: Manifest) -> None:
    """Raises InvalidInputError unless the checkpoint is of what the job goes on with."""
    rule, own = "must be the one that wrote the checkpoint", job.manifest(found.step)
    for key, given in own.plan.items() if own.plan_id != found.plan_id else ():
        require(given == found.plan.get(key), "plan", f"{rule}, whose {key} is {found.plan.get(key)}", given)
    require(own.plan_id == found.plan_id, "plan", f"{rule}, {found.plan_id}", own.plan_id)
    for field in ("model", "data", "seed"):
        given, written = getattr(own, field), getattr(found, field)
        require(_same_spec(given, written, field), field, f"{rule}, {written}", given)
    rule = f"must be given: it was {found.steps}, the steps that the checkpoint's run was to have"
    decays = job.lr_schedule != "constant" and job.decay_steps is None
    require(not decays or job.steps == found.steps, "decay_steps", rule, None)


def _same_spec(given: object, written: object, field: str) -> bool:
    """Whether two values are equal, or SPECs that name the same with the same options."""
    if given == written or field == "seed":
        return given == written
    one, other = (parse_spec(str(text), field=field) for text in (given, written))
    return (one.target, one.options) == (other.target, other.options)


def execute_again(job: RunJob, on_progress: Progress, *, restarts: int, tell: Callable[[str], None]) -> RunOutcome:
    """`execute`, up to `restarts` times more from the newest whole checkpoint where a rank was lost; `tell` hears why.

    Steps after that checkpoint are done again and come out the same, bit for bit: data and random state belong to the
    step. Where the last step's checkpoint is there already, its report is not: the steps since the one before are done
    again. The outcome is that of the last start. Raises as `execute` does, once nothing is left.
    """
    for left in reversed(range(restarts + 1)):
        try:
            return execute(job, on_progress)
        except RunFailedError as error:
            if left == 0 or error.rank is None:
                raise
            tell(str(error))  # at once: to look for a whole checkpoint is to read all of it
            job = _again(job, error, tell)
            tell(f"starting again from step {job.first_step} ({left - 1} restarts left)")
    raise ValueError("restarts must be at least 0")


def _again(job: RunJob, error: RunFailedError, tell: Callable[[str], None]) -> RunJob:
    try:
        return resumed(replace(job, first_step=0), before=job.steps, tell=tell)
    except InvalidInputError as refused:
        raise RunFailedError(f"{error}; it cannot start again ({refused})", rank=error.rank) from error


def take_part(job: RunJob, on_progress: Progress, place: Place) -> None:
    """Runs this node's part of a job that the first node `execute`s. Raises as `launch` does."""
    join(job, on_progress, place)


def execute(job: RunJob, on_progress: Progress, place: Place | None = None) -> RunOutcome:
    """Runs the job and writes the files of its directory that are for the user. Raises as `launch` does.

    With a place it is the first of several nodes that does so, and all of them see the directory.
    Every instruction of a run is made before it starts and recorded: a run of more than `MOST_INSTRUCTIONS` a rank is
    refused with an InvalidInputError that says how far one goes.
    """
    rule = "must be the blocks' own order, or none: the executor runs chains"
    require(job.plan.order in (None, tuple(range(job.plan.stages[-1].stop))), "plan.order", rule, job.plan.order)
    _require_length(job)
    results = launch(job, on_progress, place)
    measured = Timeline(lanes=tuple(r.lane for r in results), batch_size=job.plan.batch_size, batches=job.batches)
    begun = read_job(job.directory.job)  # the ranks have found out which stages share weights
    predicted = predict(job.plan, batches=job.batches, first_batch=job.first_step, among_stages=begun.among_stages)
    report = report_run(
        schedule=job.plan.schedule,
        predicted=predicted,
        measured=measured,
        first_step=job.first_step,
        losses=_losses(job, results),
        ranks=tuple(_rank_report(result) for result in results),
    )
    document = {"plan_id": content_id(job.plan), "model": job.model, "data": job.data, "seed": job.seed}
    root = job.directory.root
    trace = chrome_trace({"measured": measured, "predicted": predicted})
    _write(root / PLAN, dump(plan_document(job.plan)))
    _write(root / TIMELINE, dump(asdict(measured)))
    _write(root / "trace.json", trace)
    _write(root / REPORT, dump(document | asdict(report)))
    return RunOutcome(report=report, timeline=measured)


def _write(path: Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise RunFailedError(f"the training is done, but {path} cannot be written: {error}") from error


def _require_length(job: RunJob) -> None:
    streams = program_of(job.plan, batches=2, among_stages=job.among_stages).streams
    a_batch = max(len(stream.instructions) for stream in streams) / 2
    most = job.first_step + int(MOST_INSTRUCTIONS / a_batch)
    rule = f"must be at most {most} in one go for this plan; train on from there with --resume"
    require(job.steps <= most, "steps", rule, job.steps)


def _losses(job: RunJob, results: Sequence[RankResult]) -> tuple[float, ...]:
    """A loss a step: the mean over the last stage's replicas and, for PipeDream, over the step's updates."""
    columns = [result.losses for result in results if result.losses]
    updates = [fmean(column) for column in zip(*columns, strict=True)]
    a_step = len(updates) // job.batches
    return tuple(fmean(updates[i : i + a_step]) for i in range(0, len(updates), a_step))


def _rank_report(result: RankResult) -> RankReport:
    return RankReport(
        rank=result.lane.rank,
        stage=result.lane.stage,
        replica=result.lane.replica,
        peak_memory_bytes=result.lane.peak_memory_bytes,
        peak_resident_bytes=result.peak_resident_bytes,
    )
