"""Replicas, and stages that share a weight, begin with the same weights; a run whose copies differ is refused."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pipeplan.documents.plan import Plan
from tests.worker_agent.commands import finish
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.test_run_command import DATA, command
from worker_agent.models.chain import build_model
from worker_agent.runtime.job import RunJob

HERE = "tests.worker_agent.runtime.test_model_checks:drawn"
SOURCES: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),
    "random": random.random,
    "unseeded": lambda: random.SystemRandom().random(),
}


def drawn(*, source: str, tied: str = "no", frozen: str = "no") -> list[nn.Module]:
    """Blocks with one weight from somewhere else, which may be frozen; tied: the last block has the first one's."""
    blocks: list[nn.Module] = [nn.Linear(8, 8) for _ in range(4)]
    first, last = blocks[0], blocks[-1]
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    with torch.no_grad():
        first.weight[2, 3] = SOURCES[source]()
    first.weight.requires_grad_(frozen == "no")
    if tied == "yes":
        last.weight = first.weight
    return blocks


REPLICAS = make_plan("data-parallel", (0, 4), replicas=2)
STAGES = make_plan("1f1b", (0, 2, 4))


COPIES = pytest.mark.parametrize(
    ("plan", "options"),
    [(REPLICAS, ""), (REPLICAS, "&frozen=yes"), (STAGES, "&tied=yes")],
    ids=["replicas", "frozen", "tied stages"],
)


@COPIES
def test_weights_that_differ_among_processes_are_refused(plan: Plan, options: str, tmp_path: Path) -> None:
    model = f"{HERE}?source=unseeded{options}"
    job = RunJob(plan=plan, model=model, data=DATA, steps=1, out=str(tmp_path), device="cpu")
    rule = r"InvalidInputError: model: must give a weight the same values in every process.*got '0\.weight'"
    with pytest.raises(AssertionError, match=rule):
        run_ranks(job)


@pytest.mark.campaign
@COPIES
def test_the_command_says_in_one_sentence_that_weights_differ_among_processes(
    plan: Plan, options: str, tmp_path: Path
) -> None:
    result = finish(command(plan, tmp_path, model=f"{HERE}?source=unseeded{options}"))
    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: --model: must give a weight the same values in every process")
    assert last.endswith("got '0.weight'")


@pytest.mark.parametrize("source", ["torch", "numpy", "random"])
def test_what_follows_from_the_seed_is_the_same_in_every_process(source: str) -> None:
    of_python, of_torch = random.getstate(), torch.get_rng_state()
    values = [dict(build_model(f"{HERE}?source={source}", seed=seed).root.state_dict()) for seed in (5, 5, 6)]
    name = next(name for name in values[0] if name.endswith("weight"))
    assert torch.equal(values[0][name], values[1][name])
    assert values[0][name][2, 3] != values[2][name][2, 3]
    assert random.getstate() == of_python and torch.equal(torch.get_rng_state(), of_torch)


@pytest.mark.campaign
def test_tied_stages_with_equal_weights_run(tmp_path: Path) -> None:
    result = finish(command(STAGES, tmp_path, model=f"{HERE}?source=numpy&tied=yes"))
    assert result.returncode == 0, result.stderr
