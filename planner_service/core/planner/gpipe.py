"""GPipe's partitioning (Huang et al. 2019, section 2.3): K cells of consecutive blocks, of the least variance of cost.

A cell's cost is its forward and backward; the sum of all is given, so that the least variance is the least sum of
squares. Only boundary activations are kept, and every cell's forward runs again in the backward. Beyond the paper,
only partitions that fit the devices' memory are compared: the paper's own, wherever that fits.
"""

import numpy as np

from planner_service.core.cost.compute import FloatArray
from planner_service.core.plan import Answer, Infeasible
from planner_service.core.planner.asked import (
    dividing_sizes,
    measured_at,
    refuse_unused,
    require_recompute,
    require_schedule,
    require_stages,
)
from planner_service.core.planner.candidate import (
    Candidate,
    Evaluator,
    Miss,
    candidate,
    decision,
    lost,
    time_by_stage,
    too_large,
)
from planner_service.core.planner.complete import complete
from planner_service.core.planner.pipeline_terms import Shape
from planner_service.core.planner.problem import Problem
from planner_service.core.planner.reasons import memory_reason
from planner_service.core.planner.split import min_sum

NAME = "gpipe"


def gpipe(problem: Problem) -> Answer:
    """The fastest measured microbatch size with its partition of least variance; K from the options, or the devices.

    A microbatch takes the slowest cell's time, recomputation and transfers included, times (m + K - 1) / m.
    """
    options = problem.options
    refuse_unused(NAME, options, ("microbatch_size", "schedule", "stages", "recompute", "recompute_factor"))
    require_schedule(options, (NAME,), NAME)
    require_recompute(options, NAME)
    require_stages(problem)
    sizes = dividing_sizes(problem)
    for size in sizes:
        measured_at(problem, size)
    evaluator = Evaluator(problem=problem)
    shapes = [_shape(problem, size) for size in sizes]
    balanced = [(shape, _balanced(evaluator, shape)) for shape in shapes]
    fitting = sorted((_timed(evaluator, shape, stops) for shape, stops in balanced if stops), key=_preference)
    misses = sorted((evaluator.nearest(shape) for shape, stops in balanced if not stops), key=_missing_bytes)
    if not fitting:
        return _infeasible(problem, misses)
    (best, stops), *slower = fitting
    alternatives = (*(lost(*other, best) for other in slower), *map(too_large, misses))
    chosen = decision(NAME, "gpipe-2019-2.3", best, stops, considered=len(shapes), alternatives=alternatives)
    return complete(problem, chosen)


def _preference(found: tuple[Candidate, tuple[int, ...]]) -> tuple[float, int]:
    return -found[0].throughput_samples_per_s, found[0].shape.microbatch_size


def _missing_bytes(miss: Miss) -> int:
    return miss.missing_bytes


def _shape(problem: Problem, microbatch_size: int) -> Shape:
    return Shape(
        schedule=NAME,
        width=1,
        depth=problem.options.stages or min(problem.cluster.devices, len(problem.profile.blocks)),
        microbatch_size=microbatch_size,
        microbatches=problem.batch_size // microbatch_size,
        recompute=True,
    )


def _balanced(evaluator: Evaluator, shape: Shape) -> tuple[int, ...] | None:
    """Where the cells of least variance end, among those that fit; None if none do."""
    terms = evaluator.terms(shape, evaluator.links(shape)[0])
    squares = np.square(evaluator.compute_s(shape.microbatch_size, False))

    def variance(_: int, firsts: slice, lasts: slice) -> FloatArray:
        return squares[firsts, lasts]

    starts = terms.fitting_starts()
    return min_sum(terms.fitting(variance), starts) if starts else None


def _timed(evaluator: Evaluator, shape: Shape, stops: tuple[int, ...]) -> tuple[Candidate, tuple[int, ...]]:
    terms = evaluator.terms(shape, evaluator.links(shape)[0])
    return candidate(shape, terms, max(time_by_stage(terms, stops))), stops


def _infeasible(problem: Problem, misses: list[Miss]) -> Infeasible:
    reasons = tuple(
        memory_reason(
            f"gpipe on {miss.shape.depth} stages, microbatches of {miss.shape.microbatch_size}",
            stage=miss.stage,
            missing_bytes=miss.missing_bytes,
            device_bytes=problem.cluster.device.memory_bytes,
            configurations=1,
        )
        for miss in misses
    )
    return Infeasible(planner=NAME, reasons=reasons, configurations_considered=len(misses))
