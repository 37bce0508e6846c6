"""Bound: a lower bound on a batch's seconds in any play of a plan, from its costs and its placement alone.

Stage s computes a microbatch in c_s seconds, and a batch has m microbatches. A round trip from stage s to a later stage
t is a microbatch's forwards from s to t and its backwards from t to s, with the transfers between them. No batch is
shorter than any of the bounds 1 to 11, which stand beside the code; docs/cost-model.md explains 7 to 9.

With a flush, all batches after the first mostly take equally long; if a rank with several stages is much busier than
the first rank, two or three are shorter. Without a flush, long and short batches may alternate. A rate is the mean over
a window, which may hold one more short batch than long ones. So a price is capped at the bound (`complete`).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.costs.memory import as_few, held_by, stages_by_rank
from pipeplan.costs.transfer import ranks_by_stage
from pipeplan.documents.engines import engine_named
from pipeplan.documents.plan import Plan
from pipeplan.planners.chunk_span import span_of
from pipeplan.schedules.registry import schedule_named
from pipeplan.simulation.predict import keeps_ties_apart

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class _StageTimes:
    """Seconds of a microbatch on a stage."""

    there_and_back_s: float
    """The forward, recomputation by block, the backward until the gradient can be sent, and both transfers."""

    between_s: float
    """The stage's compute until it can send the gradient: with a split backward, without the weights' gradients."""

    compute_s: float
    """The stage's whole compute."""

    forward_s: float
    there_s: float
    """The forward and the transfer to the next stage."""

    hop_s: float
    """The transfers to the next stage and from it."""


def most_samples_per_s(plan: Plan) -> float:
    """Samples a second that no play of the plan exceeds in its steady state; infinite if the plan costs nothing.

    If stages have different numbers of replicas, only their compute and their turns (11) count.
    """
    if plan.width is not None:
        least_s = least_batch_s(plan)
        return plan.microbatch_size * plan.microbatches * plan.width / least_s if least_s > 0 else inf
    times = _stage_times(plan)
    slowest_s = max(own.compute_s / stage.replicas for own, stage in zip(times, plan.stages, strict=True))
    slowest_s = max(slowest_s, pipedream_turns_s(plan, times))
    return plan.microbatch_size / slowest_s * (1 + _ROUNDING) if slowest_s > 0 else inf


def least_batch_s(plan: Plan) -> float:
    """A lower bound on a batch's seconds in the plan's steady state. All stages have equal numbers of replicas."""
    laws, costs, m = schedule_named(plan.schedule), plan.costs, plan.microbatches
    times = _stage_times(plan)
    if not laws.pipelined:
        # 4. One at a time: each microbatch makes a round trip through all stages before the next one begins.
        alone_s = sum(max(each.there_and_back_s, each.compute_s) for each in times)
        if plan.depth > 1:
            return (1 - _ROUNDING) * m * sum(each.there_and_back_s for each in times)
        return (1 - _ROUNDING) * (m * alone_s + (_end_s(plan, [0]) if laws.flushes else 0.0))
    exchanges = max(plan.replicas) > 1
    by_rank = stages_by_rank(plan)
    ends_s = [_end_s(plan, stages) for stages in by_rank]
    overlaps = engine_named(plan.engine).overlaps
    last_s = _end_s(plan, by_rank[0][: 1 if overlaps else None])  # with overlap, other stages may end earlier
    before_s = [0.0, *accumulate(each.there_and_back_s for each in times)]
    least_s = 0.0
    for rank, stages in enumerate(by_rank):
        # 2. In flight: stage s has at most k_s microbatches in flight, each for R_s, its round trip to the last stage.
        #    So a batch takes m R_s / k_s (Little 1961).
        rounds_s = [m * (before_s[-1] - before_s[stage]) / held for stage, held in _held(plan, rank, stages)]
        # 1. Compute: a rank computes all microbatches of a batch in m c_s, then finishes its exchanges and its update.
        computed_s = m * sum(times[stage].compute_s for stage in stages) + ends_s[rank]
        least_s = max(least_s, computed_s, *rounds_s)
        if laws.flushes:
            # 5. Ranks of several stages: the first stage is reached first, and is the last to send a gradient back.
            window_s = m * sum(times[stage].between_s for stage in stages)
            least_s = max(least_s, before_s[rank] + window_s + (last_s if rank else 0.0))
            # 3. Fill and drain: the first microbatch passes the earlier stages before stage s, the last one after it.
            #    Both are added to 1 and 2. With a split backward, only input gradients count after stage s.
            for stage, round_s in zip(stages, rounds_s, strict=True):
                window_s = max(m * times[stage].between_s, round_s)
                least_s = max(least_s, before_s[stage] + window_s + (last_s if stage else 0.0))
        elif exchanges:
            least_s = max(least_s, *(costs[stage].reduce_s for stage in stages))
    if laws.flushes and plan.chunks > 1 and not (plan.split_backward or laws.splits_backward):
        slowest = max(range(len(by_rank)), key=lambda rank: sum(times[s].compute_s for s in by_rank[rank]))
        tightest = {slowest, len(by_rank) - 1}  # the last rank's first backward comes first
        least_s = max(least_s, *(_through_all_s(plan, rank, times) + last_s for rank in tightest))
    least_s = max(least_s, _between_meetings_s(plan, times))
    least_s = max(least_s, played_turns_s(plan, times) + last_s)
    return (1 - _ROUNDING) * max(least_s, _ports_s(plan, times))


