"""Misses: the nearest misses where nothing fits, and the options that leave no configuration."""

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import combinations, islice
from typing import Any

from pipeplan.documents.plan import Reason
from pipeplan.planners.problem import Options
from pipeplan.planners.reasons import memory_reason, readable
from pipeplan.planners.whole.budget import BUDGET
from pipeplan.planners.whole.space import WholeSpace

_ROUNDS = "a rank of several stages needs a block for each, and microbatches in whole rounds of the ranks"

_LAWS = {
    "recompute": "what is recomputed must be what the engine and the profile have",
    "recompute_unit": "what is recomputed must be what the engine and the profile have",
    "sharding": "replicas share states only where there are several, in one stage or several as the engine can",
    "graphs": "graphs must suit the engine, the recomputation and the offloading",
    "a2a_overlap": "all-to-all overlaps in one stage, or with several stages a rank, unless whole blocks run again",
    "offload_share": "some layers' activations alone can be offloaded only where the engine can",
    "replicate": "groups that share states must divide the replicas, and have several each",
    "offload": "what is offloaded must suit the engine, the sharding and the recomputation",
    "schedule": f"data-parallel has one rank, 1f1b several; {_ROUNDS}",
    "chunks": _ROUNDS,
    "stages": "the ranks of all replicas need a device each, every stage a block, and a schedule its microbatches",
    "data": "replicas need devices, and must share the batch in whole microbatches",
    "microbatch_size": "a replica's share of the batch must be whole microbatches",
    "tensor": "devices that share a block must be whole groups of a level of the cluster",
    "context": "devices that share a block must be whole groups of a level of the cluster",
    "sequence_parallel": "devices that share a block must be whole groups of a level of the cluster",
    "expert": "the devices of a stage must be whole groups that share the experts",
    "expert_tensor": "the devices of a stage must be whole groups that share the experts",
}
"""By option, the rule that it must satisfy with the batch, the devices, the model, the engine and other options."""


def left_by_options(options: Options, count: Callable[[Options], int], where: str) -> tuple[Reason, ...]:
    """The options whose removal leaves configurations: single ones, or else the smallest set; none if no set does.
    `count` counts the configurations, `where` names their space.
    """
    usual: dict[str, Any] = {field.name: field.default for field in fields(options)}
    given = [name for name in _LAWS if getattr(options, name) != usual[name]]
    for together in range(1, len(given) + 1):
        reasons = []
        for names in combinations(given, together):
            left = count(replace(options, **{name: usual[name] for name in names}))
            if left:
                asked = " and ".join(f"{name} {getattr(options, name)}" for name in names)
                pronoun = "it" if len(names) == 1 else "them"
                detail = f"{where} has {left:,} configurations without {asked}, and none with {pronoun}"
                reasons.append(Reason(rule="; ".join(dict.fromkeys(_LAWS[name] for name in names)), detail=detail))
        if reasons:
            return tuple(reasons)
    return ()


def nearest_miss(space: WholeSpace) -> Reason:
    """The smallest excess of a fullest rank, over its device or its host's share, among the configurations with the
    lowest average memory. The stages have equal numbers of blocks.
    """
    blocks, misses = len(space.forms[0].blocks), list[tuple[float, int, bool, str]]()
    for degrees in islice(space.holding_least(), BUDGET.misses):
        splitter = space.maker(degrees).splitter
        stops = [blocks * (stage + 1) // degrees.depth for stage in range(degrees.depth)]
        device, host = splitter.by_rank(stops), splitter.hosts_by_rank(stops)
        over = (max(device) - splitter.device_bytes, False), (max(host) - splitter.host_bytes, True)
        missing_bytes, on_host = max(over)
        by_rank = host if on_host else device
        misses.append((missing_bytes, by_rank.index(max(by_rank)), on_host, degrees.named))
    missing_bytes, rank, on_host, named = min(misses, key=lambda miss: miss[0])
    cluster = space.problem.cluster
    reason = memory_reason(
        named,
        stage=rank,
        missing_bytes=int(missing_bytes),
        device_bytes=cluster.device.usable_bytes,
        configurations=space.considered,
    )
    if not on_host or cluster.host is None:
        return reason
    limit = readable(cluster.host.memory_bytes)
    return replace(reason, rule=f"a stage must fit its device's part of the host's memory ({limit})")
