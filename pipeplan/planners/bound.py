"""Bound: seconds of a batch below which no play of a plan goes, from its costs and its placement alone.

With c_s the seconds that stage s computes a microbatch, m microbatches a batch:

1. A stage computes all of a batch's microbatches: m c_s, its update, and what is left of its exchange.
2. A stage has at most k_s microbatches in flight (the schedule's law). Each is there while it passes all later stages
   and comes back, which takes R_s: a batch takes m R_s / k_s (Little 1961).
3. With a flush, the first microbatch reaches stage s by way of the stages before it, and the last one comes back that
   way: this is added to 1 and 2. A schedule that splits the backward comes back by the gradients of the inputs alone.
4. Without pipelining a microbatch passes all stages before the next one begins.
5. A rank of several stages computes all that they do, and comes to its first stage, and back from it, as in 3.
6. A port carries all that passes it in a batch. With a flush, exchanges begin when the last backwards do.

With a flush all batches but the first are alike, and no play passes the bound. Without one batches may take more and
less time in turn; a play's rate is their mean over a window, which may hold one short batch more than long ones.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

from pipeplan.costs.memory import held_by, stages_by_rank
from pipeplan.costs.transfer import ranks_by_stage
from pipeplan.documents.plan import Plan
from pipeplan.schedules.registry import schedule_named

_Port = tuple[bool, int, int]
"""Outwards or inwards, the devices that share it, and the number of its unit."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class _Passage:
    """What a microbatch takes on a stage: there and back, with the boundary after it; what the stage computes until the
    way back is over; all that it computes; and its forward.
    """

    there_and_back_s: float
    between_s: float
    compute_s: float
    forward_s: float


def most_samples_per_s(plan: Plan) -> float:
    """Samples a second that no play of the plan exceeds in its steady state; infinite for what costs nothing.

    Of stages with different replicas only what they compute counts.
    """
    if plan.width is not None:
        least_s = least_batch_s(plan)
        return plan.microbatch_size * plan.microbatches * plan.width / least_s if least_s > 0 else inf
    passages = zip(_passages(plan), plan.stages, strict=True)
    slowest_s = max(passage.compute_s / stage.replicas for passage, stage in passages)
    return plan.microbatch_size / slowest_s * (1 + _ROUNDING) if slowest_s > 0 else inf


def least_batch_s(plan: Plan) -> float:
    """Seconds a batch that no play of the plan goes below in its steady state. All stages have equal replicas."""
    laws, costs, m = schedule_named(plan.schedule), plan.costs, plan.microbatches
    passages = _passages(plan)
    if not laws.pipelined:
        alone_s = sum(max(passage.there_and_back_s, passage.compute_s) for passage in passages)
        return (1 - _ROUNDING) * m * (alone_s if plan.depth == 1 else sum(p.there_and_back_s for p in passages))
    exchanges = max(plan.replicas) > 1
    by_rank = stages_by_rank(plan)
    ends_s = [_end_s(plan, stages) for stages in by_rank]
    last_s = _end_s(plan, by_rank[0][:1])  # updates of a rank's other stages may come before the last gradient
    before_s = [0.0, *accumulate(passage.there_and_back_s for passage in passages)]
    least_s = 0.0
    for rank, stages in enumerate(by_rank):
        rounds_s = [m * (before_s[-1] - before_s[stage]) / held for stage, held in _held(plan, rank, stages)]
        computed_s = m * sum(passages[stage].compute_s for stage in stages) + ends_s[rank]
        least_s = max(least_s, computed_s, *rounds_s)
        if laws.flushes:
            # The first of a rank's stages is reached first, and is the last to send a gradient back.
            window_s = m * sum(passages[stage].between_s for stage in stages)
            least_s = max(least_s, before_s[rank] + window_s + (last_s if rank else 0.0))
            for stage, round_s in zip(stages, rounds_s, strict=True):
                window_s = max(m * passages[stage].between_s, round_s)
                least_s = max(least_s, before_s[stage] + window_s + (last_s if stage else 0.0))
        elif exchanges:
            least_s = max(least_s, *(costs[stage].reduce_s for stage in stages))
    return (1 - _ROUNDING) * max(least_s, _ports_s(plan, passages))


