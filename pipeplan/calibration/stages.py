"""Stages: what runs show about compute, updates, the overhead of an instruction, and the memory of a process."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median

from pipeplan.calibration.fit import Delay, StageSeconds, block_factors, link_terms
from pipeplan.calibration.observed import Observed, overhead_s, simulated, term
from pipeplan.calibration.samples import sample, steps
from pipeplan.costs.estimate import update_beyond_bytes_s
from pipeplan.documents.calibration import BlockFactors, Calibration, Term
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.profile import Profile
from pipeplan.schedules.registry import schedule_named

Seconds = Callable[[Measurement], float]


def overheads(seen: Sequence[Observed], profile: Profile) -> tuple[Term | None, Term | None]:
    """The time of every instruction besides its work, and the seconds a byte of sends and receives.

    Both are those of sends, and of receives that need not wait. If the profile has no time for a byte, there is no
    second term, and the first has all of it. Without messages it is the time between two instructions, if there is any.
    """
    known, own_s = profile.overheads, [o.transfers.own_s for o in seen]
    messages = [
        (o.costs[boundary].activation_message_s, [sample(kind[boundary]) for kind in kinds if boundary in kind])
        for o, kinds in zip(seen, own_s, strict=True)
        for boundary in range(o.plan.depth - 1)
    ]
    delays = [
        Delay(
            size_bytes=known_s / known.message_s_per_byte,
            seconds=fmean(each.value for each in samples),
            relative_spread=max(each.relative_spread for each in samples),
        )
        for known_s, samples in messages
        if known_s and any(each.value for each in samples)
    ]
    of_kinds = [[s for kinds in own_s for each in kinds[at].values() for s in each] for at in (0, 1)]
    samples = [sample(each) for each in of_kinds if each]
    count = sum(found.count for found in samples)
    if delays:
        bytes_per_s, instruction_s = link_terms(delays, 1 / known.message_s_per_byte, known.instruction_s)
        spread = max(each.relative_spread for each in delays)
        both = [Term(value=v, spread=v * spread, observations=count) for v in (instruction_s, 1 / bytes_per_s)]
        return both[0], both[1]
    if samples:
        spread_s = max(found.spread for found in samples)
        return Term(value=fmean(found.value for found in samples), spread=spread_s, observations=count), None
    gaps_s = [
        step.duration_s - (end_s - start_s)
        for o in seen
        for lane in o.run.timeline.lanes
        for step, start_s, end_s in zip(steps(lane), lane.start_s, lane.end_s, strict=True)
    ]
    return term(gaps_s) if gaps_s and median(gaps_s) > 0 else None, None


def with_compute(found: Calibration, seen: Sequence[Observed], profile: Profile) -> Calibration:
    """Adds the blocks' corrections: factors by block, and the shares by which caches and the graph change them."""
    instruction_s = overhead_s(found, profile)
    forwards = _stages(seen, instruction_s, lambda m: m.forward_s, "forward")
    again = _stages(seen, instruction_s, lambda m: m.forward_s, "recompute")
    after_updates = _stages(seen, instruction_s, lambda m: m.forward_s, "forward-after-update")
    backwards = _stages(seen, instruction_s, lambda m: m.backward_s, "backward")
    first_halves = _stages(seen, instruction_s, lambda m: m.backward_input_s or 0.0, "backward-input")
    second_halves = _stages(seen, instruction_s, lambda m: m.backward_weight_s or 0.0, "backward-weight")
    hot_factors = [stage.factor for stage in backwards if stage.hot]
    cold_factors = [stage.factor for stage in backwards if not stage.hot]
    hot_share = None  # a backward right after its forward, as a share of other backwards
    if hot_factors and cold_factors:
        cold, spread = fmean(cold_factors), sample(hot_factors).spread
        hot_share = Term(value=fmean(hot_factors) / cold, spread=spread / cold, observations=len(backwards))
    hot = hot_share.value if hot_share else profile.overheads.backward_after_forward

    without_graph = _stages(seen, instruction_s, lambda m: m.forward_s, "forward-without-graph")
    plain, redone = forwards or after_updates, profile.overheads.recompute
    if not plain and again:
        plain, again = [_slowed(stage, 1 / redone) for stage in again], []
    elif not plain:
        plain = [_slowed(stage, 1 / profile.overheads.forward_without_graph) for stage in without_graph]
        without_graph = []
    found = replace(found, forward=_block_factors(plain, profile))
    found = replace(found, recompute=_share_of_forward(found, again))

    # From a backward by block, the corrected forward that it runs again is subtracted.
    corrected = found.forward.values if found.forward else (1.0,) * len(profile.blocks)
    share = found.recompute.value if found.recompute else redone

    def again_s(o: Observed, stage: int) -> float:
        return share * sum(o.measured[i].forward_s * corrected[i] for i in o.blocks_of(stage))

    backwards += _stages(seen, instruction_s, lambda m: m.backward_s, "backward-by-block", less_s=again_s)
    found = replace(
        found,
        backward=_block_factors(_cooled(backwards, hot), profile),
        backward_input=_block_factors(_cooled(first_halves, hot), profile),
        backward_weight=_block_factors(second_halves, profile),
        backward_after_forward=hot_share,
    )
    return replace(found, forward_without_graph=_share_of_forward(found, without_graph))


