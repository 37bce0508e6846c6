"""Planners and autocast: they leave room for the copies of weights that the streams' peaks count."""

from dataclasses import replace

import pytest

from pipeplan.documents.plan import Plan
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.simulation.predict import predict
from tests.pipeplan.builders import Cell, cluster, profile

CELLS = [Cell(weight_bytes=400, activation_bytes=50, output_bytes=10, shared_bytes=0)] * 4
PLAIN = profile(CELLS)
PROFILE = replace(PLAIN, autocast="bfloat16", blocks=tuple(replace(block, cast_bytes=200) for block in PLAIN.blocks))


@pytest.mark.parametrize("planner", ["pipedream", "pipedream-2bw", "gpipe", "auto"])
def test_no_rank_is_predicted_to_hold_more_than_its_stage_was_planned_with(planner: str) -> None:
    plan, plain = (
        solve(planner, PlanningProblem(profile=each, cluster=cluster((2, 1e9)), batch_size=4, options=Options()))
        for each in (PROFILE, PLAIN)
    )
    assert isinstance(plan, Plan) and isinstance(plain, Plan)
    assert (plan.autocast, plain.autocast) == ("bfloat16", None)
    assert plan.stages[0].memory is not None and plain.stages[0].memory is not None
    assert plan.stages[0].memory.weights == 1.5 * plain.stages[0].memory.weights
    for lane in predict(plan, batches=4).lanes:
        assert lane.peak_memory_bytes <= plan.stages[lane.stage].memory_bytes
    costs, without = plan.costs[0], plain.costs[0]
    assert costs.fixed_bytes == without.fixed_bytes + sum(b.cast_bytes for b in PROFILE.blocks[: plan.stages[0].stop])


def test_copies_are_of_profiles_under_autocast_and_half_as_large_as_weights() -> None:
    with pytest.raises(InvalidInputError, match="must be at most half of weight_bytes"):
        replace(PROFILE.blocks[0], cast_bytes=201)
    with pytest.raises(InvalidInputError, match=r"blocks.0.cast_bytes: must be 0 in a profile without autocast"):
        replace(PROFILE, autocast=None)
    with pytest.raises(InvalidInputError, match="autocast: must be left out for weights in float64"):
        replace(PROFILE, dtype="float64")
