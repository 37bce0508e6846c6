"""Calibrate: a profile, a cluster and measured runs of plans made from them -> Calibration."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from planner_service.core.calibrate.fit import LEAST_SLOWNESS, Delay, StageSeconds, block_factors, link_terms
from planner_service.core.calibrate.samples import (
    MeasuredRun,
    Sample,
    StageSamples,
    TransferSamples,
    exchange_samples,
    sample,
    stage_samples,
    steps,
    transfer_samples,
)
from planner_service.core.cluster import Cluster, Level
from planner_service.core.cost.calibration import BlockFactors, Calibration, LevelTerms, RunUsed, Term, apply
from planner_service.core.cost.estimate import backward_follows_forward, estimate, keeps_versions
from planner_service.core.cost.transfer import ranks_by_stage
from planner_service.core.errors import require
from planner_service.core.identity import content_id
from planner_service.core.plan import Plan
from planner_service.core.predict import program_of
from planner_service.core.profile import Measurement, Profile
from planner_service.core.simulate import simulate
from planner_service.core.stage_costs import StageCosts
from planner_service.core.throughput import throughput_samples_per_s
from planner_service.core.timeline import Timeline

Seconds = Callable[[Measurement], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Observed:
    """A run, what the profile has for its stages, and what was seen of them."""

    run: MeasuredRun
    costs: tuple[StageCosts, ...]
    measured: tuple[Measurement, ...]
    stages: StageSamples
    exchanges: Mapping[int, Sample]
    transfers: TransferSamples

    @property
    def plan(self) -> Plan:
        return self.run.plan

    def blocks_of(self, stage: int) -> tuple[int, ...]:
        """The profile's blocks that a stage holds."""
        places = range(self.plan.stages[stage].start, self.plan.stages[stage].stop)
        return tuple(places) if self.plan.order is None else tuple(self.plan.order[place] for place in places)

    def seen(self, kind: str) -> Iterable[tuple[int, Sample]]:
        """By stage, what was seen of this kind."""
        return [(stage, found) for (stage, its), found in self.stages.items() if its == kind]

    def is_hot(self, stage: int) -> bool:
        """Whether its backwards come right after their forwards."""
        recompute, last = self.plan.stages[stage].recompute, stage == self.plan.depth - 1
        return backward_follows_forward(self.plan.schedule, recompute=recompute, last=last)


def calibrate(profile: Profile, cluster: Cluster, runs: Sequence[MeasuredRun]) -> Calibration:
    """The cost terms that the runs show. Pure; the order of the runs does not matter. Linear in their instructions.

    Raises InvalidInputError for a run of another model, dtype or profile, and where there is none.
    """
    require(len(runs) > 0, "runs", "must be at least one", len(runs))
    for index, run in enumerate(runs):
        require_run_of(profile, run, f"runs.{index}")
    ordered = sorted(runs, key=lambda run: (content_id(run.plan), run.timeline.makespan_s))
    seen = [_observed(profile, cluster, run) for run in ordered]
    found = Calibration(
        model=profile.model,
        device=profile.device.name,
        dtype=profile.dtype,
        profile_id=content_id(profile),
        cluster_id=content_id(cluster),
        runs=(),
        instruction_s=_instruction_s(seen),
        activation_factor=_activation_factor(seen),
        context_bytes=_context_bytes(seen),
    )
    found = replace(found, levels=_levels(seen, cluster, _overhead_s(found, profile)))
    found = _with_compute(found, seen, profile)
    found = _with_updates(found, seen, profile)
    exchange_factor = _exchange_factor(seen, *apply(found, profile, cluster))
    found = replace(found, exchange_factor=exchange_factor or _unseen_exchange(found, profile, cluster))
    return replace(found, runs=tuple(_run_used(found, profile, cluster, run) for run in ordered))


def require_run_of(profile: Profile, run: MeasuredRun, field: str) -> None:
    """Raises InvalidInputError unless the run's plan was made from the profile."""
    plan = run.plan
    for name, given, wanted in (
        ("model", plan.model.name, profile.model.name),
        ("dtype", plan.dtype, profile.dtype),
        ("blocks", plan.stages[-1].stop, len(profile.blocks)),
        ("profile_id", plan.profile_id, content_id(profile)),
    ):
        require(given == wanted, f"{field}.plan.{name}", f"must be the profile's, {wanted!r}", given)
    devices = sorted({stage.device for stage in plan.stages if stage.device is not None} - {profile.device.name})
    require(
        not devices, f"{field}.plan.stages", f"must all run on the profile's device, {profile.device.name}", devices
    )


