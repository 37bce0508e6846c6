"""GPipe's partitioning (Huang et al. 2019, section 2.3): K cells of consecutive blocks, of the least variance of cost.

A cell's cost is its forward and backward. The sum of all costs is given, so that the least variance is the least sum
of squares. Only boundary activations are kept, and every cell's forward runs again in the backward; with
`Options.recompute` false all activations of the batch are kept instead. Unlike the paper, only partitions that fit the
devices' memory are compared; wherever the paper's partition fits, it is the answer.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.documents.plan import Answer, Infeasible
from pipeplan.planners.chain import profiled
from pipeplan.planners.complete import complete
from pipeplan.planners.problem import (
    PlanningProblem,
    refuse_unused,
    require_few_blocks,
    require_schedule,
    require_stages,
)
from pipeplan.planners.reasons import memory_reason
from pipeplan.planners.two_bw.candidate import Candidate, Evaluator, Miss, candidate, decision, lost, too_large
from pipeplan.planners.two_bw.split import Costs, Starts, least_squares
from pipeplan.planners.two_bw.terms import PipelineShape, PipelineTerms

NAME = "gpipe"


def gpipe(problem: PlanningProblem) -> Answer:
    """The fastest microbatch size with its partition of least variance; K from the options, or the devices.

    A microbatch takes the slowest cell's time, transfers and recomputation (if any) included, times (m + K - 1) / m.
    """
    options = problem.options
    used = ("microbatch_size", "schedule", "stages", "recompute", "recompute_unit", "recompute_factor", "safe_batch")
    refuse_unused(NAME, options, used)
    require_schedule(options, (NAME,), NAME)
    require_stages(problem)
    require_few_blocks(problem)
    measured = profiled(problem)
    depth = options.stages or min(problem.cluster.devices, len(problem.profile.blocks))
    shapes = [
        PipelineShape(
            schedule=NAME,
            width=1,
            depth=depth,
            microbatch_size=size,
            microbatches=problem.batch_size // size,
            recompute=options.recompute is not False,
        )
        for size in measured.sizes
        if size <= problem.batch_size and (options.safe_batch or problem.batch_size % size == 0)
    ]
    evaluator = Evaluator(problem=problem, measured=measured)
    fitting, misses = _partitioned(evaluator, shapes)
    if not fitting:
        reasons = tuple(
            memory_reason(
                f"gpipe on {miss.shape.depth} stages, microbatches of {miss.shape.microbatch_size}",
                stage=miss.stage,
                missing_bytes=miss.missing_bytes,
                device_bytes=problem.cluster.device.usable_bytes,
                configurations=1,
            )
            for miss in misses
        )
        return Infeasible(planner=NAME, reasons=reasons, configurations_considered=len(misses))
    (best, stops), *slower = fitting
    alternatives = (*(lost(*other, best) for other in slower), *map(too_large, misses))
    chosen = decision(NAME, "gpipe-2019-2.3", best, stops, considered=len(shapes), alternatives=alternatives)
    return complete(problem, chosen)


def _partitioned(
    evaluator: Evaluator, shapes: Sequence[PipelineShape]
) -> tuple[list[tuple[Candidate, tuple[int, ...]]], list[Miss]]:
    """The shapes that fit, with their cells' stops, the best first; and the misses of the others, the nearest first.

    Ties prefer measured sizes.
    """
    fitting, misses = [], []
    for shape in shapes:
        terms = evaluator.terms(shape, evaluator.links(shape)[0])
        starts = terms.fitting_starts()
        work_s = terms.chain.listed_s(recompute=False)
        stops = None if starts is None else least_squares(partial(_squares, terms), work_s, starts)
        if stops:
            slowest_s = max(float(terms.time_s(*place)[0, 0]) for place in terms.slices(stops))
            fitting.append((candidate(shape, terms, None, slowest_s), stops))
        elif miss := evaluator.nearest(shape):
            misses.append(miss)
    measured = evaluator.problem.profile.microbatch_sizes
    fitting.sort(
        key=lambda found: (
            -found[0].throughput_samples_per_s,
            found[0].shape.microbatch_size not in measured,
            found[0].shape.microbatch_size,
        )
    )
    misses.sort(key=lambda miss: miss.missing_bytes)
    return fitting, misses


def _squares(terms: PipelineTerms, starts: Starts) -> Costs:
    """Costs squared, infinite where a cell does not fit."""
    fits = terms.within(starts, 0.0)

    def cost(stage: int, begins: slice, stops: slice) -> FloatArray:
        return np.where(np.isfinite(fits(stage, begins, stops)), terms.squares(stage, begins, stops), np.inf)

    return cost
