"""Series: measures a chain's rounds in several series, until the time of a round is known well enough.

A series has rounds forward and backward, rounds without a graph, and rounds whose backward is split. A machine
that shares its host may be slower for seconds at a time. All times that a plan compares are therefore measured in the
same period, and rounds that vary more are repeated more often.
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
"""The number of series in the task's seconds, unless the task's minimum of rounds takes longer."""

PRECISION = 0.01
"""The relative standard error of a round's time at which measuring ends."""

MOST_TIMES, MOST_ROUNDS = 10, 1000
"""Upper bounds on the elapsed time of imprecise series, in multiples of the task's seconds, and on all rounds."""

LONGEST_TIMES = 60
"""The upper bound on elapsed time in multiples of the task's seconds, for blocks that wait and for busy devices."""

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

    `measure` takes a series' number of rounds, and the seconds of all earlier rounds. `any_rank` is a logical or over
    ranks: all measure equally many series.
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

    It is computed from the means of a few groups of successive values, because successive values are correlated.
    """
    groups = min(len(values), _GROUPS)
    if groups < 2:
        return None
    ends = (len(values) * k // groups for k in range(groups + 1))
    means = [fmean(values[start:end]) for start, end in pairwise(ends)]
    return stdev(means) / groups**0.5 / fmean(means) if any(means) else 0.0
