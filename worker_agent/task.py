"""Task: one job of an agent, in a process of its own: `python -m worker_agent.task FOLDER AGENT`.

The agent, told by its process id, reads progress from its standard output, a JSON line each, the result from
FOLDER/result.json, and why it failed from its standard error.
"""

import sys
from pathlib import Path

from planner_service.contract.console import run_command
from planner_service.contract.documents import dump, parse, parse_plan, read_text
from planner_service.contract.extras import require_extra
from planner_service.contract.jobs import ProfileResult, ProfileTask, Progress, RunResult, RunTask
from worker_agent.parent import exit_with_parent


def write_task(folder: Path, task: ProfileTask | RunTask, plan: str | None) -> None:
    """Puts what the process needs into its folder: the task and, for a run, the plan's document."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{task.kind}.json").write_text(task.model_dump_json(), encoding="utf-8")
    if plan is not None:
        (folder / "plan.json").write_text(plan, encoding="utf-8")


def perform(folder: Path) -> None:
    """Does the task in a folder and writes its result. Raises what goes wrong.

    A result that is there already is of an earlier attempt, whose agent ended before it could report it: it stands.
    """
    if (folder / "result.json").exists():
        return
    require_extra("worker")
    if (folder / "profile.json").exists():
        result: ProfileResult | RunResult = _profile(parse(ProfileTask, read_text(folder / "profile.json")))
    else:
        result = _run(folder, parse(RunTask, read_text(folder / "run.json")))
    aside = folder / "result.part"
    aside.write_text(dump(result), encoding="utf-8")
    aside.replace(folder / "result.json")


def _profile(task: ProfileTask) -> ProfileResult:
    from worker_agent.profiler.job import ProfileJob
    from worker_agent.profiler.measure import measure

    profile, cluster = measure(ProfileJob(task=task), _tell)
    return ProfileResult(profile=profile, cluster=cluster)


def _run(folder: Path, task: RunTask) -> RunResult:
    """Goes on from an earlier attempt's newest checkpoint, but not from one of the last step.

    With that one the training is done, but its timeline is lost: the steps since the checkpoint before it, all of
    them if there is none, are done again to measure them.
    """
    from worker_agent.runtime.job import RunJob
    from worker_agent.runtime.run import execute, resumed

    job = RunJob(
        plan=parse_plan(read_text(folder / "plan.json")),
        model=task.model,
        data=task.data,
        loss=task.loss,
        steps=task.steps,
        seed=task.seed,
        learning_rate=task.learning_rate,
        checkpoint_every=task.checkpoint_every,
        out=str(folder / "out"),
    )
    going_on = resumed(job, before=task.steps)
    outcome = execute(going_on, lambda done, loss: _tell(done, task.steps, f"training, loss {loss:.4f}"))
    return RunResult(report=outcome.report, timeline=outcome.timeline)


def _tell(done: int, total: int, message: str) -> None:
    sys.stdout.write(Progress(done=done, total=total, message=message).model_dump_json() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    exit_with_parent(int(sys.argv[2]))
    run_command(lambda: perform(Path(sys.argv[1])))