def costs_of(plan: Plan, profile: Profile, cluster: Cluster) -> tuple[StageCosts, ...]:
    """The costs that a plan has with another profile or cluster than it was made from."""
    return estimate(
        profile,
        cluster,
        plan.stages,
        plan.placement,
        microbatch_size=plan.microbatch_size,
        optimizer=plan.optimizer,
        schedule=plan.schedule,
        master_weights=plan.master_weights,
        order=plan.order,
    )


def predicted_samples_per_s(plan: Plan, profile: Profile, cluster: Cluster, *, batches: int) -> float:
    """The throughput that the plan's streams give with the costs of this profile and cluster."""
    return throughput_samples_per_s(_played(plan, costs_of(plan, profile, cluster), batches=batches))


def _played(plan: Plan, costs: Sequence[StageCosts], *, batches: int) -> Timeline:
    """The streams that the plan has, whatever costs they are played with."""
    return simulate(program_of(plan, batches=batches), costs)


def _run_used(found: Calibration, profile: Profile, cluster: Cluster, run: MeasuredRun) -> RunUsed:
    plan, batches = run.plan, run.timeline.batches
    return RunUsed(
        plan_id=content_id(plan),
        schedule=plan.schedule,
        depth=plan.depth,
        workers=plan.workers,
        microbatch_size=plan.microbatch_size,
        microbatches=plan.microbatches,
        measured_samples_per_s=throughput_samples_per_s(run.timeline),
        profile_samples_per_s=predicted_samples_per_s(plan, profile, cluster, batches=batches),
        calibrated_samples_per_s=predicted_samples_per_s(plan, *apply(found, profile, cluster), batches=batches),
    )


def _observed(profile: Profile, cluster: Cluster, run: MeasuredRun) -> _Observed:
    return _Observed(
        run=run,
        costs=costs_of(run.plan, profile, cluster),
        measured=profile.at(run.plan.microbatch_size),
        stages=stage_samples(run),
        exchanges=exchange_samples(run),
        transfers=transfer_samples(run),
    )


def _term(values: Sequence[float]) -> Term | None:
    """The median of what was observed; None of nothing."""
    if not values:
        return None
    found = sample(values)
    return Term(value=max(found.value, 0.0), spread=found.spread, observations=found.count)


def _instruction_s(seen: Sequence[_Observed]) -> Term | None:
    """What sends, and receives that need not wait, take: what every instruction takes beside its work.

    Where there are none, the time between two instructions, if there is any.
    """
    kinds = [[s for o in seen for s in o.transfers.send_s], [s for o in seen for s in o.transfers.found_s]]
    samples = [sample(kind) for kind in kinds if kind]
    if samples:
        return Term(
            value=fmean(found.value for found in samples),
            spread=max(found.spread for found in samples),
            observations=sum(found.count for found in samples),
        )
    gaps = _gaps_s(seen)
    return _term(gaps) if gaps and median(gaps) > 0 else None


def _gaps_s(seen: Sequence[_Observed]) -> list[float]:
    lanes = [lane for o in seen for lane in o.run.timeline.lanes]
    return [
        step.duration_s - (end_s - start_s)
        for lane in lanes
        for step, start_s, end_s in zip(steps(lane), lane.start_s, lane.end_s, strict=True)
    ]


def _with_compute(found: Calibration, seen: Sequence[_Observed], profile: Profile) -> Calibration:
    """Adds what the blocks take: by block, and as shares of it where the caches or the graph make a difference."""
    instruction_s = _overhead_s(found, profile)
    forwards = _stages(seen, instruction_s, lambda m: m.forward_s, "forward")
    again = _stages(seen, instruction_s, lambda m: m.forward_s, "recompute")
    after_updates = _stages(seen, instruction_s, lambda m: m.forward_s, "forward-after-update")
    backwards = _stages(seen, instruction_s, lambda m: m.backward_s, "backward")
    first_halves = _stages(seen, instruction_s, lambda m: m.backward_input_s or 0.0, "backward-input")
    second_halves = _stages(seen, instruction_s, lambda m: m.backward_weight_s or 0.0, "backward-weight")
    hot_share = _hot_share(backwards, profile)
    hot = hot_share.value if hot_share else profile.overheads.backward_after_forward
    plain, redone = forwards or after_updates, profile.overheads.recompute
    if not plain:
        plain, again = [_slowed(stage, 1 / redone) for stage in again], []
    found = replace(
        found,
        forward=_block_factors(plain, profile),
        backward=_block_factors(_cooled(backwards, hot), profile),
        backward_input=_block_factors(_cooled(first_halves, hot), profile),
        backward_weight=_block_factors(second_halves, profile),
        backward_after_forward=hot_share,
    )
    without_graph = _stages(seen, instruction_s, lambda m: m.forward_s, "forward-without-graph")
    return replace(
        found,
        recompute=_share_of_forward(found, again),
        forward_without_graph=_share_of_forward(found, without_graph),
    )


