"""Chunk answers: the result of a search for ranks with several stages, as a plan or as reasons why nothing fits."""

from collections.abc import Sequence

from pipeplan.documents.certificate import Certificate
from pipeplan.documents.plan import Alternative, Answer, ClosedForm, Infeasible, Reason
from pipeplan.errors import require
from pipeplan.planners.complete import Decision, complete
from pipeplan.planners.exact.chunk_model import least_held
from pipeplan.planners.exact.chunk_search import NAME, PRECISION, ChunkedPlace, ChunkedSearch
from pipeplan.planners.exact.search import OutOfTimeError
from pipeplan.planners.interleaved.limits import Within
from pipeplan.planners.interleaved.pairs import Pairs
from pipeplan.planners.interleaved.shape import ChunkedShape
from pipeplan.planners.interleaved.terms import ChunkedTerms
from pipeplan.planners.problem import Observer, PlanningProblem
from pipeplan.planners.reasons import memory_reason, shortfall, slower

MOST_MISSES = 5
MISS_S = 2.0
"""If nothing fits: the number of places searched for the nearest miss, and the deterministic seconds of each."""


def chunked(problem: PlanningProblem, schedule: str, limit: float, observe: Observer) -> Answer:
    """The fastest plan of a schedule whose ranks hold several stages, or the nearest misses.

    Raises InvalidInputError if the time ended before a plan was found or it was proven that there is none.
    """
    search = ChunkedSearch(problem=problem, schedule=schedule, limit=limit, observe=observe)
    search.run()
    if search.best is None:
        rule = "must be longer: in this time no plan was found, and no proof that none fits"
        require(search.decided, "time_limit_s", rule, limit)
        return infeasible(search)
    place, stops = search.most_even()
    shape, terms = place.shape, place.terms
    stages = terms.stages(stops)
    step_s = shape.step_s(search.best_s)
    return complete(
        problem,
        Decision(
            planner=NAME,
            cost_model=f"{NAME}/{shape.schedule}",
            stages=stages,
            placement=terms.links.place((shape.width,) * shape.ranks),
            schedule=shape.schedule,
            chunks=shape.chunks,
            microbatch_size=shape.microbatch_size,
            microbatches=shape.microbatches,
            batch_size=problem.batch_size,
            closed_form=ClosedForm(
                time_per_microbatch_s=step_s * (1 + shape.idle_steps / shape.microbatches),
                throughput_samples_per_s=1 / search.best_s,
                bubble_fraction=shape.bubble_fraction,
            ),
            optimal_in_flight=terms.most_in_flight(0),
            configurations_considered=len(search.places),
            alternatives=tuple(alternatives(search, place, stops)),
            certificate=certificate(search, step_s, shape),
        ),
    )


def certificate(search: ChunkedSearch, step_s: float, shape: ChunkedShape) -> Certificate:
    """The proof: optimality to the precision, or how far the plan may be from the optimum."""
    searched = f"{len(search.places)} combinations of ranks, chunks, width, microbatch size and placement"
    value = search.best_s
    bound = min(search.bound_s, value)
    slowest = f"the slowest of {shape.ranks} ranks takes {step_s:.6g} s a microbatch"
    if search.decided:
        claim = f"no plan of {searched} is faster by more than {PRECISION:.0e} of its time: {slowest}"
    else:
        claim = (
            f"within {search.limit:g} deterministic seconds no plan of {searched} takes less than the bound: {slowest}"
        )
    method = "cp-sat" if any(place.shape.chunks > 2 for place in search.places) else "recurrence over ranks"
    return Certificate(method=method, quantity="seconds a sample", value=value, bound=bound, claim=claim)


