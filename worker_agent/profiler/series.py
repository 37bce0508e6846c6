"""Series: measures a chain's rounds in several series, until the time of a round is known well enough.

A series has rounds forward and backward, rounds without a graph, and rounds whose backward is split. A machine may be
slower for seconds at a time, as one that shares its host is. What a plan compares is therefore measured in the same
moments, and the more rounds differ, the more are measured.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import fmean, stdev

from pipeplan.protocol.jobs import ProfileTask
from worker_agent.profiler.times import BlockTimes, SplitTimes

SERIES = 4
"""So many series have rounds forward and backward for the task's seconds, if its least number of rounds is not more."""

PRECISION = 0.01
"""The time of a round is known well enough if its relative standard error is at most this."""

MOST_TIMES, MOST_ROUNDS = 10, 1000
"""Unsure series end after so many times the task's seconds, with all that they do; all end with so many rounds."""

LONGEST_TIMES = 60
"""All series end after so many times the task's seconds: where blocks only wait, or others leave little of a device."""

_GROUPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainTimes:
    """The rounds of a series: those forward and backward, those without a graph (whole chain), and those split."""

    blocks: tuple[BlockTimes, ...]
    bare_s: tuple[float, ...]
    split: tuple[SplitTimes, ...]

    @classmethod
    def of(cls, series: Sequence["ChainTimes"]) -> "ChainTimes":
        """The rounds of all series."""
        return cls(
            blocks=tuple(
                BlockTimes(
                    forward_s=tuple(seconds for each in times for seconds in each.forward_s),
                    backward_s=tuple(seconds for each in times for seconds in each.backward_s),
                )
                for times in zip(*(each.blocks for each in series), strict=True)
            ),
            bare_s=tuple(seconds for each in series for seconds in each.bare_s),
            split=tuple(SplitTimes.of(times) for times in zip(*(each.split for each in series), strict=True)),
        )


def measure_in_series(
    task: ProfileTask,
    round_s: float,
    measure: Callable[[int, Sequence[float]], ChainTimes],
    any_rank: Callable[[bool], bool],
    now_s: Callable[[], float] = time.monotonic,
) -> ChainTimes:
    """The rounds of all series. A round takes about `round_s`.

    `measure` is given a series' number of rounds, and the seconds of all rounds before. `any_rank` says whether any
    rank says so: all measure equally many series.
    """
    timed = min(ceil(task.seconds / SERIES / round_s), MOST_ROUNDS) if task.seconds else 0
    rounds, start_s = max(task.rounds, timed), now_s()
    series: list[ChainTimes] = []
    measured_s: list[float] = []
    wanted = True
    while wanted:
        series.append(measure(rounds, measured_s))
        measured_s += rounds_s(series[-1].blocks)
        error, elapsed_s = standard_error(measured_s), now_s() - start_s
        few = sum(measured_s) < task.seconds and elapsed_s < LONGEST_TIMES * task.seconds
        unsure = (error is None or error > PRECISION) and elapsed_s < MOST_TIMES * task.seconds
        wanted = any_rank((few or unsure) and len(measured_s) < MOST_ROUNDS)
    return ChainTimes.of(series)


def rounds_s(blocks: Sequence[BlockTimes]) -> list[float]:
    """The seconds of each round forward and backward, of all blocks together."""
    every = (seconds for block in blocks for seconds in (block.forward_s, block.backward_s))
    return [sum(one) for one in zip(*every, strict=True)]


def standard_error(values: Sequence[float]) -> float | None:
    """The relative standard error of the mean of values, in the order of their measurement; None for a single one.

    It is that of the means of a few groups of neighbours: these are alike, and say less than as many values far apart.
    """
    groups = min(len(values), _GROUPS)
    if groups < 2:
        return None
    ends = (len(values) * k // groups for k in range(groups + 1))
    means = [fmean(values[start:end]) for start, end in pairwise(ends)]
    return stdev(means) / groups**0.5 / fmean(means) if any(means) else 0.0