def _overhead_s(found: Calibration, profile: Profile) -> float:
    return found.instruction_s.value if found.instruction_s else profile.overheads.instruction_s


def _stages(seen: Sequence[_Observed], instruction_s: float, seconds: Seconds, kind: str) -> list[StageSeconds]:
    """Every stage on which this kind was seen, without what an instruction takes beside its work."""
    return [
        StageSeconds(
            blocks=blocks,
            profile_s=profile_s,
            measured_s=found.value - instruction_s,
            relative_spread=found.relative_spread,
            hot=o.is_hot(stage),
        )
        for o in seen
        for stage, found in o.seen(kind)
        if (blocks := o.blocks_of(stage))
        and sum(profile_s := tuple(seconds(o.measured[i]) for i in blocks)) > 0
        and found.value > instruction_s
    ]


def _slowed(stage: StageSeconds, factor: float) -> StageSeconds:
    return replace(stage, measured_s=stage.measured_s * factor)


def _cooled(stages: Iterable[StageSeconds], hot: float) -> list[StageSeconds]:
    """What the backwards would take if none came right after its forward."""
    return [_slowed(stage, 1 / hot) if stage.hot else stage for stage in stages]


def _hot_share(backwards: Sequence[StageSeconds], profile: Profile) -> Term | None:
    """What a backward takes right after its forward, as a share of what others take; None where one kind is missing."""
    hot = [stage.factor for stage in backwards if stage.hot]
    cold = [stage.factor for stage in backwards if not stage.hot]
    if not hot or not cold:
        return None
    return Term(value=fmean(hot) / fmean(cold), spread=sample(hot).spread / fmean(cold), observations=len(backwards))


def _block_factors(stages: Sequence[StageSeconds], profile: Profile) -> BlockFactors | None:
    if not stages:
        return None
    values = tuple(block_factors(stages, len(profile.blocks)).tolist())
    misses = [1 - stage.with_factors(values) / stage.measured_s for stage in stages]
    return BlockFactors(values=values, spread=fmean(miss**2 for miss in misses) ** 0.5, observations=len(stages))


def _share_of_forward(found: Calibration, stages: Iterable[StageSeconds]) -> Term | None:
    """Of a forward as corrected, what forwards of another kind take."""
    return _term(
        [
            stage.measured_s / (stage.with_factors(found.forward.values) if found.forward else stage.total_s)
            for stage in stages
        ]
    )


def _with_updates(found: Calibration, seen: Sequence[_Observed], profile: Profile) -> Calibration:
    """Adds what updates take by byte of weights, in place and into a copy.

    What they make the next forward slower, for they have been through all weights, gradients and states, is theirs.
    """
    corrected = found.forward.values if found.forward else (1.0,) * len(profile.blocks)
    instruction_s = _overhead_s(found, profile)
    in_place: list[float] = []
    copied: list[float] = []
    for o in seen:
        for stage, seen_update in o.seen("update"):
            weight_bytes = sum(profile.blocks[i].weight_bytes for i in o.blocks_of(stage))
            if weight_bytes == 0:
                continue
            plain_s = instruction_s + sum(o.measured[i].forward_s * corrected[i] for i in o.blocks_of(stage))
            s_per_byte = (seen_update.value + _slowed_s(o.stages, stage, plain_s)) / weight_bytes
            copies = keeps_versions(o.plan.schedule, o.plan.replicas, stage)
            (copied if copies else in_place).append(s_per_byte)
    known = profile.overheads
    if not in_place and copied:
        in_place = [max(s - known.version_s_per_byte, 0.0) for s in copied]
    update = _term(in_place)
    more = _term([s - update.value for s in copied]) if update else None
    return replace(found, update_s_per_byte=update, version_s_per_byte=more)


def _slowed_s(stages: StageSamples, stage: int, plain_s: float) -> float:
    """How much longer a forward takes after an update: than the stage's others, or than it should where all are."""
    after, others = stages.get((stage, "forward-after-update")), stages.get((stage, "forward"))
    if after is None:
        return 0.0
    return after.value - (others.value if others else plain_s)


