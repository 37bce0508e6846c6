"""Network: what runs show of the links between stages, and of gradient exchanges."""

from collections.abc import Sequence
from dataclasses import replace

from planner_service.core.calibrate.fit import LEAST_SLOWNESS, Delay, link_terms
from planner_service.core.calibrate.observed import Observed, costs_of, simulated, term
from planner_service.core.calibrate.samples import exchange_samples
from planner_service.core.cluster import Cluster, Level
from planner_service.core.cost.calibration import Calibration, LevelTerms, Term
from planner_service.core.cost.transfer import ranks_by_stage
from planner_service.core.profile import Profile


def levels(seen: Sequence[Observed], cluster: Cluster, instruction_s: float) -> tuple[LevelTerms, ...]:
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


def exchange_factor(seen: Sequence[Observed], profile: Profile, cluster: Cluster) -> Term | None:
    """How many times longer an exchange takes than its bytes over the corrected link.

    What it waits for a port that others use, as the simulated run shows it, is not its own.
    """
    plain = replace(profile, overheads=replace(profile.overheads, exchange_factor=1.0))
    factors = []
    for o in seen:
        if not o.exchanges:
            continue
        costs = costs_of(o.plan, plain, cluster)
        played = exchange_samples(simulated(o.run, costs))
        ranks = ranks_by_stage(o.plan.placement)
        for stage, found in o.exchanges.items():
            latency_s = cluster.link(ranks[stage]).latency_s
            waits_s = max(played[stage].value - costs[stage].reduce_s, 0.0)
            moving_s, seen_s = costs[stage].reduce_s - latency_s, found.value - waits_s - latency_s
            if moving_s > 0 and seen_s > 0:
                factors.append(seen_s / moving_s)
    return term(factors)


def unseen_exchange(found: Calibration, profile: Profile, cluster: Cluster) -> Term | None:
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
