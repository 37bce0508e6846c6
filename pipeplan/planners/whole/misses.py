"""Misses: the nearest misses where nothing fits, and the options that leave no configuration."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import combinations, islice
from math import inf
from typing import Any

from pipeplan.documents.plan import Reason
from pipeplan.planners.problem import Options
from pipeplan.planners.whole.degrees import Degrees
from pipeplan.planners.whole.space import WholeSpace

MISSES = 50
"""The number of configurations with the lowest average memory for which stages are made."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """A configuration that does not fit, its fullest rank, and the bytes missing on its device or its host."""

    degrees: Degrees
    rank: int
    missing_bytes: float
    on_host: bool


def nearest_miss(space: WholeSpace) -> Shortfall:
    """The configuration with the smallest excess of a fullest rank, among those with the lowest average memory.

    The stages have equal numbers of blocks. The larger excess counts, over the device or over the host's share.
    """
    blocks, misses = len(space.forms[0].blocks), []
    for degrees in islice(space.holding_least(), MISSES):
        splitter = space.maker(degrees).splitter
        stops = [blocks * (stage + 1) // degrees.depth for stage in range(degrees.depth)]
        device, host = splitter.by_rank(stops), splitter.hosts_by_rank(stops)
        worst = Shortfall(degrees=degrees, rank=0, missing_bytes=-inf, on_host=False)
        for by_rank, room, on_host in ((device, splitter.device_bytes, False), (host, splitter.host_bytes, True)):
            fullest = by_rank.index(max(by_rank))
            missing = by_rank[fullest] - room
            if missing > worst.missing_bytes:
                worst = Shortfall(degrees=degrees, rank=fullest, missing_bytes=missing, on_host=on_host)
        misses.append(worst)
    return min(misses, key=lambda miss: miss.missing_bytes)
