"""Answers: a search's result, as a plan with its certificate and alternatives, or as the reasons why nothing fits."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm

import numpy as np

from pipeplan.documents.certificate import Certificate
from pipeplan.documents.plan import Alternative, ClosedForm, Infeasible, Plan, Reason
from pipeplan.planners.complete import Decision, complete
from pipeplan.planners.exact.budget import BUDGET
from pipeplan.planners.exact.search import ExactSearch, Rounds, Solution, T
from pipeplan.planners.exact.tables import StageTables
from pipeplan.planners.messages import excess_bytes
from pipeplan.planners.reasons import memory_reason, shortfall, slower, unpriced

NAME = "exact"


def plan_of(
    search: ExactSearch,
    best: Solution,
    alternatives: Sequence[Alternative] = (),
    certificate: Certificate | None = None,
) -> Plan:
    """The plan of a solution, not played."""
    shape, kinds, time_s = best.shape, best.placed.kinds, best.step_s * best.shape.slots
    if shape.width is None:
        optimal_in_flight = -(-shape.workers // kinds[0].replicas)
        # the samples between two points at which every stage has updated
        batch_size = shape.microbatch_size * lcm(*(kind.replicas for kind in kinds))
    else:
        optimal_in_flight = shape.laws.in_flight(depth=shape.depth, stage=0, microbatches=shape.microbatches)
        batch_size = shape.width * shape.microbatch_size * shape.microbatches
    return complete(
        search.problem,
        Decision(
            planner=NAME,
            cost_model=f"{NAME}/{shape.schedule}",
            stages=search.stages(best),
            placement=best.placed.placement,
            devices=best.placed.devices,
            schedule=shape.schedule,
            microbatch_size=shape.microbatch_size,
            microbatches=shape.microbatches,
            batch_size=batch_size,
            closed_form=ClosedForm(
                time_per_microbatch_s=time_s,
                throughput_samples_per_s=shape.samples / time_s,
                bubble_fraction=1.0 - 1.0 / shape.slots,
            ),
            optimal_in_flight=optimal_in_flight,
            configurations_considered=len(search.shapes),
            alternatives=tuple(alternatives),
            certificate=certificate,
        ),
    )


def certificate_of(rounds: Rounds[T], method: str, searched: str, slowest: str = "") -> Certificate:
    """The proof: optimality to the precision, or how far the plan may be from the optimum."""
    claim = f"no plan of {searched} is faster by more than {BUDGET.precision:.0e} of its time"
    if not rounds.decided:
        claim = f"within {rounds.limit:g} deterministic seconds no plan of {searched} takes less than the bound"
    return Certificate(
        method=method,
        quantity="seconds a sample",
        value=rounds.best_s,
        bound=rounds.bound_s,
        claim=claim + slowest,
    )


def alternatives_of(search: ExactSearch, best: Solution) -> Iterator[Alternative]:
    """Two obvious alternatives, on the same places, if they are not the answer."""
    shape, tables = best.shape, search.tables(best.shape.microbatch_size)

    # Stages of equal numbers of blocks.
    stops = tuple(tables.blocks * stage // shape.depth for stage in range(1, shape.depth + 1))
    allowed = not any(tables.no_stage[start, stop] for start, stop in zip((0, *stops[:-1]), stops, strict=True))
    if allowed and stops != best.stops:
        yield _alternative(search, replace(best, stops=stops), "stages of equal numbers of blocks")

    # The best stops if no stage recomputes; if none fit, those that exceed a device least.
    if search.problem.options.recompute is None and any(stage.recompute for stage in search.stages(best)):
        options = replace(search.problem.options, recompute=False, recompute_unit=None)
        plain = replace(search, problem=replace(search.problem, options=options), shapes=())
        split = plain.split(shape, best.placed) or plain.split(shape, best.placed, StageTables.excess_bytes)
        yield _alternative(plain, split or best, "without recomputation")


def _alternative(search: ExactSearch, other: Solution, what: str) -> Alternative:
    """Other stages, and why they lose: slower, or too large for a device."""
    shape, stages = other.shape, search.stages(other)
    excess = excess_bytes(search.problem, stages)
    worst = int(np.argmax(excess))
    fitting = excess[worst] <= 0
    rate = 1.0 / shape.sample_s(max(stage.time_s for stage in stages))
    widths = {stage.replicas for stage in stages}
    return unpriced(
        replace(shape, width=widths.pop() if len(widths) == 1 else None),
        f"{what}: {slower(rate) if fitting else shortfall(worst, excess[worst])}",
        recompute=any(stage.recompute for stage in stages),
        closed_form_samples_per_s=rate if fitting else None,
        memory_bytes=max(stage.memory_bytes for stage in stages),
    )


def infeasible(search: ExactSearch) -> Infeasible:
    """The nearest misses of memory, the nearest first; or the cuts or the batch that leave no shape at all."""
    problem, misses = search.problem, []
    for shape in search.shapes[: BUDGET.misses]:
        found, _ = search.least(shape, 2 * search.limit, StageTables.excess_bytes)
        if found is None:  # the cuts leave no stages
            continue
        excess = excess_bytes(problem, stages := search.stages(found))
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
    options = problem.options
    least, most = len(options.forced_cuts) + 1, len(problem.profile.blocks) - len(options.forbidden_cuts)
    requested = f"{options.stages} stages are asked for, " if options.stages else ""
    no_shape = Reason(
        rule="stages must lie between the forced and the forbidden cuts, and a batch must have enough microbatches",
        detail=(
            f"{requested}the forced cuts make at least {least} stages, the forbidden ones leave at most {most}, "
            f"there are {problem.cluster.devices} devices, and the batch has {problem.batch_size} samples"
        ),
    )
    reasons = tuple(misses[: BUDGET.reasons]) or (no_shape,)
    return Infeasible(planner=NAME, reasons=reasons, configurations_considered=len(search.shapes))
