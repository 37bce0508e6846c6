"""What a solver has found so far, on standard error while it searches, where that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeplan.planners.problem import Observer, SearchProgress, unobserved
from planner_service.contract.jobs import Job


@contextmanager
def shown() -> Iterator[Observer]:
    """The observer to search with; nothing is shown where standard error is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield unobserved
        return
    with console.status("searching") as status:
        yield lambda progress: status.update(sentence(progress))


@contextmanager
def waiting() -> Iterator[Callable[[Job], None]]:
    """Shows how far a plan is that a service makes as a job, where standard error is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda job: None
        return
    with console.status("asking") as status:
        yield lambda job: status.update(_state(job))


def _state(job: Job) -> str:
    if job.state == "queued":
        return f"job {job.id} waits for a solver"
    return f"job {job.id}: " + (job.progress.message if job.progress else "searching")


def sentence(progress: SearchProgress) -> str:
    """The best and the bound, as rates."""
    best = "none yet" if progress.best_s is None else f"{1 / progress.best_s:,.4g} samples/s"
    bound = f", no plan beyond {1 / progress.bound_s:,.4g}" if progress.bound_s > 0 else ""
    left = f"{progress.open_shapes} combinations open, {progress.spent:.1f} of {progress.limit:g} s"
    return f"best {best}{bound}; {left}"