def _stages(
    seen: Sequence[Observed],
    instruction_s: float,
    seconds: Seconds,
    kind: str,
    *,
    less_s: Callable[[Observed, int], float] = lambda *_: 0.0,
) -> list[StageSeconds]:
    """Every stage on which this kind was observed, without the overhead of an instruction, and without `less_s`."""
    return [
        StageSeconds(
            blocks=blocks,
            profile_s=profile_s,
            measured_s=found.value - instruction_s - less_s(o, stage),
            relative_spread=found.relative_spread,
            hot=o.is_hot(stage),
        )
        for o in seen
        for stage, found in o.seen(kind)
        if (blocks := o.blocks_of(stage))
        and sum(profile_s := tuple(seconds(o.measured[i]) for i in blocks)) > 0
        and found.value > instruction_s + less_s(o, stage)
    ]


def _slowed(stage: StageSeconds, factor: float) -> StageSeconds:
    return replace(stage, measured_s=stage.measured_s * factor)


def _cooled(stages: Iterable[StageSeconds], hot: float) -> list[StageSeconds]:
    """The time of the backwards if none came right after its forward."""
    return [_slowed(stage, 1 / hot) if stage.hot else stage for stage in stages]


def _block_factors(stages: Sequence[StageSeconds], profile: Profile) -> BlockFactors | None:
    if not stages:
        return None
    values = tuple(block_factors(stages, len(profile.blocks)).tolist())
    misses = [1 - stage.with_factors(values) / stage.measured_s for stage in stages]
    return BlockFactors(values=values, spread=fmean(miss**2 for miss in misses) ** 0.5, observations=len(stages))


def _share_of_forward(found: Calibration, stages: Iterable[StageSeconds]) -> Term | None:
    """The time of forwards of another kind, as a share of the corrected forward."""
    return term(
        [
            stage.measured_s / (stage.with_factors(found.forward.values) if found.forward else stage.total_s)
            for stage in stages
        ]
    )


def with_updates(found: Calibration, seen: Sequence[Observed], profile: Profile) -> Calibration:
    """Adds the time of updates by byte of weights, in place and into a copy.

    An update passes all weights, gradients and states through the caches: the time by which that slows the next
    forward down counts as the update's.
    """
    corrected = found.forward.values if found.forward else (1.0,) * len(profile.blocks)
    instruction_s = overhead_s(found, profile)
    in_place: list[float] = []
    copied: list[float] = []
    for o in seen:
        for stage, seen_update in o.seen("update"):
            weight_bytes = sum(profile.blocks[i].trained_bytes for i in o.blocks_of(stage))
            if weight_bytes == 0:
                continue
            # The forward after it is slower than the stage's others or, without others, than the corrected profile's.
            plain_s = instruction_s + sum(o.measured[i].forward_s * corrected[i] for i in o.blocks_of(stage))
            after, others = o.stages.get((stage, "forward-after-update")), o.stages.get((stage, "forward"))
            slowed_s = 0.0 if after is None else after.value - (others.value if others else plain_s)
            beyond_s = update_beyond_bytes_s(profile, o.blocks_of(stage))
            s_per_byte = max(seen_update.value + slowed_s - beyond_s, 0.0) / weight_bytes
            copies = schedule_named(o.plan.schedule).keeps_versions(o.plan.replicas, stage)
            (copied if copies else in_place).append(s_per_byte)
    known = profile.overheads
    if not in_place and copied:
        in_place = [max(s - known.version_s_per_byte, 0.0) for s in copied]
    update = term(in_place)
    more = term([s - update.value for s in copied]) if update else None
    return replace(found, update_s_per_byte=update, version_s_per_byte=more)


def activation_factor(seen: Sequence[Observed]) -> Term | None:
    """The bytes that a microbatch keeps, measured over profile: from the part of the peaks that depends on microbatches
    in flight.
    """
    factors = []
    for o in seen:
        empty = tuple(
            replace(each, activation_bytes=0, split_activation_bytes=0, weight_gradient_bytes=0) for each in o.costs
        )
        predicted, rest = (simulated(o.run, costs).timeline.lanes for costs in (o.costs, empty))
        of_ranks = o.run.stages
        for ours, beside, theirs in zip(predicted, rest, o.run.timeline.lanes, strict=True):
            stages = of_ranks[ours.stage]
            held = zip(ours.memory_bytes, beside.memory_bytes, strict=True)
            _, in_flight = max(((most, most - others) for most, others in held), default=(0, 0))
            keeps = theirs.memory_bytes and any(o.costs[stage].activation_bytes for stage in stages)
            if keeps and in_flight > 0 and not any(o.plan.stages[stage].recompute for stage in stages):
                factors.append(1 + (theirs.peak_memory_bytes - ours.peak_memory_bytes) / in_flight)
    return term([factor for factor in factors if factor > 0])


def context_bytes(seen: Sequence[Observed]) -> Term | None:
    """The bytes that a process held besides tensors: on a GPU outside its allocator, on the host beyond the counted
    tensors.
    """
    held_bytes: list[float] = []
    for run in (o.run for o in seen):
        if run.device_memory:
            held_bytes += [float(memory.context_bytes) for memory in run.device_memory]
        else:
            pairs = zip(run.peak_resident_bytes, run.timeline.lanes, strict=False)
            known = [(resident_bytes, lane.peak_memory_bytes) for resident_bytes, lane in pairs if lane.memory_bytes]
            held_bytes += [float(max(resident_bytes - peak_bytes, 0)) for resident_bytes, peak_bytes in known]
    return term(held_bytes)


def allocator_reserve(seen: Sequence[Observed]) -> Term | None:
    """The share of a GPU allocator's largest reservation that held no tensor which the runtime counts."""
    return term(
        [
            max(1 - lane.peak_memory_bytes / memory.reserved_bytes, 0.0)
            for o in seen
            for memory, lane in zip(o.run.device_memory, o.run.timeline.lanes, strict=False)
            if memory.reserved_bytes and any(lane.memory_bytes)
        ]
    )
