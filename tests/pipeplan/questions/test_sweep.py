"""Sweeps are the planner's answers, one after the other."""

from dataclasses import replace

import pytest

from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.two_bw.planner import two_bw
from pipeplan.questions.smallest import sub_cluster
from pipeplan.questions.sweep import sweep
from tests.pipeplan.builders import Cell, cluster, profile


def problem() -> PlanningProblem:
    blocks = [Cell(weight_bytes=4, output_bytes=2, activation_bytes=2)] * 4
    return PlanningProblem(
        profile=profile(blocks), cluster=cluster((2, 20.0), (2, 5.0), memory_bytes=10**6), batch_size=8
    )


def test_a_row_is_the_planners_answer_to_the_value() -> None:
    asked = problem()
    by_batch = sweep(asked, two_bw, "batch-size", [4.0, 8.0])
    assert [row.plan for row in by_batch] == [two_bw(replace(asked, batch_size=size)) for size in (4, 8)]
    by_devices = sweep(asked, two_bw, "devices", [1.0, 2.0, 4.0])
    assert [row.plan for row in by_devices] == [
        two_bw(replace(asked, cluster=sub_cluster(asked.cluster, devices))) for devices in (1, 2, 4)
    ]
    inside, outside = asked.cluster.levels
    faster = replace(asked.cluster, levels=(inside, replace(outside, bandwidth_bytes_per_s=50.0)))
    assert sweep(asked, two_bw, "bandwidth", [50.0])[0].plan == two_bw(replace(asked, cluster=faster))


def test_a_value_without_a_plan_says_why() -> None:
    rows = sweep(problem(), two_bw, "memory", [5.0, 10.0**6])
    assert rows[0].plan is None
    assert "misses" in (rows[0].reason or "")
    assert rows[1].plan is not None
    devices = sweep(problem(), two_bw, "devices", [2.0, 3.0])
    assert (devices[1].reason or "").startswith("devices: must be whole units")


@pytest.mark.parametrize(
    ("over", "value", "message"),
    [("height", 1.0, "over: must be one of batch-size"), ("devices", 1.5, "devices: must be a whole number")],
)
def test_what_cannot_be_varied_is_refused(over: str, value: float, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        sweep(problem(), two_bw, over, [value])
