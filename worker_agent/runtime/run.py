"""Run: executes a plan on this node and writes what came of it: run.json, timeline.json, trace.json, checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

from planner_service.contract.documents import dump, plan_document
from planner_service.contract.run_files import PLAN, REPORT, TIMELINE
from planner_service.core.errors import RunFailedError, require
from planner_service.core.identity import content_id
from planner_service.core.predict import predict, program_of
from planner_service.core.report import RankReport, RunReport, report_run
from planner_service.core.timeline import Timeline
from planner_service.core.trace import chrome_trace
from worker_agent.place import Place
from worker_agent.runtime.checkpoint import latest
from worker_agent.runtime.job import RunJob, read_job
from worker_agent.runtime.launch import Progress, join, launch
from worker_agent.runtime.results import RankResult

MOST_INSTRUCTIONS = 500_000
"""A rank's longest stream: some 10,000 steps of 8 microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """What a run gave: the report and the recorded timeline."""

    report: RunReport
    timeline: Timeline


def resumed(job: RunJob, *, before: int | None = None) -> RunJob:
    """The job from its folder's newest whole checkpoint on; as it is, from step 0, if there is none.

    Checkpoints from the step `before` on are left aside. Raises InvalidInputError if the checkpoint is of another plan
    or seed.
    """
    found = latest(job.directory.checkpoints, before=before)
    if found is None:
        return job
    rule = "must be the one that wrote the checkpoint"
    require(found.plan_id == content_id(job.plan), "plan", f"{rule}, {found.plan_id}", content_id(job.plan))
    require(found.seed == job.seed, "seed", f"{rule}, {found.seed}", job.seed)
    return replace(job, first_step=found.step)


def execute_again(job: RunJob, on_progress: Progress, *, restarts: int, tell: Callable[[str], None]) -> RunOutcome:
    """`execute`, up to `restarts` times more from the newest whole checkpoint where a rank was lost; `tell` hears why.

    Steps after that checkpoint are done again and come out the same, bit for bit: data and random state belong to the
    step. The outcome is that of the last start. Raises as `execute` does, once nothing is left.
    """
    for left in reversed(range(restarts + 1)):
        try:
            return execute(job, on_progress)
        except RunFailedError as error:
            if left == 0:
                raise
            job = resumed(job)
            tell(f"{error}; starting again from step {job.first_step} ({left - 1} restarts left)")
    raise ValueError("restarts must be at least 0")


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
    (root / PLAN).write_text(dump(plan_document(job.plan)), encoding="utf-8")
    (root / TIMELINE).write_text(dump(asdict(measured)), encoding="utf-8")
    (root / REPORT).write_text(dump(document | asdict(report)), encoding="utf-8")
    trace = chrome_trace({"measured": measured, "predicted": predicted})
    (root / "trace.json").write_text(trace, encoding="utf-8")
    return RunOutcome(report=report, timeline=measured)


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
