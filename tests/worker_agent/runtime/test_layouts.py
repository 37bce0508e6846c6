"""Weights of any layout in memory train as in one process: fused optimizers go through memory, not through indices."""

from pathlib import Path
from typing import Any

import pytest

from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.test_executor import CUTS, distance
from tests.worker_agent.runtime.test_varied import HERE, execute, expected


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "model", "options"),
    [
        ("1f1b", "laid_out", {"replicas": 2}),
        ("1f1b", "laid_out?tied=true", {"optimizer": "momentum"}),
        ("1f1b", "laid_out", {"split_backward": True}),
        ("pipedream-2bw", "laid_out?tied=true", {"replicas": 2, "optimizer": "adam"}),
    ],
)
def test_weights_of_any_layout_train_as_in_one_process(
    schedule: str, model: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """With replicas, transposed weights once took the gradients of others; gaps were written over."""
    plan = make_plan(schedule, CUTS[2], **options)
    found, reference = execute(plan, tmp_path, f"{HERE}:{model}"), expected(plan, f"{HERE}:{model}")
    assert distance({name: found[name] for name in reference}, reference) < 1e-11


def test_the_states_of_weights_of_any_layout_are_resumed(tmp_path: Path) -> None:
    plan = make_plan("1f1b", CUTS[2], optimizer="adam")
    whole = execute(plan, tmp_path, f"{HERE}:laid_out", checkpoint_every=2)
    assert distance(execute(plan, tmp_path, f"{HERE}:laid_out", first_step=2), whole) == 0.0