def turns_s(within_s: FloatArray, first_s: FloatArray, reached_s: FloatArray, microbatches: int) -> float:
    """Bound 8, turns: seconds from the first forward of a 1F1B batch to its last backward, both on the first stage; 0
    if every stage holds all microbatches.

    Forward n on stage s leads to forward n on t, to the next backward on t, to that backward on s, and to forward
    n + q on s, where q is t - s + 1. So q microbatches take at least one round trip from s to t.

    within_s[s, t] is a lower bound on what stages s to t together compute for a microbatch, first_s[p] on a stage's
    forward. reached_s[p] is the transfer time to each stage and back.

    Of m microbatches, stage t has k = p - t in flight. On stage s, k - 1 forwards precede forward k - 1. Then follow
    (m - k) // q round trips from s to t, the remaining (m - k) % q microbatches, and the last one's round trip from s
    to the end. With the first one's forwards before s and the last one's backwards to the first stage, the latter is a
    round trip through all stages.
    """
    p = len(within_s)
    s, t = _pairs(p)
    s, t = s[p - s < microbatches], t[p - s < microbatches]
    if not len(s):
        return 0.0
    round_trips, left = np.divmod(microbatches - (p - t), t - s + 1)
    round_trip_s = within_s[s, t] + reached_s[t] - reached_s[s]
    turning_s = (p - t - 1) * first_s[s] + round_trips * round_trip_s + left * within_s[s, s]
    return float(within_s[0, -1] + reached_s[-1] + turning_s.max())


def interleaved_turns_s(round_trip_s: FloatArray, around_s: FloatArray, microbatches: int, chunks: int) -> float:
    """Bound 9, turns of ranks of several stages: seconds from the first forward of an interleaved batch to its last
    backward, both on the first stage; 0 if every rank begins with all forwards.

    In the interleaved schedule, 2 (t - s) + 1 forwards of rank s take at least one round trip from rank s to rank t.

    A round trip from rank s to rank t takes at least round_trip_s[s, t], whichever chunks it passes. A turn is from one
    forward of rank s to its next. Before the first turn, the first microbatch goes forward through all stages and
    backward to the rank's last stage. After the last turn, the last microbatch goes on forward from there, and backward
    through all stages. Together, both take at least around_s[s].

    Forward n of rank s is also forward n of rank t. Backward n - w_t follows it there, with w_t = 2
    (p - 1 - t) + (v - 1) p. On rank s, forward n - w_t + w_s + 1 follows the same backward. Turns begin with forward
    w_s + 1.
    """
    p = len(around_s)
    s, t = _pairs(p)
    turns = microbatches * chunks - 2 - (2 * (p - 1 - s) + (chunks - 1) * p)
    some = turns >= 0
    s, t = s[some], t[some]
    round_trips, left = np.divmod(turns[some], 2 * (t - s) + 1)
    return float((around_s[s] + round_trips * round_trip_s[s, t] + left * round_trip_s[s, s]).max(initial=0.0))


def of_stages_s(
    first_s: FloatArray, step_s: FloatArray, reached_s: FloatArray, whole_s: float, microbatches: int
) -> float:
    """Bound 9 of given stages: first_s are their forwards and step_s their whole compute, by [chunk, rank]. A
    microbatch takes whole_s through all stages and back.
    """
    hops_s = reached_s[None, :] - reached_s[:, None]
    there_s, back_s = within_s(first_s), within_s(step_s - first_s)
    around_s = whole_s + (there_s[-1] + back_s[-1] + hops_s)[:, -1]
    round_trip_s = there_s.min(axis=0) + back_s.min(axis=0) + hops_s
    return interleaved_turns_s(round_trip_s, around_s, microbatches, chunks=len(step_s))


