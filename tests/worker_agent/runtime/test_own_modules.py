"""Modules of one's own, run as pipelines of real processes: as training the module in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from pipeplan.documents.plan import Plan
from tests.worker_agent.models.keyword_modules import mappings
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import Weights
from tests.worker_agent.runtime.test_executor import checkpoint_weights, distance
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.losses import build_loss
from worker_agent.runtime.job import RunJob

PLACE = "tests.worker_agent.models.own_modules"
FEATURES = "preset:regression?width=8"
TOKENS = f"{PLACE}:tokens"
STEPS, MICROBATCHES, SEED, RATE = 3, 4, 5, 0.1


def trained(model: str, data: str) -> Weights:
    """The module's weights and buffers after the same steps in one process, by plain torch."""
    module = build_model(model, seed=SEED, dtype=torch.float64).root
    source, loss = open_data(data, microbatch_size=2, seed=SEED), build_loss(None)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for microbatch in range(step * MICROBATCHES, (step + 1) * MICROBATCHES):
            inputs, targets = (
                t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
                for t in source.microbatch(microbatch)
            )
            torch.autograd.backward(loss(module(inputs), targets) / MICROBATCHES)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


def piped(plan: Plan, model: str, data: str, out: Path) -> Weights:
    """The weights after the run of a plan."""
    run_ranks(
        RunJob(
            plan=plan,
            model=model,
            data=data,
            steps=STEPS,
            checkpoint_every=STEPS,
            seed=SEED,
            learning_rate=RATE,
            out=str(out),
            device="cpu",
        )
    )
    return checkpoint_weights(out, STEPS)


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("kind", "data", "cuts", "options"),
    [
        ("Masked", TOKENS, (0, 1, 3, 4), {}),
        ("Tied", FEATURES, (0, 1, 2, 4), {}),
        ("Twice", FEATURES, (0, 1, 2, 3, 4), {}),
        ("Plain", FEATURES, (0, 2, 4), {"recompute": True}),
        ("TorchsEncoder", TOKENS, (0, 2, 5), {"split_backward": True}),
        ("Experts", TOKENS, (0, 2, 4), {"replicas": 2}),
    ],
)
def test_a_pipeline_of_an_own_modules_blocks_trains_the_module(
    kind: str, data: str, cuts: tuple[int, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    model = f"{PLACE}:{kind}"
    plan = make_plan("1f1b", cuts, microbatches=MICROBATCHES // options.get("replicas", 1), **options)
    found = piped(plan, model, data, tmp_path)
    expected = trained(model, data)
    assert distance(found, {name: expected[name] for name in found}) < 1e-15
    parameters = {name for name, _ in build_model(model, seed=0).root.named_parameters()}
    assert parameters <= found.keys()


def by_name(model: str) -> Weights:
    """As `trained`, by mappings: labels of the next token, and a mean over all labels of a batch."""
    module = build_model(model, seed=SEED, dtype=torch.float64).root
    batches = mappings(microbatch_size=2, seed=SEED)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses, labels = [], 0
        for _ in range(MICROBATCHES):
            batch = next(batches)
            targets = batch.pop("labels")[:, 1:]
            logits = module(**batch)[:, :-1]
            losses.append(functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
            labels += int((targets != -100).sum())
        torch.autograd.backward(sum(losses[1:], losses[0]) / labels)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


@pytest.mark.each_case
@pytest.mark.parametrize("kind", ["Predictor", "PredictorByStage"])
def test_a_pipeline_trains_a_module_that_takes_its_inputs_by_name(kind: str, tmp_path: Path) -> None:
    place = "tests.worker_agent.models.keyword_modules"
    model, data = f"{place}:{kind}", f"{place}:mappings"
    plan = make_plan("1f1b", (0, 1, 3, 5), microbatches=MICROBATCHES)
    found = piped(plan, model, data, tmp_path)
    assert distance(found, by_name(model)) < 1e-12
