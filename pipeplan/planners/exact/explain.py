"""Explain: a solution as a plan's stages, what else was considered and why it lost, and why nothing fits."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm

import numpy as np

from pipeplan.documents.plan import Alternative, Certificate, Infeasible, Reason, Stage
from pipeplan.planners.exact.first_plans import balanced, least_excess
from pipeplan.planners.exact.kinds import StageShape, Tabulated
from pipeplan.planners.exact.places import Placed
from pipeplan.planners.exact.search import PRECISION, ExactSearch, Result, Solution
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.reasons import memory_reason, shortfall, slower

MAX_REASONS = 20
MAX_LOOKED_AT = 200
"""Shapes of which the nearest miss is looked for."""


def stages_of(search: ExactSearch, found: Solution) -> Iterator[Stage]:
    """As a plan has them."""
    shape, tabulated = found.shape, search.tabulated(found.shape.microbatch_size)
    start = 0
    for kind, stop in zip(found.placed.kinds, found.stops, strict=True):
        choice = tabulated.choice(shape, kind, start, stop)
        yield Stage(
            start=start,
            stop=stop,
            replicas=kind.replicas,
            recompute=choice.recompute,
            time_s=choice.time_s,
            memory_bytes=choice.memory.total,
            memory=choice.memory,
            device=tabulated.types[kind.type].name if len(tabulated.types) > 1 else None,
        )
        start = stop


def batch_of(shape: StageShape, placed: Placed) -> int:
    """The samples of a batch: of PipeDream what passes between two points at which every stage has updated."""
    if shape.width is None:
        return shape.microbatch_size * lcm(*(kind.replicas for kind in placed.kinds))
    return shape.width * shape.microbatch_size * shape.microbatches


def certificate(result: Result, best: Solution, limit: float, shapes: int) -> Certificate:
    """What was proven: optimality to the precision, or how far the plan may be from the optimum."""
    value = best.sample_s
    bound = min(result.bound_s, value)
    searched = f"{shapes} combinations of depth, width and microbatch size"
    if result.decided:
        claim = f"CP-SAT proved that no plan of {searched} is faster by more than {PRECISION:.0e} of its time"
    else:
        claim = (
            f"within {limit:g} deterministic seconds CP-SAT proved that no plan of {searched} takes less than the bound"
        )
    return Certificate(method="cp-sat", quantity="seconds a sample", value=value, bound=bound, claim=claim)


def alternatives(search: ExactSearch, best: Solution) -> Iterator[Alternative]:
    """Three that come to mind first, where they are not the answer: equal numbers of blocks, a recurrence's first
    plan, and the same stages without recomputation.
    """
    stages = tuple(stages_of(search, best))
    uniform = _uniform(search, best)
    if uniform is not None and uniform != best.stops:
        yield _alternative(search, best, uniform, "stages of equal numbers of blocks")
    if any(stage.recompute for stage in stages) and search.problem.options.recompute is None:
        yield _without_recomputation(search, best)


def _uniform(search: ExactSearch, best: Solution) -> tuple[int, ...] | None:
    blocks, depth = search.tabulated(best.shape.microbatch_size).blocks, best.shape.depth
    stops = tuple(blocks * stage // depth for stage in range(1, depth + 1))
    allowed = search.tabulated(best.shape.microbatch_size).may_be_stage
    fine = all(allowed[start, stop - 1] for start, stop in zip((0, *stops[:-1]), stops, strict=True))
    return stops if fine else None


def _alternative(search: ExactSearch, best: Solution, stops: tuple[int, ...], what: str) -> Alternative:
    """Other stops on the same places."""
    other = Solution(shape=best.shape, placed=best.placed, stops=stops, step_s=best.step_s)
    return _judged(search, best, tuple(stages_of(search, other)), what)


def _without_recomputation(search: ExactSearch, best: Solution) -> Alternative:
    """The best stops on the same places if no stage recomputes; of those that do not fit, the nearest."""
    plain = Tabulated(
        problem=_without(search.problem),
        microbatch_size=best.shape.microbatch_size,
    )
    shape, kinds = best.shape, best.placed.kinds
    stops = balanced([plain.time_s(shape, kind) for kind in kinds])
    if stops is None:
        stops = least_excess([plain.excess_bytes(shape, kind) for kind in kinds])
    twin = ExactSearch(problem=plain.problem, shapes=(), limit=0.0, observe=search.observe)
    other = Solution(shape=shape, placed=best.placed, stops=stops or best.stops, step_s=best.step_s)
    return _judged(search, best, tuple(stages_of(twin, other)), "without recomputation")


def _without(problem: PlanningProblem) -> PlanningProblem:
    return replace(problem, options=replace(problem.options, recompute=False))


def _judged(search: ExactSearch, best: Solution, stages: Sequence[Stage], what: str) -> Alternative:
    shape = best.shape
    usable = [search.problem.cluster.types[kind.type].usable_bytes for kind in best.placed.kinds]
    excess = [stage.memory_bytes - limit for stage, limit in zip(stages, usable, strict=True)]
    worst = int(np.argmax(excess))
    fits = excess[worst] <= 0
    rate = 1.0 / shape.sample_s(max(stage.time_s for stage in stages))
    widths = {stage.replicas for stage in stages}
    return Alternative(
        schedule=shape.schedule,
        depth=shape.depth,
        width=widths.pop() if len(widths) == 1 else None,
        microbatch_size=shape.microbatch_size,
        microbatches=shape.microbatches,
        recompute=any(stage.recompute for stage in stages),
        throughput_samples_per_s=rate if fits else None,
        memory_bytes=max(stage.memory_bytes for stage in stages),
        reason=f"{what}: {slower(rate) if fits else shortfall(worst, excess[worst])}",
    )


def infeasible(planner: str, problem: PlanningProblem, search: ExactSearch) -> Infeasible:
    """The nearest misses of memory, the nearest first; or the cuts or the batch that leave no shape at all."""
    misses = []
    for shape in search.shapes[: 1 if search.free_depth else MAX_LOOKED_AT]:
        found = _nearest(search, shape)
        if found is not None:
            misses.append(found)
    misses.sort(key=lambda miss: miss.missing_bytes or 0)
    reasons = tuple(misses[:MAX_REASONS]) or (_no_shape(problem),)
    return Infeasible(planner=planner, reasons=reasons, configurations_considered=len(search.shapes))


def _nearest(search: ExactSearch, shape: StageShape) -> Reason | None:
    """The stage that lacks the least where the worst stage lacks the least; None if the cuts leave no stages."""
    questions = search.questions(shape)
    nearest: tuple[int, int, Placed] | None = None
    for placed in search.first_places(questions, "excess_bytes"):
        tables = [questions.tabulated.excess_bytes(shape, questions.shared(kind)) for kind in placed.kinds]
        stops = least_excess(tables)
        if stops is not None:
            starts = (0, *stops[:-1])
            excess = [int(t[a, b - 1]) for t, a, b in zip(tables, starts, stops, strict=True)]
            if nearest is None or max(excess) < nearest[0]:
                nearest = max(excess), excess.index(max(excess)), placed
    if nearest is None:
        return None
    missing_bytes, stage, placed = nearest
    device = questions.tabulated.types[placed.kinds[stage].type]
    return memory_reason(
        _named(shape, placed),
        stage=stage,
        missing_bytes=missing_bytes,
        device_bytes=device.usable_bytes,
        configurations=1,
    )


def _named(shape: StageShape, placed: Placed) -> str:
    size = f"microbatches of {shape.microbatch_size}"
    if shape.width is None:
        replicas = "-".join(str(kind.replicas) for kind in placed.kinds)
        return f"nearest is {replicas} (replicas by stage), {size}"
    return f"{shape.schedule}, width {shape.width}, depth {shape.depth}, {size}"


def _no_shape(problem: PlanningProblem) -> Reason:
    """Nothing can even be laid out: the numbers of stages that are asked for and that there may be."""
    options, blocks = problem.options, len(problem.profile.blocks)
    least, most = len(options.forced_cuts) + 1, blocks - len(options.forbidden_cuts)
    asked = f"{options.stages} stages are asked for, " if options.stages else ""
    return Reason(
        rule="stages must lie between the forced and the forbidden cuts, and a batch must have enough microbatches",
        detail=(
            f"{asked}the forced cuts make at least {least} stages, the forbidden ones leave at most {most}, "
            f"there are {problem.cluster.devices} devices, and the batch has {problem.batch_size} samples"
        ),
    )