def _levels(seen: Sequence[_Observed], cluster: Cluster, instruction_s: float) -> tuple[LevelTerms, ...]:
    """Bandwidth and latency of every level that transfers crossed, as the outermost one on their way.

    A receive's own time is not the link's. Where that leaves nothing, a tenth of what is known is left.
    """
    delays: dict[int, list[Delay]] = {}
    for o in seen:
        ranks = ranks_by_stage(o.plan.placement)
        for boundary, delay in o.transfers.delays_s.items():
            members = (*ranks[boundary], *ranks[boundary + 1])
            crossed, known_s = cluster.link(members), o.costs[boundary].activation_transfer_s
            if known_s > 0:
                seen_s = max(delay.value - instruction_s, LEAST_SLOWNESS * (known_s + crossed.latency_s))
                found = Delay(
                    size_bytes=known_s * crossed.bandwidth_bytes_per_s,
                    seconds=seen_s,
                    relative_spread=delay.spread / seen_s,
                )
                delays.setdefault(_level(cluster, members), []).append(found)
    return tuple(_level_terms(level, cluster.levels[level], found) for level, found in sorted(delays.items()))


def _level_terms(level: int, known: Level, delays: Sequence[Delay]) -> LevelTerms:
    bandwidth_bytes_per_s, latency_s = link_terms(delays, known.bandwidth_bytes_per_s, known.latency_s)
    return LevelTerms(
        level=level, bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s, observations=len(delays)
    )


def _level(cluster: Cluster, ranks: Sequence[int]) -> int:
    low, high = min(ranks), max(ranks)
    unit = 1
    for index, level in enumerate(cluster.levels):
        unit *= level.size
        if low // unit == high // unit:
            return index
    return len(cluster.levels) - 1


def _exchange_factor(seen: Sequence[_Observed], profile: Profile, cluster: Cluster) -> Term | None:
    """How many times longer an exchange takes than its bytes over the corrected link.

    What it waits for a port that others use, as the simulated run shows it, is not its own.
    """
    plain = replace(profile, overheads=replace(profile.overheads, exchange_factor=1.0))
    factors = []
    for o in seen:
        if not o.exchanges:
            continue
        costs = costs_of(o.plan, plain, cluster)
        simulated = exchange_samples(_simulated(o.run, costs))
        ranks = ranks_by_stage(o.plan.placement)
        for stage, found in o.exchanges.items():
            latency_s = cluster.link(ranks[stage]).latency_s
            waits_s = max(simulated[stage].value - costs[stage].reduce_s, 0.0)
            moving_s, seen_s = costs[stage].reduce_s - latency_s, found.value - waits_s - latency_s
            if moving_s > 0 and seen_s > 0:
                factors.append(seen_s / moving_s)
    return _term(factors)


def _unseen_exchange(found: Calibration, profile: Profile, cluster: Cluster) -> Term | None:
    """Where no run exchanged gradients: messages that pass faster than known do not make exchanges faster.

    Part of a message's way may lie in what its send costs, and no send hides an exchange. Slower links slow both.
    """
    faster = {terms.level: terms.bandwidth_bytes_per_s for terms in found.levels}
    ratios = [
        faster.get(i, level.bandwidth_bytes_per_s) / level.bandwidth_bytes_per_s
        for i, level in enumerate(cluster.levels)
    ]
    if min(ratios) <= 1:
        return None
    return Term(value=profile.overheads.exchange_factor * min(ratios))


def _simulated(run: MeasuredRun, costs: tuple[StageCosts, ...]) -> MeasuredRun:
    """The run as it would have gone with these costs."""
    return MeasuredRun(plan=run.plan, timeline=_played(run.plan, costs, batches=run.timeline.batches))


def _activation_factor(seen: Sequence[_Observed]) -> Term | None:
    """What a microbatch keeps, measured over profile: from the peaks beyond what is there whatever is in flight."""
    factors = []
    for o in seen:
        predicted = _simulated(o.run, o.costs).timeline
        for ours, theirs in zip(predicted.lanes, o.run.timeline.lanes, strict=True):
            costs = o.costs[ours.stage]
            in_flight = ours.peak_memory_bytes - min(ours.memory_bytes, default=0)
            if costs.activation_bytes > 0 and in_flight > 0 and not o.plan.stages[ours.stage].recompute:
                factors.append(1 + (theirs.peak_memory_bytes - ours.peak_memory_bytes) / in_flight)
    return _term([factor for factor in factors if factor > 0])


def _context_bytes(seen: Sequence[_Observed]) -> Term | None:
    """What a process held at its peak beside the tensors that the runtime counts."""
    return _term(
        [
            float(max(resident_bytes - lane.peak_memory_bytes, 0))
            for o in seen
            for resident_bytes, lane in zip(o.run.peak_resident_bytes, o.run.timeline.lanes, strict=False)
        ]
    )
