"""What a batch takes in the long run, of schedules without a flush."""

from dataclasses import replace
from math import isqrt, lcm

import numpy as np
import pytest

from pipeplan.arrays import FloatArray
from pipeplan.documents.plan import Plan
from pipeplan.planners.batches import Pace, pace, played_batches
from pipeplan.planners.complete import length, play
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from tests.pipeplan.builders import Cell, cluster, profile
from tests.pipeplan.planners.auto.random_problems import mid_size_problem

LONG = 480
"""Batches of a long play: the mean over 360 of them, after 100, knows nothing of its start and its end."""


def two_stages(
    weights: tuple[int, int], *, output_bytes: int, bandwidth: float, microbatches: int, replicas: int
) -> Plan:
    """PipeDream-2BW's plan of two blocks whose exchanges take about as long as a batch."""
    blocks = [
        Cell(forward_s=1.0, backward_s=2.0, weight_bytes=size, output_bytes=output_bytes, activation_bytes=1)
        for size in weights
    ]
    problem = PlanningProblem(
        profile=profile(blocks),
        cluster=cluster((2 * replicas, bandwidth)),
        batch_size=microbatches * replicas,
        options=Options(stages=2, schedule="pipedream-2bw"),
    )
    answer = solve("pipedream-2bw", problem)
    assert isinstance(answer, Plan) and answer.replicas == (replicas, replicas)
    return answer


def price_s(plan: Plan) -> float:
    """The seconds of a batch, by the plan's price."""
    assert plan.simulated is not None
    batch = plan.microbatch_size * plan.microbatches * lcm(*plan.replicas)
    return batch / plan.simulated.throughput_samples_per_s


def long_run_s(plan: Plan) -> float:
    """The mean over a long play."""
    ends_s = played_batches(plan, LONG).batch_ends_s
    return (ends_s[460] - ends_s[100]) / 360


@pytest.mark.parametrize(
    ("weights", "output_bytes", "bandwidth", "microbatches", "replicas"),
    [
        ((60, 200), 20, 20.0, 4, 4),  # was 2.7 % too fast
        ((60, 200), 60, 20.0, 6, 3),  # was 2.8 % too slow
        ((60, 200), 60, 20.0, 4, 3),  # was 2.9 % too slow
        ((60, 200), 20, 40.0, 2, 3),  # was 2.1 % too fast
        ((160, 40), 60, 80.0, 3, 3),  # was 1.2 % too fast
    ],
)
def test_the_price_of_a_plan_without_a_flush_is_that_of_a_long_run(
    weights: tuple[int, int], output_bytes: int, bandwidth: float, microbatches: int, replicas: int
) -> None:
    """An exchange that falls behind holds up a rank only after many batches, and batches repeat in twos, or in more."""
    plan = two_stages(
        weights, output_bytes=output_bytes, bandwidth=bandwidth, microbatches=microbatches, replicas=replicas
    )
    assert price_s(plan) == pytest.approx(long_run_s(plan), rel=1e-6)


@pytest.mark.parametrize("seed", [33, 37])
def test_slow_networks_are_priced_as_in_a_long_run(seed: int) -> None:
    plan = solve("pipedream-2bw", mid_size_problem(seed))
    assert isinstance(plan, Plan)
    assert price_s(plan) == pytest.approx(long_run_s(plan), rel=2e-4)


def test_a_plan_that_is_steady_is_not_played_for_longer() -> None:
    plan = two_stages((60, 60), output_bytes=1, bandwidth=1e6, microbatches=4, replicas=2)
    assert plan.simulated is not None
    assert length(plan, plan.simulated) == length(plan)


def test_a_play_whose_rate_is_not_needed_need_not_be_steady() -> None:
    plan = replace(two_stages((60, 200), output_bytes=60, bandwidth=20.0, microbatches=4, replicas=3), simulated=None)
    whole, brief = play(plan), play(plan, needed=1e9)
    assert whole is not None and brief is not None
    assert whole.batches == 4 * brief.batches
    assert length(plan, whole) == (1 + 2 + 4) * length(plan, brief)
    assert play(plan, needed=whole.throughput_samples_per_s / 2) == whole


def test_batches_that_never_repeat_count_with_their_mean() -> None:
    """They end up to 0.9 s late, by the digits of the square root of 2. An exchange ends 1 s later, or falls behind."""
    plan = two_stages((60, 60), output_bytes=1, bandwidth=1e6, microbatches=4, replicas=2)
    digits = str(isqrt(2 * 10 ** (2 * LONG)))[:LONG]
    ends_s = 10.0 * np.arange(LONG) + np.asarray([int(digit) / 10 for digit in digits])

    def of(exchanged_s: FloatArray, batches: int = LONG) -> Pace:
        both_s = np.stack([ends_s, exchanged_s], axis=1)[:batches]
        return pace(plan, replace(played_batches(plan, batches), batch_ends_s=tuple(both_s[:, 0]), events_s=both_s))

    known = of(ends_s + 1.0)
    assert known.steady
    assert known.batch_s == pytest.approx(10.0, rel=1e-3)
    assert not of(ends_s + 0.02 * np.arange(LONG)).steady
    assert not of(ends_s + 1.0, batches=20).steady
