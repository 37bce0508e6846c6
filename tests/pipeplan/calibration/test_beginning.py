"""A run's first second: which batches it has, and what is predicted from them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pipeplan.calibration.beginning import LEAST_BATCHES, beginning
from pipeplan.calibration.missed import costs_as_measured
from pipeplan.calibration.observed import costs_of
from pipeplan.documents.plan import Plan
from pipeplan.programs.instructions import Update
from pipeplan.programs.timeline import Timeline, throughput_samples_per_s
from pipeplan.simulation.predict import predict
from tests.pipeplan.calibration.measured import CLUSTER, PROFILE, plan_for, scaled

BATCHES = 12
PLANS = [
    plan_for("1f1b", (2, 4, 6), 1),
    plan_for("gpipe", (3, 6), 1, recompute=True),
    plan_for("pipedream-2bw", (3, 6), 2),
    plan_for("pipedream", (2, 4, 6), 1),
    plan_for("1f1b-interleaved", (1, 2, 4, 6), 2, chunks=2),
    plan_for("zb-v", (2, 3, 4, 6), 1, chunks=2),
]


def slower(plan: Plan, factor: float) -> Timeline:
    """A run whose compute takes so many times what the plan's profile says."""
    factors = (factor,) * len(PROFILE.blocks)
    costs = costs_of(plan, scaled(factors, factors), CLUSTER)
    return predict(replace(plan, costs=costs), batches=BATCHES)


def again(plan: Plan, run: Timeline, seconds: float, off: Sequence[float | None] = ()) -> float:
    """Samples a second as they are predicted from a run's beginning."""
    first = beginning(run, seconds=seconds)
    assert first is not None
    costs = costs_as_measured(plan, predict(plan, batches=first.batches), first, off)
    return throughput_samples_per_s(predict(replace(plan, costs=costs), batches=BATCHES))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.schedule)
def test_the_beginning_is_the_fewest_whole_batches_that_take_so_long(plan: Plan) -> None:
    run = predict(plan, batches=BATCHES)
    for seconds in (0.0, run.makespan_s / 2, 2 * run.makespan_s):
        first = beginning(run, seconds=seconds)
        assert first is not None
        assert first.makespan_s >= min(seconds, run.makespan_s)
        for lane, whole in zip(first.lanes, run.lanes, strict=True):
            assert lane.instructions == whole.instructions[: len(lane.instructions)]
            assert sum(isinstance(one, Update) for one in lane.instructions) % first.batches == 0
            assert isinstance(lane.instructions[-1], Update)
    every = beginning(run, seconds=2 * run.makespan_s)
    assert every is not None and every.batches == BATCHES
    least = beginning(run, seconds=0.0)
    assert least is not None and least.batches == LEAST_BATCHES


def test_a_run_of_fewer_batches_has_none() -> None:
    assert beginning(predict(PLANS[0], batches=LEAST_BATCHES - 1)) is None


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.schedule)
@pytest.mark.parametrize("factor", [1.5, 0.7])
def test_a_few_batches_of_a_slower_run_predict_all_of_it(plan: Plan, factor: float) -> None:
    run = slower(plan, factor)
    measured = throughput_samples_per_s(run)
    assert abs(throughput_samples_per_s(predict(plan, batches=BATCHES)) / measured - 1) > 0.1
    assert again(plan, run, run.makespan_s / 3) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.schedule)
def test_what_other_programs_take_in_it_is_no_prediction(plan: Plan) -> None:
    """Everything takes twice as long, and half of the time the processes were not running."""
    run = slower(plan, 2.0)
    first = throughput_samples_per_s(predict(plan, batches=BATCHES))
    assert again(plan, run, run.makespan_s / 3, [0.5] * plan.workers) == pytest.approx(first, rel=0.05)