def played_turns_s(plan: Plan, times: Sequence[_StageTimes]) -> float:
    """Bounds 8 and 9 of a plan; 0 where ranks do not take turns."""
    interleaved = plan.schedule == "1f1b-interleaved"
    if plan.split_backward or not (interleaved or plan.schedule == "1f1b"):
        return 0.0
    hops_s = np.asarray([each.hop_s for each in times])
    step_s = np.asarray([each.there_and_back_s for each in times]) - hops_s
    first_s = np.asarray([each.forward_s for each in times])
    if not interleaved:
        return turns_s(within_s(step_s), first_s, np.cumsum(hops_s) - hops_s, plan.microbatches)
    whole_s = float(step_s.sum() + hops_s.sum())
    first_s, step_s, by_chunk_s = (each.reshape(plan.chunks, -1) for each in (first_s, step_s, hops_s))
    least_s = by_chunk_s.min(axis=0)
    return of_stages_s(first_s, step_s, np.cumsum(least_s) - least_s, whole_s, plan.microbatches)


def pipedream_turns_s(plan: Plan, times: Sequence[_StageTimes]) -> float:
    """Bound 11: seconds of a microbatch, in the long run, of stages that take turns under PipeDream.

    Each of stage s's r_s replicas has k_s microbatches in flight. Forward n on stage s leads to forward n on stage t,
    to the next backward there, of microbatch n - (k_t - 1) r_t, to that backward on s, and to the next forward of its
    replica: k_s r_s microbatches later. So k_s r_s - (k_t - 1) r_t microbatches take at least one round trip.
    """
    replicas = np.asarray(plan.replicas)
    onwards = np.cumsum(replicas[::-1])[::-1]
    in_flight = -(-onwards // replicas)  # `Pipeline.in_flight_limit`
    hops_s = np.asarray([each.hop_s for each in times])
    step_s = np.asarray([each.there_and_back_s for each in times]) - hops_s
    reached_s = np.cumsum(hops_s) - hops_s
    s, t = _pairs(plan.depth)
    turns = (in_flight * replicas)[s] - ((in_flight - 1) * replicas)[t]
    round_trip_s = within_s(step_s)[s, t] + reached_s[t] - reached_s[s]
    return float((round_trip_s[turns > 0] / turns[turns > 0]).max())


_pairs = lru_cache(maxsize=256)(np.triu_indices)


def within_s(step_s: FloatArray) -> FloatArray:
    """[..., s, t]: the sum over stages s to t."""
    until_s = np.cumsum(step_s, axis=-1)
    return np.asarray(until_s[..., None, :] - (until_s - step_s)[..., :, None])


def _between_meetings_s(plan: Plan, times: Sequence[_StageTimes]) -> float:
    """Bound 10, shared weights: seconds between two updates under 2BW; 0 for other schedules.

    Stages that share weights wait for each other before every update. Between two updates, the last of them computes a
    batch, less the forwards that it does ahead, and the batch's last microbatch goes back to the first of them.
    """
    laws = schedule_named(plan.schedule)
    if laws.flushes or laws.update != "batch":
        return 0.0
    back_s = [0.0, *accumulate(each.there_and_back_s - each.there_s for each in times)]
    least_s = 0.0
    for tied in plan.tied:
        first, last = tied.stages[0], tied.stages[-1]
        ahead = laws.in_flight(depth=plan.depth, stage=last, microbatches=plan.microbatches) - 1
        batch_s = plan.microbatches * times[last].compute_s - ahead * times[last].forward_s
        exchanged_s = plan.costs[first].exchange_tail_s(split=False) if plan.replicas[first] > 1 else 0.0
        meeting_s = exchanged_s + tied.seconds + plan.costs[last].update_s
        least_s = max(least_s, batch_s + back_s[last] - back_s[first] + meeting_s)
    return least_s


def _held(plan: Plan, rank: int, stages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """A rank's stages, each with its upper bound on microbatches in flight."""
    laws, m = schedule_named(plan.schedule), plan.microbatches
    if plan.chunks == 1:
        yield rank, laws.in_flight(depth=plan.depth, stage=rank, microbatches=m)
        return
    held = held_by(laws, plan.depth // plan.chunks, plan.chunks, rank, m, recompute=False)
    yield from zip(stages, held.most, strict=True)


def _end_s(plan: Plan, stages: Sequence[int]) -> float:
    """The seconds of a rank after its last backward: its updates, the exchanges of weights that it shares with other
    ranks and, with a flush, the rest of one exchange among replicas.

    An engine without overlap runs the exchanges of all stages, one after the other.
    """
    laws = schedule_named(plan.schedule)
    updates_s = sum(plan.costs[stage].update_s for stage in stages) + _tied_s(plan, stages)
    if max(plan.replicas) == 1 or not laws.flushes:
        return updates_s
    if not engine_named(plan.engine).overlaps:
        return updates_s + sum(plan.costs[stage].reduce_s for stage in stages)
    split = plan.split_backward or laws.splits_backward
    tails_s = (plan.costs[stage].exchange_tail_s(split=split) + plan.costs[stage].update_s for stage in stages)
    return max(updates_s, min(tails_s) + _tied_s(plan, stages))


def _tied_s(plan: Plan, stages: Sequence[int]) -> float:
    """The seconds in which a rank with these stages sums the gradients of weights that others share."""
    if keeps_ties_apart(plan):
        return 0.0
    with_others = (tied for tied in plan.tied if not set(tied.stages) <= set(stages))
    return sum(tied.seconds for tied in with_others if not set(tied.stages).isdisjoint(stages))


def _stage_times(plan: Plan) -> list[_StageTimes]:
    """A microbatch's seconds on every stage. A stage that recomputes as a whole may do so while it waits, without
    delaying a microbatch.
    """
    splits = plan.split_backward or schedule_named(plan.schedule).splits_backward
    ranks = [np.asarray(each) for each in ranks_by_stage(plan.placement)]
    hops_s = list[tuple[float, float]]()
    for (own, following), (sender, receiver) in zip(pairwise(plan.costs), pairwise(_owners(plan)), strict=True):
        if sender == receiver:  # one rank passes tensors to itself
            hops_s.append((0.0, 0.0))
            continue
        pair = ranks[sender], ranks[receiver]
        onward = back = 1.0
        if plan.width is not None:  # replicas next to others of another number send at different times
            onward = _crowding(pair, own.activation_port_devices, own.activation_device_share)
            back = _crowding(pair, following.gradient_port_devices, following.gradient_device_share)
        hops_s.append(
            (
                onward * own.activation_transfer_s + own.arrives_after_s(onward=True),
                back * following.gradient_transfer_s + following.arrives_after_s(onward=False),
            )
        )
    times = []
    for stage, own, (onward_s, return_s) in zip(plan.stages, plan.costs, (*hops_s, (0.0, 0.0)), strict=True):
        first_s = own.forward_s + (own.recompute_s if stage.recompute else 0.0)
        back_s = own.backward_input_s if splits else own.backward_s
        again_s = own.recompute_s if stage.recompute_unit != "stage" else 0.0
        times.append(
            _StageTimes(
                there_and_back_s=own.forward_s + again_s + back_s + (onward_s + return_s),
                between_s=first_s + back_s,
                compute_s=first_s + back_s + (own.backward_weight_s if splits else 0.0),
                forward_s=own.forward_s,
                there_s=own.forward_s + onward_s,
                hop_s=onward_s + return_s,
            )
        )
    return times


def _crowding(pair: tuple[IntArray, IntArray], devices: int, share: float) -> float:
    """The factor by which a boundary's transfer slows down: in a play, all replicas send at once.

    `devices` share a port; a transfer alone takes a `share` of its bandwidth.
    """
    if not devices or share * len(pair[0]) <= 1.0:
        return 1.0
    units = [ranks // devices for ranks in pair]
    together = max(int(np.bincount(own[units[0] != units[1]]).max(initial=0)) for own in units)
    return max(1.0, together * share)


def _ports_s(plan: Plan, times: Sequence[_StageTimes]) -> float:
    """Bound 6, ports: a port carries all transfers of a batch that pass it. With a flush, no exchange begins before the
    last backward: the seconds from a port's earliest exchange to its last count as well.

    All ports of a level are computed at once: a large cluster has thousands.
    """
    owners, m, workers = _owners(plan), plan.microbatches, len(plan.placement)
    ranks = [np.asarray(each) for each in ranks_by_stage(plan.placement)]
    carried_s = _transfers_s(plan, owners, ranks)
    exchanged_s: dict[int, FloatArray] = {}
    begins_s: dict[int, FloatArray] = {}
    reached_s = [0.0, *accumulate(each.forward_s for each in times)]
    for stage, (own, owner) in enumerate(zip(plan.costs, owners, strict=True)):
        devices = own.reduce_port_devices
        if devices and plan.stages[stage].replicas > 1:
            counts = np.bincount(ranks[owner] // devices, minlength=-(-workers // devices))
            inside, share = counts > 0, own.reduce_device_share * int(counts[counts > 0].min())
            seconds = (own.reduce_s - own.reduce_inside_s) * min(share, 1.0)
            first_s = np.where(inside, reached_s[stage] + (m - 1) * times[stage].compute_s, inf)
            exchanged_s[devices] = np.asarray(exchanged_s.get(devices, 0.0) + seconds * inside)
            begins_s[devices] = np.minimum(begins_s.get(devices, inf), first_s)
    busiest_s = [each_s + exchanged_s.get(devices, 0.0) for (_, devices), each_s in carried_s.items()]
    least_s = max((float(each_s.max()) for each_s in (*busiest_s, *exchanged_s.values())), default=0.0)
    if schedule_named(plan.schedule).flushes and plan.chunks == 1:
        # The stage that updates last may begin its next batch later than stage 0, by the forwards before it.
        for devices, first_s in begins_s.items():
            last_s = first_s + exchanged_s[devices] - reached_s[-2]
            least_s = max(least_s, float(last_s[first_s < inf].max()))
    return least_s


def _through_all_s(plan: Plan, rank: int, times: Sequence[_StageTimes]) -> float:
    """Bound 7, first backward to last forward: the seconds of a batch with a flush, for a rank of several stages.

    A microbatch passes forward through all stages before the rank's first backward, and one passes backward through
    all of them after its last forward. The rank's compute between the two is added.
    """
    laws, span = schedule_named(plan.schedule), plan.depth // plan.chunks
    between = span_of(laws, span, plan.chunks, rank, as_few(plan.microbatches, span))
    if between is None:
        return 0.0
    more = plan.microbatches - as_few(plan.microbatches, span)
    stages = stages_by_rank(plan)[rank]
    first, last = stages[between.first], stages[between.last]
    there_s = sum(each.there_s for each in times)
    back_s = [each.there_and_back_s - each.there_s for each in times]
    least_s = there_s + sum(back_s[first:]) + times[last].there_s - times[last].forward_s
    for chunk, (forwards, backwards) in enumerate(between.counts):
        own = times[stages[chunk]]
        least_s += (forwards + more) * own.forward_s + (backwards + more) * (own.between_s - own.forward_s)
    return least_s + sum(each.there_s for each in times[last + 1 :]) + sum(back_s)


def _owners(plan: Plan) -> list[int]:
    """Every stage's rank of a pipeline."""
    return [rank for _, rank in sorted((stage, rank) for rank, own in enumerate(stages_by_rank(plan)) for stage in own)]


def _transfers_s(plan: Plan, owners: Sequence[int], ranks: Sequence[IntArray]) -> dict[tuple[bool, int], FloatArray]:
    """Seconds of a batch's transfers on every unit's ports, by direction (True: outwards) and by the devices that share
    a port. `owners` has each stage's rank in a pipeline, `ranks` those of all its replicas.
    """
    handed_s: dict[tuple[int, int, int], float] = defaultdict(float)
    for stage, own in enumerate(plan.costs):
        for seconds, devices, other in (
            (own.activation_transfer_s * own.activation_device_share, own.activation_port_devices, stage + 1),
            (own.gradient_transfer_s * own.gradient_device_share, own.gradient_port_devices, stage - 1),
        ):
            if devices and seconds and 0 <= other < plan.depth:
                handed_s[owners[stage], owners[other], devices] += plan.microbatches * seconds
    carried_s: dict[tuple[bool, int], FloatArray] = {}
    for (sender, receiver, devices), seconds in handed_s.items():
        out, into, units = ranks[sender] // devices, ranks[receiver] // devices, -(-len(plan.placement) // devices)
        for outwards, unit in ((True, out), (False, into)):
            batch_s = seconds * np.bincount(unit[out != into], minlength=units)
            carried_s[outwards, devices] = np.asarray(carried_s.get((outwards, devices), 0.0) + batch_s)
    return carried_s
