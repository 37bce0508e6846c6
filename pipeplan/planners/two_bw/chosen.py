"""Chosen: the mode of each stage of a split, all stages at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from pipeplan.planners.two_bw.places import Bands
from pipeplan.planners.two_bw.terms import MemoryCounts, PipelineTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenStage:
    """A stage's mode with its copies held, its time a microbatch, and its bytes."""

    start: int
    stop: int
    recompute: bool
    counts: MemoryCounts
    time_s: float
    held_bytes: int
    fits: bool


def chosen(terms: PipelineTerms, stops: Sequence[int]) -> list[ChosenStage]:
    """The shorter mode of every stage that fits, or (if none does) the smaller.

    Its unit of recomputation is the first that fits, or (if none does) the one that holds least.
    """
    starts = (0, *stops[:-1])
    lows, lengths = np.asarray(starts), np.subtract(stops, starts)
    at = Bands(slice(0, len(stops)), lows, lengths, 1, 1, terms.chain.blocks)
    ways = []
    for mode in terms.shape.modes:
        held = [terms.unit_bytes(counts, at)[:, 0, 0].tolist() for counts in terms.counts[mode]]
        ways.append((mode, terms.mode_s(mode, at)[:, 0, 0].tolist(), held))

    found = []
    for stage, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        modes = []
        for mode, times_s, held in ways:
            own = [each[stage] for each in held]
            unit = next((i for i, size in enumerate(own) if size <= terms.device_bytes), own.index(min(own)))
            fits = own[unit] <= terms.device_bytes
            modes.append((0.0 if fits else own[unit], times_s[stage] if fits else inf, mode, unit, own[unit], times_s))
        _, time_s, mode, unit, held_bytes, times_s = min(modes)
        found.append(
            ChosenStage(
                start=start,
                stop=stop,
                recompute=mode,
                counts=terms.counts[mode][unit],
                time_s=times_s[stage],
                held_bytes=int(held_bytes),
                fits=time_s < inf,
            )
        )
    return found
