"""Task: one job of an agent, in a process of its own: `python -m worker_agent.agent.task FOLDER AGENT`.

AGENT is the agent's process id. The agent reads progress from its standard output, a JSON line each, the result from
FOLDER/result.json, and why it failed from its standard error.
"""

import sys
from dataclasses import asdict
from pathlib import Path

from pipeplan.cli.console import require_extra, run_command
from pipeplan.documents.files import dump, parse, parse_plan, read_text
from pipeplan.documents.forms import Form
from pipeplan.errors import EndedBySignalError, require
from pipeplan.programs.timeline_document import timeline_document
from pipeplan.protocol.estimates import EstimateResult, EstimateTask
from pipeplan.protocol.jobs import (
    AgentResult,
    LinksResult,
    LinksTask,
    PartResult,
    ProfileResult,
    ProfileTask,
    Progress,
    RunResult,
    RunTask,
    Task,
)
from worker_agent.agent.child import LOST_PEER
from worker_agent.agent.limits import JobLimits
from worker_agent.agent.node import use_interface_towards
from worker_agent.engine.processes import OtherNodeError, Place, exit_with_parent


def write_task(
    folder: Path,
    task: Task,
    plan: str | None,
    *,
    limits: JobLimits | None = None,
    place: Place | None = None,
    out: Path | None = None,
) -> None:
    """Writes the process's inputs to its folder: the task and, for a run, the plan's document.

    `place` is the node's place among several, `out` the folder of a run's files (default: inside the task's folder).
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{task.kind}.json").write_text(task.model_dump_json(), encoding="utf-8")
    (folder / "limits.json").write_text(dump(limits or JobLimits()), encoding="utf-8")
    (folder / "out.path").write_text(str(out or folder / "out"), encoding="utf-8")
    if plan is not None:
        (folder / "plan.json").write_text(plan, encoding="utf-8")
    if place is not None:
        (folder / "place.json").write_text(dump(place), encoding="utf-8")


def perform(folder: Path) -> None:
    """Does the task in a folder and writes its result. Raises the task's errors.

    A result that is already there is kept: it is from an earlier attempt, whose agent ended before it could report.
    """
    if (folder / "result.json").exists():
        return
    require_extra("worker")
    place = parse(Place, read_text(folder / "place.json")) if (folder / "place.json").exists() else None
    if place is not None:
        use_interface_towards(place.address, place.port)
    result: AgentResult
    if (folder / "profile.json").exists():
        from worker_agent.profiler.job import ProfileJob
        from worker_agent.profiler.launch import measure

        profile_task = parse(ProfileTask, read_text(folder / "profile.json"))
        profile, cluster = measure(ProfileJob(task=profile_task), _tell)
        result = ProfileResult(profile=profile, cluster=cluster)
    elif (folder / "estimate.json").exists():
        result = _estimate(parse(EstimateTask, read_text(folder / "estimate.json")))
    elif (folder / "links.json").exists():
        from worker_agent.profiler.node_links import measure_cluster

        links_task = parse(LinksTask, read_text(folder / "links.json"))
        links = measure_cluster(folder, links_task, place)
        result = PartResult() if links is None else LinksResult(cluster=links)
    else:
        result = _run(folder, parse(RunTask, read_text(folder / "run.json")), place)
    aside = folder / "result.part"
    aside.write_text(dump(result), encoding="utf-8")
    aside.replace(folder / "result.json")


def _estimate(task: EstimateTask) -> EstimateResult:
    """The model's profile by a datasheet. Raises InvalidInputError for one that is not known by name."""
    import torch

    from worker_agent.profiler.analytic import estimate_profile
    from worker_agent.profiler.datasheets import DATASHEETS
    from worker_agent.profiler.forms import profile_with_forms
    from worker_agent.profiler.job import ProfileJob

    torch.set_num_threads(1)  # nothing is computed, and waiting threads take processor time
    require(task.analytic in DATASHEETS, "analytic", f"must be one of {', '.join(DATASHEETS)}", task.analytic)
    asked, sizes = task.request, task.microbatch_sizes
    profiled = ProfileTask(
        model=asked.model,
        microbatch_sizes=sizes,
        dtype=asked.dtype,
        sequence_length=asked.sequence_length,
        optimizer=asked.options.optimizer_or_default,  # type: ignore[arg-type]  # the options allow the same names
    )
    sheet = DATASHEETS[task.analytic]

    def tell(size: int) -> None:
        _tell(sizes.index(size), len(sizes), f"estimating microbatches of {size}")

    if task.forms is None:
        return EstimateResult(profile=estimate_profile(ProfileJob(task=profiled), sheet, tell))

    def on_form(done: int, every: int, form: Form) -> None:
        _tell(done, every, f"estimating tensor {form.tensor}, context {form.context}, expert {form.expert}")

    return EstimateResult(profile=profile_with_forms(task.forms, profiled, sheet, on_form))


def _run(folder: Path, task: RunTask, place: Place | None) -> RunResult | PartResult:
    """Trains, from an earlier attempt's newest checkpoint on, but not from a checkpoint of the last step.

    With a checkpoint of the last step the training is done, but its timeline is lost. The steps since the checkpoint
    before it, or all steps if there is none, are then done again to measure them. Among several nodes the first one
    decides where they begin.
    """
    from worker_agent.runtime.job import RunJob, holding
    from worker_agent.runtime.resume import resumed
    from worker_agent.runtime.run import execute, take_part
    from worker_agent.runtime.watch import RunProgress, describe_pace

    job = RunJob(
        plan=parse_plan(read_text(folder / "plan.json")),
        model=task.model,
        data=task.data,
        steps=task.steps,
        out=read_text(folder / "out.path"),
        **asdict(task.training),
    )

    def tell(now: RunProgress) -> None:
        _tell(now.done, now.steps, f"training, {describe_pace(now)}")

    if place is not None and place.node_rank > 0:
        take_part(job, tell, place)
        return PartResult()
    with holding(job.directory.root):
        outcome = execute(resumed(job, before=task.steps), tell, place)
    return RunResult(report=outcome.report, timeline=timeline_document(outcome.timeline))


def _tell(done: int, total: int, message: str) -> None:
    sys.stdout.write(Progress(done=done, total=total, message=message).model_dump_json() + "\n")
    sys.stdout.flush()


def main(folder: Path, agent: int) -> None:
    """The process's whole life."""
    exit_with_parent(agent)
    parse(JobLimits, read_text(folder / "limits.json")).apply()
    try:
        perform(folder)
    except (EndedBySignalError, OtherNodeError) as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(LOST_PEER) from None


if __name__ == "__main__":
    run_command(lambda: main(Path(sys.argv[1]), int(sys.argv[2])))
