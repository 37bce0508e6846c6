"""Run: executes a plan on this node and writes what came of it (`RunDirectory`)."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from planner_service.contract.documents import dump, plan_document
from planner_service.contract.run_files import PLAN, REPORT, TIMELINE
from planner_service.core.errors import RunFailedError, require
from planner_service.core.identity import content_id
from planner_service.core.predict import predict
from planner_service.core.report import RankReport, RunReport, report_run
from planner_service.core.run_ends import predict_ends
from planner_service.core.summary import Summary, summarise
from planner_service.core.timeline import Timeline
from planner_service.core.trace import chrome_trace
from worker_agent.place import Place
from worker_agent.runtime.checkpoint import latest
from worker_agent.runtime.job import RunJob, read_job
from worker_agent.runtime.launch import join, launch
from worker_agent.runtime.measured import Measured
from worker_agent.runtime.results import RankResult
from worker_agent.runtime.watch import OnProgress

STEPS, TRACE = "steps.csv", "trace.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """What a run gave: the report and the recorded timeline, of a long run that of its last batches."""

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


def execute_again(job: RunJob, on_progress: OnProgress, *, restarts: int, tell: Callable[[str], None]) -> RunOutcome:
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


def take_part(job: RunJob, on_progress: OnProgress, place: Place) -> None:
    """Runs this node's part of a job that the first node `execute`s. Raises as `launch` does."""
    join(job, on_progress, place)


def execute(job: RunJob, on_progress: OnProgress, place: Place | None = None) -> RunOutcome:
    """Runs the job and writes the files of its directory that are for the user. Raises as `launch` does.

    With a place it is the first of several nodes that does so, and all of them see the directory.
    """
    rule = "must be the blocks' own order, or none: the executor runs chains"
    require(job.plan.order in (None, tuple(range(job.plan.stages[-1].stop))), "plan.order", rule, job.plan.order)
    results = launch(job, on_progress, place)
    begun = replace(read_job(job.directory.job), out=job.out)  # the ranks have found out which stages share weights
    measured = Measured(begun, results)
    predicted, expected = _predicted(begun, measured.window)
    report = report_run(
        schedule=job.plan.schedule,
        predicted=expected,
        measured=measured.summary(),
        first_step=job.first_step,
        losses=measured.losses,
        ranks=tuple(_rank_report(result) for result in results),
    )
    document = {"plan_id": content_id(job.plan), "model": job.model, "data": job.data, "seed": job.seed}
    root = job.directory.root
    (root / PLAN).write_text(dump(plan_document(job.plan)), encoding="utf-8")
    (root / TIMELINE).write_text(dump(asdict(measured.timeline())), encoding="utf-8")
    measured.write_steps(root / STEPS)
    (root / REPORT).write_text(dump(document | asdict(report) | {"recorded": measured.recorded()}), encoding="utf-8")
    trace = chrome_trace({"measured": measured.ends(), "predicted": predicted})
    (root / TRACE).write_text(trace, encoding="utf-8")
    return RunOutcome(report=report, timeline=measured.timeline())


def _predicted(job: RunJob, window: int | None) -> tuple[Timeline, Summary]:
    """What the plan predicts for what is recorded of the run, and for all of it."""
    if window is not None:
        return predict_ends(
            job.plan,
            batches=job.batches,
            window=window,
            first_batch=job.first_step,
            among_stages=job.among_stages,
        )
    timeline = predict(job.plan, batches=job.batches, first_batch=job.first_step, among_stages=job.among_stages)
    return timeline, summarise(timeline)


def _rank_report(result: RankResult) -> RankReport:
    return RankReport(
        rank=result.lane.rank,
        stage=result.lane.stage,
        replica=result.lane.replica,
        peak_memory_bytes=result.peak_memory_bytes,
        peak_resident_bytes=result.peak_resident_bytes,
    )