def _held(plan: Plan, rank: int, stages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """A rank's stages, each with the microbatches that it has in flight at most."""
    laws, m = schedule_named(plan.schedule), plan.microbatches
    if plan.chunks == 1:
        yield rank, laws.in_flight(depth=plan.depth, stage=rank, microbatches=m)
        return
    held = held_by(laws, plan.depth // plan.chunks, plan.chunks, rank, m, recompute=False)
    yield from zip(stages, held.most, strict=True)


def _end_s(plan: Plan, stages: Sequence[int]) -> float:
    """What a rank has left when its last backward is over: its updates, and the rest of one exchange with a flush."""
    laws = schedule_named(plan.schedule)
    updates_s = sum(plan.costs[stage].update_s for stage in stages)
    if max(plan.replicas) == 1 or not laws.flushes:
        return updates_s
    split = plan.split_backward or laws.splits_backward
    tails_s = (plan.costs[stage].exchange_tail_s(split=split) + plan.costs[stage].update_s for stage in stages)
    return max(updates_s, min(tails_s))


def _passages(plan: Plan) -> list[_Passage]:
    """Every stage's. A stage may recompute as a whole while it waits for a gradient: that delays no microbatch."""
    splits = plan.split_backward or schedule_named(plan.schedule).splits_backward
    onward_s = [
        0.0  # one rank hands over to itself
        if sender == receiver
        else own.activation_transfer_s + own.latency_s + following.gradient_transfer_s + following.latency_s
        for (own, following), (sender, receiver) in zip(
            pairwise(plan.costs), pairwise(_ranks_of_stages(plan)), strict=True
        )
    ]
    passages = []
    for stage, own, after_s in zip(plan.stages, plan.costs, (*onward_s, 0.0), strict=True):
        first_s = own.forward_s + (own.recompute_s if stage.recompute else 0.0)
        back_s = own.backward_input_s if splits else own.backward_s
        again_s = own.recompute_s if stage.recompute_unit != "stage" else 0.0
        passages.append(
            _Passage(
                there_and_back_s=own.forward_s + again_s + back_s + after_s,
                between_s=first_s + back_s,
                compute_s=first_s + back_s + (own.backward_weight_s if splits else 0.0),
                forward_s=own.forward_s,
            )
        )
    return passages


def _ports_s(plan: Plan, passages: Sequence[_Passage]) -> float:
    """What the busiest port carries in a batch; with a flush, from the first exchange that may begin to the last."""
    ranks_of_stages, m = _ranks_of_stages(plan), plan.microbatches
    carried_s = _transfers_s(plan, ranks_of_stages)
    exchanged_s: dict[_Port, float] = defaultdict(float)
    begins_s: dict[_Port, float] = {}
    reached_s = [0.0, *accumulate(passage.forward_s for passage in passages)]
    for stage, (own, ranks) in enumerate(zip(plan.costs, ranks_of_stages, strict=True)):
        devices = own.reduce_port_devices
        if devices and len(ranks) > 1:
            inside = Counter(rank // devices for rank in ranks)
            seconds = (own.reduce_s - own.reduce_inside_s) * min(own.reduce_device_share * min(inside.values()), 1.0)
            first_s = reached_s[stage] + (m - 1) * passages[stage].compute_s
            for port in ((out, devices, unit) for unit in inside for out in (True, False)):
                exchanged_s[port] += seconds
                begins_s[port] = min(begins_s.get(port, first_s), first_s)
    least_s = max((carried_s[port] + exchanged_s[port] for port in {*carried_s, *exchanged_s}), default=0.0)
    if schedule_named(plan.schedule).flushes and plan.chunks == 1:
        # The stage that updates last may begin its next batch later than stage 0, by the way to it.
        least_s = max([least_s, *(begins_s[port] + exchanged_s[port] - reached_s[-2] for port in begins_s)])
    return least_s


def _ranks_of_stages(plan: Plan) -> list[tuple[int, ...]]:
    """Every stage's ranks, by replica."""
    first = ranks_by_stage(plan.placement)
    owners = sorted((stage, rank) for rank, stages in enumerate(stages_by_rank(plan)) for stage in stages)
    return [first[rank] for _, rank in owners]


def _transfers_s(plan: Plan, ranks: Sequence[Sequence[int]]) -> dict[_Port, float]:
    """What the transfers of a batch take on every port; `ranks` are those of every stage."""
    carried_s: dict[_Port, float] = defaultdict(float)
    for stage, own in enumerate(plan.costs):
        for seconds, devices, other in (
            (own.activation_transfer_s * own.activation_device_share, own.activation_port_devices, stage + 1),
            (own.gradient_transfer_s * own.gradient_device_share, own.gradient_port_devices, stage - 1),
        ):
            if devices and seconds and 0 <= other < plan.depth:
                batch_s = plan.microbatches * seconds
                for (out, unit), count in _crossings(tuple(ranks[stage]), tuple(ranks[other]), devices).items():
                    carried_s[out, devices, unit] += count * batch_s
    return carried_s


@lru_cache(maxsize=256)
def _crossings(senders: tuple[int, ...], receivers: tuple[int, ...], devices: int) -> Counter[tuple[bool, int]]:
    """How many transfers leave (True) and enter each unit of so many devices."""
    found = Counter[tuple[bool, int]]()
    for sender, receiver in zip(senders, receivers, strict=True):
        if sender // devices != receiver // devices:
            found[True, sender // devices] += 1
            found[False, receiver // devices] += 1
    return found
