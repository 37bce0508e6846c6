"""Exchanged: what gradient exchanges and transfers add to a batch: lower bounds and estimates.

Bounds over all placements are for engines that exchange after the backward. Levels are those of a cluster whose devices
are a form's groups. The d replicas of a stage are in at least two units of some level. If an outermost unit holds fewer
than d, they are in at least n = ceil(d / held) outermost units. No all-reduce sends less than a ring, in which
2 (n - 1) / n of the bytes pass the port of each of n units (`costs.collectives.LevelRing`).
"""

from math import sqrt

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.costs.groups import grouped
from pipeplan.documents.cluster import Cluster
from pipeplan.planners.whole.degrees import Degrees, Shapes
from pipeplan.planners.whole.placements import hops_on, most_sent, placed_exchange
from pipeplan.planners.whole.terms import ReplicaTerms


def least_exchange_s(at: ReplicaTerms, cluster: Cluster) -> float:
    """The least seconds of a batch's exchanges of all ranks together, on any placement."""
    form, replicas = at.terms.recipe.form, at.data
    exchanged, inside_s = exchanged_bytes(at)
    if replicas == 1:
        return inside_s
    *inner, outermost = grouped(cluster, form.devices).levels
    held, rates = 1, []
    for level in (*inner, outermost):
        beside = min(held, replicas // 2)
        rates.append(min(level.bandwidth_bytes_per_s, beside * level.transfer_bytes_per_s))
        held *= level.size
    units = -(-replicas // (held // outermost.size))
    slowest_s = exchanged / max(rates)
    if units > 1:
        together = min(outermost.bandwidth_bytes_per_s, replicas // units * outermost.transfer_bytes_per_s)
        slowest_s = max(slowest_s, 2 * (units - 1) / units * exchanged / together)
    return inside_s + slowest_s


def mean_rank_s(at: ReplicaTerms, some: Shapes, cluster: Cluster) -> FloatArray:
    """The mean seconds of a batch of the ranks of each of these pipelines: they compute, exchange and update, one after
    the other. No batch is shorter.
    """
    exchange_s = 0.0 if at.terms.engine.overlaps else least_exchange_s(at, cluster)
    batch_s = some.microbatches * float(at.step_s[-1]) + float(at.states.update_s[-1]) + exchange_s
    return np.asarray(batch_s / some.pipeline)


def placed_batch_s(at: ReplicaTerms, degrees: Degrees, cluster: Cluster, *, inside: int) -> tuple[float, float]:
    """The seconds of a batch on the placement with `inside` neighbouring replicas: the least for any stages, and an
    estimate for those as even as blocks allow.

    1. The busiest port between outermost units carries the ranks' transfers, each at least as large as at the narrowest
       cut. This holds only if the outermost level is the slowest: a play counts ports only on the slowest level.
    2. A microbatch makes a round trip through all stages. The first stage has at most one in flight for each rank, or
       two if ranks hold several stages (Little 1961). A rank's v equal stages have (v + 1) p - 1 in flight in total,
       and each microbatch stays in flight on them for (v + 1) / 2 such round trips.
    3. With one stage a rank, the same holds for every rank and those after it, once its first microbatch has passed the
       ranks before it (`planners.bound`, 2 and 3). The slowest link may be anywhere.
    4. Activations and gradients that meet at a port take twice as long. This happens for the share of time in which the
       port is busy (`_crowded_s`).
    5. Exchanges, as in `mean_rank_s`, and updates follow the backward; or exchanges overlap the last
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
        likely_s = max(likely_s, crowded_s(alone_s, met_s, least_s), least_s + fill_s)
        least_s = max(least_s, round_trips_s / min(m, p if v == 1 else 2 * p))
    exchanged = placed_exchange(groups, p, degrees.data, inside=inside)
    size_bytes, inside_s = exchanged_bytes(at)
    if at.terms.engine.overlaps:  # with the last microbatch's backward
        exposed_s = size_bytes * exchanged.even + (inside_s - float(at.backward_s[-1])) / p
        return least_s, likely_s + max(exposed_s, 0.0) + update_s / p
    least_s = max(least_s, (m * step_s + update_s + inside_s + size_bytes * exchanged.least_rank) / p)
    return least_s, likely_s + size_bytes * exchanged.even + (inside_s + update_s) / p


def hops_before_s(at: ReplicaTerms, degrees: Degrees, cluster: Cluster, *, inside: int) -> FloatArray:
    """[rank]: the least time of a microbatch's transfers to a rank of a placement and back to the first."""
    edges, devices = at.terms.edge_bytes[1:-1], degrees.recipe.form.devices
    if degrees.pipeline == 1 or not len(edges):
        return np.zeros(degrees.pipeline)
    hops = hops_on(grouped(cluster, devices), degrees.pipeline, degrees.data, inside=inside)
    after_s = hops.after_s(devices * int(edges.min()))
    return np.asarray(2 * (after_s[0] - after_s))


def placed_beyond_least_s(at: ReplicaTerms, degrees: Degrees, cluster: Cluster, *, inside: int) -> FloatArray:
    """Sums over blocks of an exchange's seconds beyond `least_exchange_s` on a placement, if it ends last."""
    exchanged = np.floor(np.diff(at.states.exchanged_bytes, prepend=0.0))
    if at.terms.engine.overlaps or exchanged.sum() <= 0 or degrees.data == 1:
        return np.zeros_like(exchanged)
    groups, (size_bytes, inside_s) = grouped(cluster, degrees.recipe.form.devices), exchanged_bytes(at)
    alone_s = size_bytes * placed_exchange(groups, degrees.pipeline, degrees.data, inside=inside).least_rank
    more_s = alone_s + inside_s - least_exchange_s(at, cluster)
    return np.asarray(max(more_s, 0.0) * np.cumsum(exchanged) / exchanged.sum())


def _paced_s(rank_s: float, after_s: FloatArray, m: int) -> float:
    """Seconds of a batch limited by its rounds, with equal stages; `after_s` has hops there and back, by rank."""
    later = np.arange(len(after_s), 0, -1)
    rounds_s = m * (rank_s * later + after_s) / np.minimum(later, m)
    return float((rank_s * (len(after_s) - later) + after_s[0] - after_s + rounds_s).max())


def crowded_s(alone_s: float, met_s: float, port_s: float) -> float:
    """Seconds b of a batch in which transfers meet others for the share port_s / b of the time.

    It takes `alone_s` if none meet and `met_s` if all do: b = alone_s + (met_s - alone_s) port_s / b.
    """
    return (alone_s + sqrt(alone_s**2 + 4 * (met_s - alone_s) * port_s)) / 2


def exchanged_bytes(at: ReplicaTerms) -> tuple[float, float]:
    """The bytes that replicas exchange, and the seconds of the prior exchange among devices that share sequences."""
    exchanged = at.states.exchanged_bytes
    own_bytes = max(float(exchanged[-1]) - len(exchanged), 0.0)  # plans have whole bytes a block
    form, profile = at.terms.recipe.form, at.terms.problem.profile
    inside_s = at.terms.links["context"].seconds("all-reduce", own_bytes)
    return form.tensor * own_bytes * profile.overheads.exchange_factor, inside_s
