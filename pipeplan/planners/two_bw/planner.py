"""PipeDream-2BW's planner (2021, appendix A, algorithm 1): every width, depth, microbatch size and recomputation.

The appendix's three executions are candidates: no pipelining (data parallelism at depth 1, one stage after the other
at larger depths), pipelining, and pipelining with recomputation. Each stage has its own mode: it recomputes where it
does not fit otherwise. With `Options.schedule` only that schedule is searched; 1F1B and GPipe pay for their flush.

Where we differ:

- Widths are compared on the whole job's w b / t; the paper's b / t is that of one pipeline.
- The links follow from the placement: pipelines in a row or stages in a row, whichever is faster.
- Stages are the best contiguous split under the memory limit instead of equal numbers of blocks.
- A microbatch may be of any size between the measured ones that the batch allows.
"""

from collections.abc import Iterator
from dataclasses import replace

from pipeplan.documents.certificate import Certificate
from pipeplan.documents.plan import Alternative, Answer
from pipeplan.errors import require
from pipeplan.planners.chain import profiled
from pipeplan.planners.complete import complete
from pipeplan.planners.problem import (
    PlanningProblem,
    refuse_unused,
    require_few_blocks,
    require_schedule,
    require_stages,
)
from pipeplan.planners.two_bw.candidate import Candidate, Evaluator, bounded, decision, lost, ruled_out, too_large
from pipeplan.planners.two_bw.misses import infeasible, shallowest_misses
from pipeplan.planners.two_bw.search import BestFirstSearch
from pipeplan.planners.two_bw.shapes import ShapeSpace
from pipeplan.planners.two_bw.terms import PipelineShape
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.registry import schedule_named, schedule_names

NAME = "pipedream-2bw"

ALTERNATIVES = {"split": 2, "slower": 20, "memory": 2, "impossible": 10}
"""The number of each kind of alternative that a plan keeps, the best first; of the slower ones, `split` are split."""


def plans_for(schedule: Schedule) -> bool:
    """Whether the closed forms are the schedule's: equal replicas, a stage a rank, and a whole backward."""
    return schedule.update != "minibatch" and not schedule.chunked and not schedule.splits_backward


def two_bw(problem: PlanningProblem) -> Answer:
    """The configuration of the highest throughput that fits.

    Ties prefer a measured microbatch size, fewer devices, smaller depth, smaller microbatches, the registry's order;
    among the splits of one configuration the least sum of squares, then the smallest cuts; without pipelining first the
    least memory on the fullest stage.
    `configurations_considered` counts all of (schedule, w, d, b, recomputation). Configurations
    whose bound rules them out are not split into stages; the certificate counts them.
    """
    options = problem.options
    used = ("microbatch_size", "schedule", "stages", "recompute", "recompute_unit", "recompute_factor", "safe_batch")
    refuse_unused(NAME, options, used)
    if options.schedule is not None and not plans_for(schedule_named(options.schedule)):
        require_schedule(options, tuple(n for n in schedule_names() if plans_for(schedule_named(n))), NAME)
    require_stages(problem)
    require_few_blocks(problem)
    measured = profiled(problem)
    space = ShapeSpace(problem=problem, measured=measured)
    require(space.considered > 0, "stages", f"must be 1 for {options.schedule}", options.stages)
    search = BestFirstSearch(space=space, evaluator=Evaluator(problem=problem, measured=measured))
    search.run()
    if search.best is None:
        return infeasible(NAME, search)
    return complete(
        problem,
        decision(
            NAME,
            "pipedream-2bw-a.1",
            search.best,
            search.evaluator.stops(search.best),
            considered=space.considered,
            alternatives=_alternatives(search, search.best),
            certificate=_certificate(search, search.best),
        ),
    )


def _certificate(search: BestFirstSearch, best: Candidate) -> Certificate:
    space, counts = search.space, search.counts
    batch = space.considered - space.runnable
    slower = space.runnable - counts.memory - counts.split
    value = 1 / best.throughput_samples_per_s
    return Certificate(
        method="branch and bound",
        quantity="seconds a sample",
        value=value,
        bound=value,
        claim=(
            f"Of {space.considered} configurations (schedule, width, depth, microbatch size, with recomputation or "
            f"without), the batch rules out {batch}; {counts.memory} hold more than a device has, and {slower} train "
            f"slower, by bounds on all their splits; of the other {counts.split} the best split was found, or shown to "
            "be slower."
        ),
        witness=(float(space.considered), float(batch), float(counts.memory), float(slower), float(counts.split)),
    )


def _alternatives(search: BestFirstSearch, best: Candidate) -> Iterator[Alternative]:
    # Some of the other pairs of schedule, width and depth, each at the size of the highest bound, the highest first.
    seen = sorted(search.seen, key=lambda seen: (-seen[0], search.preference(seen[1])))
    chosen: dict[tuple[str, int, int], tuple[float, PipelineShape]] = {}
    for rate, shape in seen:
        if len(chosen) < ALTERNATIVES["slower"] and _class(shape) != _class(best.shape):
            chosen.setdefault(_class(shape), (rate, shape))
    others = list(chosen.values())

    # The first of them are split, and so is the plan's configuration with recomputation on no stage, and on all.
    shapes = [shape for _, shape in others[: ALTERNATIVES["split"]]]
    if best.shape.recompute is None:
        shapes += [replace(best.shape, recompute=recompute) for recompute in (False, True)]
    split = [(shape, search.evaluator.fastest(shape)) for shape in shapes]
    fitting = [found for _, found in split if found is not None]
    fitting.sort(key=lambda found: (-found.throughput_samples_per_s, search.preference(found.shape)))
    yield from (lost(found, search.evaluator.stops(found), best) for found in fitting)
    yield from (
        bounded(shape, min(rate, best.throughput_samples_per_s)) for rate, shape in others[ALTERNATIVES["split"] :]
    )

    too_tight = [shape for shape, found in split if found is None][: ALTERNATIVES["memory"] - 1]
    misses = [search.evaluator.nearest(shape) for shape in too_tight]
    misses += shallowest_misses(search, ALTERNATIVES["memory"] - len(misses))
    yield from (too_large(miss) for miss in misses if miss is not None)
    yield from (ruled_out(*out) for out in search.space.ruled_out(ALTERNATIVES["impossible"]))


def _class(shape: PipelineShape) -> tuple[str, int, int]:
    return shape.schedule, shape.width, shape.depth
