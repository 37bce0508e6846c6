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
    found = [_balanced(evaluator, _shape(problem, size)) for size in sizes]
    fitting = sorted((f for f in found if isinstance(f, Candidate)), key=_preference)
    misses = sorted((f for f in found if isinstance(f, Miss)), key=lambda miss: miss.missing_bytes)
    if not fitting:
        return _infeasible(problem, misses)
    alternatives = (*map(lost, fitting[1:]), *map(too_large, misses))
    chosen = decision(NAME, "gpipe-2019-2.3", fitting[0], considered=len(found), alternatives=alternatives)
    return complete(problem, chosen)


def _preference(found: Candidate) -> tuple[float, int]:
    return -found.throughput_samples_per_s, found.shape.microbatch_size


def _shape(problem: Problem, microbatch_size: int) -> Shape:
    return Shape(
        schedule=NAME,
        width=1,
        depth=problem.options.stages or min(problem.cluster.devices, len(problem.profile.blocks)),
        microbatch_size=microbatch_size,
        microbatches=problem.batch_size // microbatch_size,
        recompute=True,
    )


def _balanced(evaluator: Evaluator, shape: Shape) -> Candidate | Miss:
    """The partition of least variance among those that fit, or the nearest miss."""
    terms = evaluator.terms(shape, evaluator.links(shape)[0])
    squares = np.square(evaluator.compute_s(shape.microbatch_size, False))

    def variance(stage: int) -> FloatArray:
        return terms.fitting(terms.window(squares, stage), stage)

    split = min_sum(variance, shape.depth)
    return candidate(shape, terms, split.stops) if split else evaluator.nearest(shape)


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
