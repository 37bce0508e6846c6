"""Misses: by how much nothing fits."""

from dataclasses import dataclass
from itertools import islice
from math import inf

from pipeplan.planners.whole.degrees import Degrees
from pipeplan.planners.whole.space import WholeSpace

MISSES = 50
"""For how many configurations that hold little on average stages are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """A configuration that does not fit, its fullest rank, and the bytes that it misses on its device or its host."""

    degrees: Degrees
    rank: int
    missing_bytes: float
    on_host: bool


def nearest_miss(space: WholeSpace) -> Shortfall:
    """Of the configurations that hold least on average, the one whose fullest rank exceeds its device by least.

    The stages have equal numbers of blocks. If the rank exceeds its part of the host's memory by more, that counts.
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
