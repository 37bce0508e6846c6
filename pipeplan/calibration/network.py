"""Network: what runs show about the links between stages, and about gradient exchanges."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

from pipeplan.calibration.fit import LEAST_SLOWNESS, Delay, factor_for, link_terms
from pipeplan.calibration.observed import Observed, costs_of, played, receive_s, term
from pipeplan.calibration.samples import MeasuredRun, exchange_samples
from pipeplan.costs.transfer import ranks_of_stages
from pipeplan.documents.calibration import Calibration, LevelTerms, Term
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.profile import Profile
from pipeplan.documents.stage_costs import StageCosts
from pipeplan.schedules.registry import schedule_named

_PLAYED_BATCHES = 6

_SHOWN = 0.05
"""If workers wait for a smaller share of an exchange, other work may hide it, however long it takes."""


def levels(seen: Sequence[Observed], cluster: Cluster, found: Calibration, profile: Profile) -> tuple[LevelTerms, ...]:
    """Bandwidth and latency of every level that was the outermost one crossed by a transfer.

    The time of the receive itself is not the link's. At least a tenth of the known time is left for the link.
    """
    units = list(accumulate((level.size for level in cluster.levels), mul))
    delays: dict[int, list[Delay]] = defaultdict(list)
    for o in seen:
        ranks = ranks_of_stages(o.plan.placement, o.plan.depth, in_v=schedule_named(o.plan.schedule).v_shaped)
        for boundary, delay in o.transfers.delays_s.items():
            members = (*ranks[boundary], *ranks[boundary + 1])
            crossed, known_s = cluster.link(members), o.costs[boundary].activation_transfer_s
            if known_s > 0:
                own_s = receive_s(found, profile, o.costs[boundary])
                seen_s = max(delay.value - own_s, LEAST_SLOWNESS * (known_s + crossed.latency_s))
                in_transit = Delay(
                    size_bytes=known_s * crossed.bandwidth_bytes_per_s,
                    seconds=seen_s,
                    relative_spread=delay.spread / seen_s,
                )
                low, high = min(members), max(members)
                inside = (level for level, unit in enumerate(units) if low // unit == high // unit)
                delays[next(inside, len(units) - 1)].append(in_transit)
    terms = []
    for level, of_level in sorted(delays.items()):
        known = cluster.levels[level]
        bandwidth_bytes_per_s, latency_s = link_terms(of_level, known.transfer_bytes_per_s, known.latency_s)
        terms.append(
            LevelTerms(
                level=level,
                bandwidth_bytes_per_s=bandwidth_bytes_per_s,
                latency_s=latency_s,
                observations=len(of_level),
            )
        )
    return tuple(terms)


def exchange_factor(seen: Sequence[Observed], profile: Profile, cluster: Cluster) -> Term | None:
    """The ratio of an exchange's time to that of its bytes over the corrected link.

    A run shows only the part of an exchange for which its workers wait. The factor is the one with which they wait as
    long in the simulated run. It is unknown if they hardly wait, because a shorter exchange would look the same.
    """
    found = (
        _exchange_factor(o, stage, sample.value, profile, cluster)
        for o in seen
        for stage, sample in o.exchanges.items()
    )
    return term([factor for factor in found if factor is not None])


def _exchange_factor(o: Observed, stage: int, seen_s: float, profile: Profile, cluster: Cluster) -> float | None:
    """The factor with which the stage waits for `seen_s` in the simulated run; None if it cannot be determined."""
    batches = min(o.run.timeline.batches, _PLAYED_BATCHES)

    def costs(factor: float) -> tuple[StageCosts, ...]:
        slow = replace(profile, overheads=replace(profile.overheads, exchange_factor=factor))
        return costs_of(o.plan, slow, cluster)

    def waits_s(factor: float) -> float:
        timeline = played(o.plan, costs(factor), batches=batches)
        return exchange_samples(MeasuredRun(plan=o.plan, timeline=timeline))[stage].value

    factor = factor_for(waits_s, seen_s)
    if factor is None:
        return None
    shown = seen_s > _SHOWN * costs(factor)[stage].reduce_s or waits_s(factor / 2) > seen_s / 4
    return factor if shown else None


def unseen_exchange(found: Calibration, profile: Profile, cluster: Cluster) -> Term | None:
    """The factor if no run exchanged gradients: links that messages show to be faster do not make exchanges faster.

    A part of a message's time may be in the cost of its send, but an exchange has no send. Slower links slow both.
    """
    faster = {terms.level: terms.bandwidth_bytes_per_s for terms in found.levels}
    ratios = [
        faster.get(i, level.transfer_bytes_per_s) / level.transfer_bytes_per_s for i, level in enumerate(cluster.levels)
    ]
    if min(ratios) <= 1:
        return None
    return Term(value=profile.overheads.exchange_factor * min(ratios))
