"""How long rounds are measured: for the task's seconds, and longer while they differ."""

from collections.abc import Callable, Sequence
from itertools import cycle
from statistics import fmean, stdev

import pytest

from pipeplan.protocol.jobs import ProfileTask
from worker_agent.profiler.series import (
    LONGEST_TIMES,
    MOST_ROUNDS,
    MOST_TIMES,
    SERIES,
    ChainTimes,
    measure_in_series,
    rounds_s,
    standard_error,
)
from worker_agent.profiler.times import BlockTimes, SplitTimes


class UnsteadyDevice:
    """A device whose rounds take the given seconds, one after the other, and the clock beside it."""

    def __init__(self, *rounds_s: float) -> None:
        self.now_s = 0.0
        self.waits = 1
        self.series: list[int] = []
        self.known: list[int] = []
        self._rounds_s = cycle(rounds_s)

    def measure(self, rounds: int, measured_s: Sequence[float]) -> ChainTimes:
        self.series.append(rounds)
        self.known.append(len(measured_s))
        times_s = [next(self._rounds_s) for _ in range(rounds)]
        self.now_s += self.waits * 2 * sum(times_s)  # there are other kinds of rounds, too
        halves = tuple(seconds / 2 for seconds in times_s)
        split = SplitTimes(
            split_forward_s=halves,
            backward_input_s=halves,
            backward_weight_s=halves,
            defers=len(self.series) == 1,
            weight_gradient_bytes=len(self.series),
        )
        return ChainTimes(blocks=(BlockTimes(forward_s=halves, backward_s=halves),), bare_s=halves, split=(split,))

    def through(
        self, task: ProfileTask, round_s: float, any_rank: Callable[[bool], bool] = lambda says_so: says_so
    ) -> ChainTimes:
        """Measures the task with it."""
        return measure_in_series(task, round_s, self.measure, any_rank, lambda: self.now_s)


def task(*, seconds: float, rounds: int = 5) -> ProfileTask:
    return ProfileTask(model="package:model", microbatch_sizes=(1,), rounds=rounds, seconds=seconds)


def test_rounds_that_are_alike_are_measured_for_the_tasks_seconds() -> None:
    device = UnsteadyDevice(0.0100, 0.0101)
    found = device.through(task(seconds=1.0), 0.01)
    assert device.series == [25] * SERIES
    assert device.known == [0, 25, 50, 75]
    assert len(found.bare_s) == len(found.blocks[0].forward_s) == len(found.split[0].backward_weight_s) == 100
    assert found.split[0].defers and found.split[0].weight_gradient_bytes == SERIES


def test_rounds_that_differ_are_measured_longer() -> None:
    device = UnsteadyDevice(*[0.005] * 100, *[0.015] * 100)  # a slow moment after every fast one
    found = device.through(task(seconds=1.0), 0.01)
    assert len(device.series) > 2 * SERIES
    assert fmean(rounds_s(found.blocks)) == pytest.approx(0.01, rel=0.1)
    assert MOST_TIMES <= device.now_s <= MOST_TIMES + 2 * 25 * 0.015  # the last series is measured whole


def test_a_busy_machine_does_not_shorten_a_measurement() -> None:
    device = UnsteadyDevice(0.005, 0.015)
    device.waits = 20  # others take the core, which the rounds' clock does not see
    device.through(task(seconds=1.0), 0.2)
    assert sum(device.series) == 100


def test_blocks_that_only_wait_end() -> None:
    device = UnsteadyDevice(1e-6, 1e-6)  # of the processor's time
    device.waits = 100_000
    device.through(task(seconds=1.0), 0.2)
    assert LONGEST_TIMES <= device.now_s <= LONGEST_TIMES + 2
    assert sum(device.series) < MOST_ROUNDS


def test_a_task_without_seconds_is_measured_for_its_rounds_alone() -> None:
    device = UnsteadyDevice(0.1, 0.5)
    device.through(task(seconds=0, rounds=3), 0.0)
    assert device.series == [3]


def test_slow_rounds_are_as_many_as_the_task_asks_for() -> None:
    device = UnsteadyDevice(3.0, 3.01)
    device.through(task(seconds=1.0, rounds=4), 3.0)
    assert device.series == [4]


def test_rounds_of_no_time_end() -> None:
    device = UnsteadyDevice(0.0)
    device.through(task(seconds=1.0), 1e-6)
    assert device.series == [MOST_ROUNDS]


def test_all_ranks_measure_as_long_as_the_one_that_needs_the_most() -> None:
    answers: Callable[[], bool] = iter([True] * 6 + [False]).__next__
    device = UnsteadyDevice(0.01)
    device.through(task(seconds=1.0), 0.01, lambda _: answers())
    assert len(device.series) == 7


def test_a_standard_error_is_of_groups_of_neighbours() -> None:
    assert standard_error([1.0]) is None
    assert standard_error([2.0, 2.0, 2.0]) == 0.0
    assert standard_error([0.0, 0.0]) == 0.0
    values = [4.0, 6.0]
    assert standard_error(values) == pytest.approx(stdev(values) / 2**0.5 / 5)
    alternating, in_halves = [1.0, 2.0] * 40, [1.0] * 40 + [2.0] * 40
    assert standard_error(alternating) == 0.0
    assert standard_error(in_halves) == pytest.approx(stdev([1.0] * 4 + [2.0] * 4) / 8**0.5 / 1.5)