def alternatives(search: ChunkedSearch, place: ChunkedPlace, stops: tuple[int, ...]) -> list[Alternative]:
    """Stages of equal numbers of blocks, if they are not the answer."""
    terms, shape = place.terms, place.shape
    even = tuple(terms.blocks * stage // shape.depth for stage in range(1, shape.depth + 1))
    starts = (0, *even[:-1])
    if even == stops or not all(terms.may_be_stage[start, stop] for start, stop in zip(starts, even, strict=True)):
        return []
    modes = [terms.mode(rank, even) for rank in range(shape.ranks)]
    held = [terms.rank_bytes(rank, even, recompute=mode) for rank, mode in enumerate(modes)]
    missing_bytes = max(held) - terms.device_bytes
    rate = 1 / search.sample_s(place, even)
    why = slower(rate) if missing_bytes <= 0 else shortfall(held.index(max(held)), missing_bytes)
    return [
        Alternative(
            schedule=shape.schedule,
            depth=shape.depth,
            width=shape.width,
            microbatch_size=shape.microbatch_size,
            microbatches=shape.microbatches,
            recompute=any(modes),
            throughput_samples_per_s=None,
            memory_bytes=max(held),
            reason=f"stages of equal numbers of blocks: {why}",
            closed_form_samples_per_s=rate if missing_bytes <= 0 else None,
        )
    ]


def infeasible(search: ChunkedSearch) -> Infeasible:
    """The nearest misses of the shapes that are nearest with equal numbers of blocks; or why there is no shape.

    Shapes that differ only in their width and placement hold nearly the same: the first stands for all.
    """
    problem, blocks = search.problem, len(search.problem.profile.blocks)
    if not search.places:
        options = problem.options
        asked = [f"{n} {what}" for n, what in ((options.stages, "ranks"), (options.chunks, "chunks a rank")) if n]
        no_shape = Reason(
            rule=(
                f"ranks, chunks and cuts must leave every stage a block, and {search.schedule} must take the batch's "
                "microbatches on these ranks (docs/schedules.md)"
            ),
            detail=", ".join(
                [f"{each} asked for" for each in asked]
                + [f"{blocks} blocks", f"{problem.cluster.devices} devices", f"{problem.batch_size} samples in a batch"]
            ),
        )
        return Infeasible(planner=NAME, reasons=(no_shape,), configurations_considered=0)

    every = []
    alike = {(p.shape.ranks, p.shape.chunks, p.shape.microbatch_size): p for p in reversed(search.places)}
    for place in alike.values():
        depth = place.shape.depth
        stops = tuple(blocks * stage // depth for stage in range(1, depth + 1))
        every.append((max(_least_bytes(place.terms, stops)), place, stops))
    every.sort(key=lambda each: each[0])
    reasons = []
    for _, place, stops in every[:MOST_MISSES]:
        terms, shape = place.terms, place.shape
        held = _least_bytes(terms, _smallest(search, terms, stops))
        worst = max(held)
        reason = memory_reason(
            f"{shape.schedule}, {shape.ranks} ranks x {shape.chunks} chunks, width {shape.width}, "
            f"microbatches of {shape.microbatch_size}",
            stage=held.index(worst),
            missing_bytes=worst - terms.device_bytes,
            device_bytes=terms.device_bytes,
            configurations=1,
        )
        reasons.append(reason)
    reasons.sort(key=lambda miss: miss.missing_bytes or 0)
    return Infeasible(planner=NAME, reasons=tuple(reasons), configurations_considered=len(search.places))


def _least_bytes(terms: ChunkedTerms, stops: Sequence[int]) -> list[int]:
    """The bytes that every rank holds, with or without recomputation, whichever are fewer."""
    modes = terms.shape.modes
    return [min(terms.rank_bytes(rank, stops, recompute=mode) for mode in modes) for rank in range(terms.shape.ranks)]


def _smallest(search: ChunkedSearch, terms: ChunkedTerms, stops: tuple[int, ...]) -> tuple[int, ...]:
    """The stages found in a short time whose fullest rank holds least: the given ones, or better ones."""
    if terms.shape.chunks != 2:
        found = least_held(terms, limit=MISS_S).stops
        return stops if found is None else found
    until = search.spent + MISS_S
    low, high = terms.device_bytes, max(_least_bytes(terms, stops))
    try:
        while high - low > 1:
            within = Within(terms=terms, held_bytes=(low + high) // 2)
            found = Pairs(within=within, charge=lambda entries: search.charge(entries, until)).stops()
            if found is None:
                low = (low + high) // 2
            else:
                stops, high = found, max(_least_bytes(terms, found))
    except OutOfTimeError:
        pass
    return stops
