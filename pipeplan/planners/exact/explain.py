"""Explain: the answer of a search, as a plan's stages with their alternatives, or as reasons why nothing fits."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm

import numpy as np

from pipeplan.documents.certificate import Certificate
from pipeplan.documents.plan import Alternative, Infeasible, Reason, Stage
from pipeplan.planners.exact.first_plans import balanced, least_excess
from pipeplan.planners.exact.kinds import StageShape, Tabulated
from pipeplan.planners.exact.places import Placed
from pipeplan.planners.exact.search import PRECISION, ExactSearch, Result, Solution, slowest
from pipeplan.planners.messages import excess_bytes, with_messages
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.reasons import memory_reason, shortfall, slower

MAX_REASONS = 20
"""Upper bound on the misses named if nothing fits."""

MAX_LOOKED_AT = 200
"""Upper bound on the shapes searched for their nearest miss."""


def stages_of(search: ExactSearch, found: Solution) -> tuple[Stage, ...]:
    """A solution's stages, as a plan has them."""
    shape, tabulated = found.shape, search.tabulated(found.shape.microbatch_size)
    stages, start = [], 0
    for kind, stop in zip(found.placed.kinds, found.stops, strict=True):
        choice = tabulated.choice(shape, kind, start, stop)
        one = Stage(
            start=start,
            stop=stop,
            replicas=kind.replicas,
            recompute=choice.recompute,
            recompute_unit=choice.unit,
            time_s=choice.time_s,
            memory_bytes=choice.memory.total,
            memory=choice.memory,
            device=tabulated.types[kind.type].name if len(tabulated.types) > 1 else None,
        )
        stages.append(one)
        start = stop
    if shape.width is not None:
        return tuple(stages)
    # the solver counts PipeDream's stages without messages
    return with_messages(search.problem, stages, shape.laws, shape.microbatch_size)


def batch_of(shape: StageShape, placed: Placed) -> int:
    """The samples of a batch: for PipeDream those between two points at which every stage has updated."""
    if shape.width is None:
        return shape.microbatch_size * lcm(*(kind.replicas for kind in placed.kinds))
    return shape.width * shape.microbatch_size * shape.microbatches


def certificate(result: Result, best: Solution, limit: float, shapes: int) -> Certificate:
    """The proof: optimality to the precision, or how far the plan may be from the optimum."""
    value = best.sample_s
    bound = min(result.bound_s, value)
    searched = f"{shapes} combinations of depth, width and microbatch size"
    if result.claim is not None:
        claim = result.claim
    elif result.decided:
        claim = f"CP-SAT proved that no plan of {searched} is faster by more than {PRECISION:.0e} of its time"
    else:
        claim = (
            f"within {limit:g} deterministic seconds CP-SAT proved that no plan of {searched} takes less than the bound"
        )
    return Certificate(method="cp-sat", quantity="seconds a sample", value=value, bound=bound, claim=claim)


def alternatives(search: ExactSearch, best: Solution) -> Iterator[Alternative]:
    """Two obvious alternatives, on the same places, if they are not the answer."""
    shape, kinds = best.shape, best.placed.kinds
    stages = stages_of(search, best)
    tabulated = search.tabulated(shape.microbatch_size)

    # Stages of equal numbers of blocks.
    stops = tuple(tabulated.blocks * stage // shape.depth for stage in range(1, shape.depth + 1))
    allowed = all(tabulated.may_be_stage[a, b - 1] for a, b in zip((0, *stops[:-1]), stops, strict=True))
    if allowed and stops != best.stops:
        uniform = stages_of(search, replace(best, stops=stops))
        yield _judged(search, best, uniform, "stages of equal numbers of blocks")

    # The best stops if no stage recomputes; of those that do not fit, the nearest.
    if any(stage.recompute for stage in stages) and search.problem.options.recompute is None:
        options = replace(search.problem.options, recompute=False, recompute_unit=None)
        problem = replace(search.problem, options=options)
        plain = Tabulated(problem=problem, microbatch_size=shape.microbatch_size)
        fitting = balanced([plain.time_s(shape, kind) for kind in kinds])
        if fitting is None:
            fitting = least_excess([plain.excess_bytes(shape, kind) for kind in kinds])
        twin = ExactSearch(problem=problem, shapes=(), limit=0.0, observe=search.observe)
        other = replace(best, stops=fitting or best.stops)
        yield _judged(search, best, stages_of(twin, other), "without recomputation")


def _judged(search: ExactSearch, best: Solution, stages: Sequence[Stage], what: str) -> Alternative:
    """Other stages on the best solution's places, and why they lose: slower, or too large for a device."""
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
        throughput_samples_per_s=None,
        memory_bytes=max(stage.memory_bytes for stage in stages),
        reason=f"{what}: {slower(rate) if fits else shortfall(worst, excess[worst])}",
        closed_form_samples_per_s=rate if fits else None,
    )


def infeasible(planner: str, problem: PlanningProblem, search: ExactSearch) -> Infeasible:
    """The nearest misses of memory, the nearest first; or the cuts or the batch that leave no shape at all."""
    misses = []
    for shape in search.shapes[: 1 if search.free_depth else MAX_LOOKED_AT]:
        found = nearest(search, shape)
        if found is None:
            continue
        excess = excess_bytes(search.problem, stages := stages_of(search, found))
        missing_bytes, stage = max(excess), excess.index(max(excess))
        layout = f"{shape.schedule}, width {shape.width}, depth {shape.depth}"
        if shape.width is None:
            layout = f"nearest is {'-'.join(str(each.replicas) for each in stages)} (replicas by stage)"
        miss = memory_reason(
            f"{layout}, microbatches of {shape.microbatch_size}",
            stage=stage,
            missing_bytes=missing_bytes,
            device_bytes=stages[stage].memory_bytes - missing_bytes,
            configurations=1,
        )
        misses.append(miss)
    misses.sort(key=lambda miss: miss.missing_bytes or 0)
    reasons = tuple(misses[:MAX_REASONS])
    if not reasons:
        options, blocks = problem.options, len(problem.profile.blocks)
        least, most = len(options.forced_cuts) + 1, blocks - len(options.forbidden_cuts)
        asked = f"{options.stages} stages are asked for, " if options.stages else ""
        no_shape = Reason(
            rule="stages must lie between the forced and the forbidden cuts, and a batch must have enough microbatches",
            detail=(
                f"{asked}the forced cuts make at least {least} stages, the forbidden ones leave at most {most}, "
                f"there are {problem.cluster.devices} devices, and the batch has {problem.batch_size} samples"
            ),
        )
        reasons = (no_shape,)
    return Infeasible(planner=planner, reasons=reasons, configurations_considered=len(search.shapes))


def nearest(search: ExactSearch, shape: StageShape) -> Solution | None:
    """The stages that minimise the largest missing memory; None if the cuts leave no stages.

    Their time may be infinite.
    """
    questions = search.questions(shape)
    best: tuple[float, Solution] | None = None
    for placed in search.first_places(questions, "excess_bytes"):
        kinds = [questions.shared(kind) for kind in placed.kinds]
        tables = [questions.tabulated.excess_bytes(shape, kind) for kind in kinds]
        stops = least_excess(tables)
        if stops is not None and (best is None or slowest(tables, stops) < best[0]):
            step_s = slowest([questions.table(kind) for kind in kinds], stops)
            shape_found = replace(shape, depth=len(stops))
            best = (
                slowest(tables, stops),
                Solution(shape=shape_found, placed=placed, stops=stops, step_s=step_s),
            )
    return None if best is None else best[1]
