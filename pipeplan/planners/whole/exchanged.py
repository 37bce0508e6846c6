"""Exchanged: a lower bound on the time that gradient exchanges add to a batch, over all placements.

It is for engines that exchange after the backward. Levels are those of a cluster whose devices are a form's groups. The
d replicas of a stage are in at least two units of some level. If an outermost unit holds fewer than d, they are in at
least n = ceil(d / held) outermost units. No all-reduce sends less than a ring, in which 2 (n - 1) / n of the bytes pass
the port of each of n units (`costs.collectives.LevelRing`).

1. A rank computes, exchanges and updates, one after the other: no batch is shorter than the mean of all ranks.
2. The ports of outermost units carry every stage's exchange n times; the busiest one carries at least their mean. With
   a flush, no exchange begins while the slowest rank has more microbatches left than it can have in flight.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.costs.groups import grouped
from pipeplan.documents.cluster import Cluster
from pipeplan.planners.whole.degrees import Degrees, Shapes
from pipeplan.planners.whole.placements import hops_on, most_sent, placed_exchange
from pipeplan.planners.whole.terms import ReplicaTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastExchange:
    """Seconds of a batch's exchanges: of all ranks together, and of the busiest port between outermost units."""

    ranks_s: float
    port_s: float


def least_exchange(at: ReplicaTerms, cluster: Cluster) -> LeastExchange:
    """The least exchange among a form's replicas on a cluster of devices."""
    form, replicas = at.terms.recipe.form, at.data
    exchanged, inside_s = exchanged_bytes(at)
    if replicas == 1:
        return LeastExchange(ranks_s=inside_s, port_s=0.0)
    *inner, outermost = grouped(cluster, form.devices).levels
    held, rates, inner_s = 1, [], 0.0
    for level in (*inner, outermost):
        beside = min(held, replicas // 2)
        rates.append(min(level.bandwidth_bytes_per_s, beside * level.transfer_bytes_per_s))
        held *= level.size
    for level in inner:  # the longest time of a ring inside an outermost unit
        inner_s = max(inner_s, 2 * (level.size - 1) / level.size * exchanged / level.transfer_bytes_per_s)
    units = -(-replicas // (held // outermost.size))
    slowest_s, port_s = exchanged / max(rates), 0.0
    if units > 1:
        together = min(outermost.bandwidth_bytes_per_s, replicas // units * outermost.transfer_bytes_per_s)
        between_s = 2 * (units - 1) / units * exchanged / together
        slowest_s = max(slowest_s, between_s)
        if between_s >= inner_s:  # a play counts ports only on the slowest level
            port_s = 2 * (units - 1) * exchanged / outermost.bandwidth_bytes_per_s / outermost.size
    return LeastExchange(ranks_s=inside_s + slowest_s, port_s=port_s)


def least_with_exchange_s(at: ReplicaTerms, some: Shapes, cluster: Cluster) -> FloatArray:
    """Lower bounds on the seconds of a batch of each of these pipelines, from their compute and their exchanges."""
    m, p = some.microbatches, some.pipeline
    step_s, update_s = float(at.step_s[-1]), float(at.states.update_s[-1])
    if at.terms.engine.overlaps:
        return np.asarray((m * step_s + update_s) / p)
    exchange = least_exchange(at, cluster)
    left = m - np.minimum(m, _in_flight(p, some.chunks))
    return np.maximum((m * step_s + update_s + exchange.ranks_s) / p, left * step_s / p + exchange.port_s)


def _in_flight(p: IntArray | int, v: IntArray | int) -> IntArray:
    """Upper bound on a rank's microbatches in flight; if it holds several stages, each stage's are counted."""
    return np.asarray(np.where(v > 1, 2 * (p - 1) + (v - 1) * p + 1, p))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedBatch:
    """Seconds of a batch on a placement: the least for any stages, and those for stages as even as blocks allow."""

    least_s: float
    likely_s: float


def placed_batch(at: ReplicaTerms, degrees: Degrees, cluster: Cluster, *, inside: int) -> PlacedBatch:
    """The seconds of a batch on the placement with `inside` neighbouring replicas.

    1. The busiest port between outermost units carries the ranks' transfers, each at least as large as at the narrowest
       cut. This holds only if the outermost level is the slowest: a play counts ports only on the slowest level.
    2. A microbatch makes a round trip through all stages. The first stage has at most one in flight for each rank, or
       two if ranks hold several stages (Little 1961). A rank's v equal stages have (v + 1) p - 1 in flight in total,
       and each microbatch stays in flight on them for (v + 1) / 2 such round trips.
    3. With one stage a rank, the same holds for every rank and those after it, once its first microbatch has passed the
       ranks before it (`planners.bound`, 2 and 3). The slowest link may be anywhere.
    4. Activations and gradients that meet at a port take twice as long. This happens for the share of time in which the
       port is busy (`_crowded_s`).
    5. Exchanges, as in `least_with_exchange_s`, and updates follow the backward; or exchanges overlap the last
       microbatch's backward, and the longer of the two counts.
    """
    groups, edges = grouped(cluster, degrees.recipe.form.devices), at.terms.edge_bytes[1:-1]
    p, v, m = degrees.pipeline, degrees.chunks, degrees.microbatches
    step_s, update_s = float(at.step_s[-1]), float(at.states.update_s[-1])
    rank_s = at.slowest_rank_s(p)
    least_s, likely_s = 0.0, (m + degrees.idle_steps) * rank_s
    if p > 1:
        sent_bytes = degrees.recipe.form.devices * int(edges.min())
        after_s = hops_on(groups, p, degrees.data, inside=inside).after_s(sent_bytes)
        round_trips_s = m * (step_s + 2 * v * float(after_s[0]))
        *inner, outermost = groups.levels
        if all(each.transfer_bytes_per_s >= outermost.transfer_bytes_per_s for each in inner):
            sends = most_sent(groups, p, degrees.data, v, inside=inside)
            least_s = m * sends * sent_bytes / outermost.bandwidth_bytes_per_s
        if v == 1:
            alone_s, met_s = (_paced_s(step_s / p, times * after_s, m) for times in (2, 4))
        else:
            rounds = (v + 1) / 2 / min(m * v, (v + 1) * p - 1)
            alone_s, met_s = round_trips_s * rounds, (2 * round_trips_s - m * step_s) * rounds
        fill_s = degrees.idle_steps * rank_s + 2 * float(after_s[0])
        likely_s = max(likely_s, _crowded_s(alone_s, met_s, least_s), least_s + fill_s)
        least_s = max(least_s, round_trips_s / min(m, p if v == 1 else 2 * p))
    exchanged = placed_exchange(groups, p, degrees.data, inside=inside)
    size_bytes, inside_s = exchanged_bytes(at)
    if at.terms.engine.overlaps:  # with the last microbatch's backward
        exposed_s = size_bytes * exchanged.even + (inside_s - float(at.backward_s[-1])) / p
        return PlacedBatch(least_s=least_s, likely_s=likely_s + max(exposed_s, 0.0) + update_s / p)
    left = m - min(m, int(_in_flight(p, v)))
    return PlacedBatch(
        least_s=max(
            least_s,
            (m * step_s + update_s + inside_s + size_bytes * exchanged.least_rank) / p,
            left * step_s / p + size_bytes * exchanged.least_port,
        ),
        likely_s=likely_s + size_bytes * exchanged.even + (inside_s + update_s) / p,
    )


def hops_before_s(at: ReplicaTerms, degrees: Degrees, cluster: Cluster, *, inside: int) -> FloatArray:
    """[rank]: the least time of a microbatch's transfers to a rank of a placement and back to the first."""
    edges, devices = at.terms.edge_bytes[1:-1], degrees.recipe.form.devices
    if degrees.pipeline == 1 or not len(edges):
        return np.zeros(degrees.pipeline)
    hops = hops_on(grouped(cluster, devices), degrees.pipeline, degrees.data, inside=inside)
    after_s = hops.after_s(devices * int(edges.min()))
    return np.asarray(2 * (after_s[0] - after_s))


def placed_beyond_least_s(at: ReplicaTerms, degrees: Degrees, cluster: Cluster, *, inside: int) -> FloatArray:
    """Sums over blocks of an exchange's seconds beyond `least_exchange` on a placement, if it ends after all others."""
    exchanged = np.floor(np.diff(at.states.exchanged_bytes, prepend=0.0))
    if at.terms.engine.overlaps or exchanged.sum() <= 0 or degrees.data == 1:
        return np.zeros_like(exchanged)
    groups, (size_bytes, inside_s) = grouped(cluster, degrees.recipe.form.devices), exchanged_bytes(at)
    alone_s = size_bytes * placed_exchange(groups, degrees.pipeline, degrees.data, inside=inside).least_rank
    more_s = alone_s + inside_s - least_exchange(at, cluster).ranks_s
    return np.asarray(max(more_s, 0.0) * np.cumsum(exchanged) / exchanged.sum())


def _paced_s(rank_s: float, after_s: FloatArray, m: int) -> float:
    """Seconds of a batch limited by its rounds, with equal stages; `after_s` has hops there and back, by rank."""
    later = np.arange(len(after_s), 0, -1)
    rounds_s = m * (rank_s * later + after_s) / np.minimum(later, m)
    return float((rank_s * (len(after_s) - later) + after_s[0] - after_s + rounds_s).max())


def _crowded_s(alone_s: float, met_s: float, port_s: float) -> float:
    """Seconds b of a batch in which transfers meet others for the share port_s / b of the time.

    It takes `alone_s` if none meet and `met_s` if all do: b = alone_s + (met_s - alone_s) port_s / b.
    """
    return (alone_s + sqrt(alone_s**2 + 4 * (met_s - alone_s) * port_s)) / 2


def sending_s(cluster: Cluster, size_bytes: float, ranks: int, replicas: int, *, in_a_row: bool) -> float:
    """The time for sending a microbatch over the slowest link between two ranks of a pipeline.

    Either pipelines are in a row, or the replicas of a rank: then all replicas that share a port send at once.
    """
    seconds, unit = 0.0, 1
    for level in cluster.levels:
        if ranks > 1 and (ranks if in_a_row else ranks * replicas) > unit:
            senders = 1 if in_a_row else min(replicas, unit)
            own = level.device_bandwidth_bytes_per_s or level.bandwidth_bytes_per_s
            rate = min(own, level.bandwidth_bytes_per_s / senders)
            seconds = max(seconds, size_bytes / rate + level.latency_s)
        unit *= level.size
    return seconds


def exchanged_bytes(at: ReplicaTerms) -> tuple[float, float]:
    """The bytes that replicas exchange, and the seconds of the prior exchange among devices that share sequences."""
    exchanged = at.states.exchanged_bytes
    own_bytes = max(float(exchanged[-1]) - len(exchanged), 0.0)  # plans have whole bytes a block
    form, profile = at.terms.recipe.form, at.terms.problem.profile
    inside_s = at.terms.links["context"].seconds("all-reduce", own_bytes)
    return form.tensor * own_bytes * profile.overheads.exchange_factor, inside_s
