"""Shapes: every configuration of 2BW's search that the batch allows, and how many it rules out."""

from collections.abc import Iterator
from dataclasses import dataclass

from planner_service.core.planner.asked import dividing_sizes
from planner_service.core.planner.pipeline_terms import Shape
from planner_service.core.planner.problem import Problem

TWO_BW = "pipedream-2bw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """A schedule with or without recomputation, and the depths at which it is an execution of its own."""

    schedule: str
    recompute: bool
    least_depth: int
    most_depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """All shapes that can run, those that cannot as (shape, reason), and the number of both together.

    Of those that cannot, there is one a width that does not divide the batch, the deepest, and one a class of which
    no microbatch size leaves enough microbatches.
    """

    runnable: tuple[Shape, ...]
    ruled_out: tuple[tuple[Shape, str], ...]
    considered: int


def shapes(problem: Problem) -> Shapes:
    """Algorithm 1's loops: w from 1 to N, d from 1 to N / w, and every b and recomputation inside."""
    sizes = problem.profile.microbatch_sizes if problem.options.microbatch_size is None else dividing_sizes(problem)
    runnable: list[Shape] = []
    out: list[tuple[Shape, str]] = []
    considered = 0
    for width in range(1, problem.cluster.devices + 1):
        dividing = [size for size in sizes if problem.batch_size % (width * size) == 0]
        for execution in executions(problem, width):
            depths = range(execution.least_depth, execution.most_depth + 1)
            considered += len(sizes) * len(depths)
            for depth in depths if dividing else depths[-1:]:
                fine, reason = _of_class(problem, execution, width, depth, dividing or sizes[:1])
                runnable += fine
                out += reason
    return Shapes(runnable=tuple(runnable), ruled_out=tuple(out), considered=considered)


def executions(problem: Problem, width: int) -> Iterator[Execution]:
    """The appendix's three, or the one schedule that was asked for."""
    options = problem.options
    deepest = min(problem.cluster.devices // width, len(problem.profile.blocks))
    for schedule, least, most in _depths(options.schedule, deepest):
        for recompute in _recomputes(schedule, options.recompute):
            if options.stages is None:
                yield Execution(schedule=schedule, recompute=recompute, least_depth=least, most_depth=most)
            elif least <= options.stages <= most:
                yield Execution(
                    schedule=schedule, recompute=recompute, least_depth=options.stages, most_depth=options.stages
                )


def _depths(asked: str | None, deepest: int) -> tuple[tuple[str, int, int], ...]:
    if asked is None:
        return (("data-parallel", 1, 1), ("naive", 2, deepest), (TWO_BW, 2, deepest))
    return ((asked, 1, 1 if asked == "data-parallel" else deepest),)


def _recomputes(schedule: str, asked: bool | None) -> tuple[bool, ...]:
    """Off and on; without pipelining one microbatch is in flight and recomputation saves nothing, so only if asked."""
    if schedule == "gpipe":
        return (True,)
    if asked is not None:
        return (asked,)
    return (False,) if schedule in ("data-parallel", "naive") else (False, True)


def _of_class(
    problem: Problem, execution: Execution, width: int, depth: int, sizes: list[int] | tuple[int, ...]
) -> tuple[list[Shape], list[tuple[Shape, str]]]:
    """The runnable shapes of a schedule, width, depth and recomputation; or one that is not, and why."""
    every = [
        Shape(
            schedule=execution.schedule,
            width=width,
            depth=depth,
            microbatch_size=size,
            microbatches=problem.batch_size // (width * size),
            recompute=execution.recompute,
        )
        for size in sizes
    ]
    if problem.batch_size % (width * sizes[0]):
        reason = f"batch: {problem.batch_size} is not divisible by w*b={width * sizes[0]}"
        return [], [(every[0], reason)]
    fine = [shape for shape in every if shape.schedule != TWO_BW or shape.microbatches >= depth]
    if fine:
        return fine, []
    return [], [(every[0], f"m={every[0].microbatches} < depth {depth}")]
