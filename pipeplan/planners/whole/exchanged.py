"""Exchanged: what an exchange of gradients adds to a batch at least, wherever the replicas of a stage stand.

For engines that exchange after the backward. `levels` are those of the cluster whose devices are a form's groups. The d
replicas of a stage are in at least two units of some level; where d is more than an outermost unit holds, in at least
n = ceil(d / held) outermost units. A ring is the least of what an all-reduce sends: 2 (n - 1) / n of the bytes pass the
port of each of n units (`costs.collectives.LevelRing`).

1. A rank computes, exchanges and updates, one after the other: no batch is shorter than the mean of all ranks.
2. The ports of outermost units carry every stage's exchange n times: the busiest as much as all do on average. With a
   flush, no exchange begins before the slowest rank has at most as many microbatches left as it has in flight.
"""

from dataclasses import dataclass

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.costs.groups import grouped
from pipeplan.documents.cluster import Cluster
from pipeplan.planners.whole.degrees import Degrees, Shapes
from pipeplan.planners.whole.placements import most_sent
from pipeplan.planners.whole.terms import ReplicaTerms, axis_links


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastExchange:
    """Seconds of a batch's exchanges: of all ranks together, and of the busiest port between outermost units."""

    ranks_s: float
    port_s: float


def least_exchange(at: ReplicaTerms, cluster: Cluster) -> LeastExchange:
    """Of replicas of a form on a cluster of devices."""
    form, replicas, profile = at.terms.recipe.form, at.data, at.terms.problem.profile
    own_bytes = max(float(at.exchanged_bytes[-1]) - len(at.exchanged_bytes), 0.0)  # plans have whole bytes a block
    inside_s = axis_links(cluster, form)["context"].seconds("all-reduce", own_bytes)
    if replicas == 1:
        return LeastExchange(ranks_s=inside_s, port_s=0.0)
    exchanged = form.tensor * own_bytes * profile.overheads.exchange_factor
    *inner, outermost = grouped(cluster, form.devices).levels
    held, rates, inner_s = 1, [], 0.0
    for level in (*inner, outermost):
        beside = min(held, replicas // 2)
        rates.append(min(level.bandwidth_bytes_per_s, beside * level.transfer_bytes_per_s))
        held *= level.size
    for level in inner:  # the longest that a ring inside an outermost unit takes
        inner_s = max(inner_s, 2 * (level.size - 1) / level.size * exchanged / level.transfer_bytes_per_s)
    units = -(-replicas // (held // outermost.size))
    slowest_s, port_s = exchanged / max(rates), 0.0
    if units > 1:
        together = min(outermost.bandwidth_bytes_per_s, replicas // units * outermost.transfer_bytes_per_s)
        between_s = 2 * (units - 1) / units * exchanged / together
        slowest_s = max(slowest_s, between_s)
        if between_s >= inner_s:  # a play has ports on the slowest level alone
            port_s = 2 * (units - 1) * exchanged / outermost.bandwidth_bytes_per_s / outermost.size
    return LeastExchange(ranks_s=inside_s + slowest_s, port_s=port_s)


def least_with_exchange_s(at: ReplicaTerms, some: Shapes, cluster: Cluster) -> FloatArray:
    """Seconds of a batch that none of these pipelines goes below, for their compute and their exchanges."""
    m, p = some.microbatches, some.pipeline
    step_s, update_s = float(at.step_s[-1]), float(at.update_s[-1])
    if at.terms.engine.overlaps:
        return np.asarray((m * step_s + update_s) / p)
    exchange = least_exchange(at, cluster)
    left = m - np.minimum(m, _in_flight(some))
    return np.maximum((m * step_s + update_s + exchange.ranks_s) / p, left * step_s / p + exchange.port_s)


def _in_flight(some: Shapes) -> IntArray:
    """Microbatches that a rank has in flight at most; of several stages, at most so many of each."""
    p, v = some.pipeline, some.chunks
    return np.asarray(np.where(v > 1, 2 * (p - 1) + (v - 1) * p + 1, p))


def least_sending_s(at: ReplicaTerms, degrees: Degrees, cluster: Cluster, *, inside: int) -> float:
    """Seconds of a batch in which the busiest port between outermost units carries what ranks send each other.

    Every stage sends at least what passes the narrowest cut. 0 where the outermost level is not the slowest: a play
    has ports there alone.
    """
    groups, edges = grouped(cluster, degrees.recipe.form.devices), at.terms.edge_bytes[1:-1]
    *inner, outermost = groups.levels
    if degrees.pipeline == 1 or any(each.transfer_bytes_per_s < outermost.transfer_bytes_per_s for each in inner):
        return 0.0
    sent_bytes = degrees.recipe.form.devices * int(edges.min())
    sends = most_sent(groups, degrees.pipeline, degrees.data, degrees.chunks, inside=inside)
    return degrees.microbatches * sends * sent_bytes / outermost.bandwidth_bytes_per_s
