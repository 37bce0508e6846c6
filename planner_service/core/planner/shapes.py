"""Shapes: every configuration of 2BW's search that the batch allows, and how many it rules out."""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
    depths: range


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """All shapes that can run, some of those that cannot as (shape, reason), and the number of both together.

    Of those that cannot, there is one a class of which no microbatch size leaves enough microbatches, and the deepest
    of the `NAMED_WIDTHS` that do not divide the batch and use the most devices.
    """

    runnable: tuple[Shape, ...]
    ruled_out: tuple[tuple[Shape, str], ...]
    considered: int


NAMED_WIDTHS = 20


def shapes(problem: Problem) -> Shapes:
    """Algorithm 1's loops: w from 1 to N, d from 1 to N / w, and every b and recomputation inside."""
    sizes = problem.profile.microbatch_sizes if problem.options.microbatch_size is None else dividing_sizes(problem)
    runnable: list[Shape] = []
    out: list[tuple[Shape, str]] = []
    widths = range(1, problem.cluster.devices + 1)
    for width in widths:
        dividing = [size for size in sizes if problem.batch_size % (width * size) == 0]
        for execution in executions(problem, _deepest(problem, width)) if dividing else ():
            for depth in execution.depths:
                fine, reason = _of_class(problem, execution, width, depth, dividing)
                runnable += fine
                out += reason
    return Shapes(
        runnable=tuple(runnable),
        ruled_out=(*out, *_undividing(problem, sizes, widths)),
        considered=len(sizes) * _classes(problem, widths),
    )


def _deepest(problem: Problem, width: int) -> int:
    return min(problem.cluster.devices // width, len(problem.profile.blocks))


def _classes(problem: Problem, widths: Iterable[int]) -> int:
    """The classes of all widths together; many widths have the same depths."""
    deepest = Counter(_deepest(problem, width) for width in widths)
    return sum(count * len(e.depths) for depth, count in deepest.items() for e in executions(problem, depth))


def _undividing(problem: Problem, sizes: Sequence[int], widths: Iterable[int]) -> Iterator[tuple[Shape, str]]:
    """The widths that no measured microbatch divides the batch with."""
    least = [width for width in widths if all(problem.batch_size % (width * size) for size in sizes)]
    named = heapq.nsmallest(NAMED_WIDTHS, least, key=lambda width: (-width * _deepest(problem, width), width))
    for width in named:
        for execution in executions(problem, _deepest(problem, width)):
            if execution.depths:
                shape = _shape(problem, execution, width, execution.depths[-1], sizes[0])
                yield shape, f"batch: {problem.batch_size} is not divisible by w*b={width * sizes[0]}"


def executions(problem: Problem, deepest: int) -> Iterator[Execution]:
    """The appendix's three, or the one schedule that was asked for, at depths up to the deepest."""
    options = problem.options
    for schedule, depths in _depths(options.schedule, deepest):
        if options.stages is not None:
            depths = range(options.stages, options.stages + (options.stages in depths))
        for recompute in _recomputes(schedule, options.recompute):
            yield Execution(schedule=schedule, recompute=recompute, depths=depths)


def _depths(asked: str | None, deepest: int) -> tuple[tuple[str, range], ...]:
    if asked is None:
        several = range(2, deepest + 1)
        return (("data-parallel", range(1, 2)), ("naive", several), (TWO_BW, several))
    return ((asked, range(1, 2) if asked == "data-parallel" else range(1, deepest + 1)),)


def _recomputes(schedule: str, asked: bool | None) -> tuple[bool, ...]:
    """Off and on; without pipelining one microbatch is in flight and recomputation saves nothing, so only if asked."""
    if schedule == "gpipe":
        return (True,)
    if asked is not None:
        return (asked,)
    return (False,) if schedule in ("data-parallel", "naive") else (False, True)


def _of_class(
    problem: Problem, execution: Execution, width: int, depth: int, sizes: Sequence[int]
) -> tuple[list[Shape], list[tuple[Shape, str]]]:
    """The runnable shapes of a schedule, width, depth and recomputation; or one that is not, and why."""
    every = [_shape(problem, execution, width, depth, size) for size in sizes]
    fine = [shape for shape in every if shape.schedule != TWO_BW or shape.microbatches >= depth]
    if fine:
        return fine, []
    return [], [(every[0], f"m={every[0].microbatches} < depth {depth}")]


def _shape(problem: Problem, execution: Execution, width: int, depth: int, size: int) -> Shape:
    return Shape(
        schedule=execution.schedule,
        width=width,
        depth=depth,
        microbatch_size=size,
        microbatches=problem.batch_size // (width * size),
        recompute=execution.recompute,
    )
