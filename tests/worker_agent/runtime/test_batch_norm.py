"""Batch norm normalises microbatches; its running statistics see every microbatch once, or whole minibatches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan.documents.plan import Plan
from pipeplan.errors import InvalidInputError
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import Weights
from tests.worker_agent.runtime.test_executor import CUTS, DATA, RATE, SEED, STEPS, checkpoint_weights, distance
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.runtime.job import RunJob

MODEL = "tests.worker_agent.runtime.awkward:batch_norms?width=8"


def execute(plan: Plan, out: Path, **options: Any) -> Weights:
    given: dict[str, Any] = {"steps": STEPS, "checkpoint_every": STEPS} | options
    job = RunJob(plan=plan, model=MODEL, data=DATA, seed=SEED, learning_rate=RATE, out=str(out), device="cpu", **given)
    run_ranks(job)
    return checkpoint_weights(out, STEPS)


def trained(plan: Plan, *, minibatch: bool) -> Weights:
    """Plain gradient descent, microbatch by microbatch; what enters a batch norm in a minibatch is put together."""
    root = build_model(MODEL, seed=SEED, dtype=torch.float64).root
    source = open_data(DATA, microbatch_size=plan.microbatch_size, seed=SEED)
    optimizer = torch.optim.SGD(root.parameters(), lr=RATE)
    norms = [m for m in root.modules() if isinstance(m, nn.BatchNorm1d)]
    entered: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms}
    for norm in norms:
        norm.register_forward_hook(lambda module, given, _: entered[module].append(given[0].detach()))
    batch = plan.batch_size // plan.microbatch_size
    for step in range(STEPS):
        before = {norm: [b.clone() for b in norm.buffers()] for norm in norms}
        optimizer.zero_grad()
        for k in range(step * batch, (step + 1) * batch):
            inputs, targets = (t.double() for t in source.microbatch(k))  # type: ignore[union-attr]
            torch.autograd.backward(nn.functional.mse_loss(root(inputs), targets) / batch)
        optimizer.step()
        for norm in norms if minibatch else ():
            for buffer, old in zip(norm.buffers(), before[norm], strict=True):
                buffer.copy_(old)
            norm(torch.cat(entered[norm]))
        for norm in norms:
            entered[norm].clear()
    return dict(root.state_dict())


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("gpipe", 2, {"recompute": True}),
    ("gpipe", 4, {}),
    ("gpipe", 2, {"replicas": 2, "recompute": True}),
    ("1f1b", 4, {"recompute": True}),
    ("1f1b", 2, {"split_backward": True}),
    ("naive", 2, {}),
]


@pytest.mark.each_case
@pytest.mark.parametrize(("schedule", "depth", "options"), CASES)
def test_running_statistics_are_those_of_whole_minibatches(
    schedule: str, depth: int, options: dict[str, Any], tmp_path: Path
) -> None:
    plan = make_plan(schedule, CUTS[depth], microbatch_size=4, **options)
    weights = execute(plan, tmp_path, batch_norm=None if schedule == "gpipe" else "minibatch")
    assert distance(weights, trained(plan, minibatch=True)) < 1e-11
    assert distance(weights, trained(plan, minibatch=False)) > 1e-3


@pytest.mark.each_case
@pytest.mark.parametrize(("schedule", "depth", "options"), [case for case in CASES if "replicas" not in case[2]])
def test_running_statistics_see_every_microbatch_once(
    schedule: str, depth: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Under recomputation they once saw it twice."""
    plan = make_plan(schedule, CUTS[depth], microbatch_size=4, **options)
    weights = execute(plan, tmp_path, batch_norm="microbatch" if schedule == "gpipe" else None)
    assert distance(weights, trained(plan, minibatch=False)) < 1e-11


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_resumed_run_goes_on_with_the_running_statistics(schedule: str, tmp_path: Path) -> None:
    plan = make_plan(schedule, CUTS[2], recompute=True)
    whole = execute(plan, tmp_path, checkpoint_every=2)
    resumed = execute(plan, tmp_path, first_step=2)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_minibatches_that_overlap_have_no_statistics_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="batch_norm: must be microbatch for pipedream-2bw"):
        execute(make_plan("pipedream-2bw", CUTS[2]), tmp_path, batch_norm="minibatch")


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "replicas"),
    [
        ("pipedream-2bw", (1, 1)),
        ("pipedream-2bw", (2, 2)),
        ("pipedream", (2, 1)),
        ("pipedream", (1, 1, 1, 1)),
        ("1f1b", (1, 1)),
    ],
)
@pytest.mark.parametrize("checkpoint_every", [1, 2])
def test_running_statistics_are_those_of_the_checkpoints_batches(
    schedule: str, replicas: tuple[int, ...], checkpoint_every: int, tmp_path: Path
) -> None:
    """Microbatches that were forwarded ahead of a checkpoint were once noted again by the run that went on from it;
    later, with several batches in flight, those ahead of the next checkpoint were still in this one.
    """
    microbatches = 1 if schedule == "pipedream" else 4
    plan = make_plan(schedule, CUTS[len(replicas)], microbatch_size=4, microbatches=microbatches, replicas=replicas)
    whole = execute(plan, tmp_path, checkpoint_every=checkpoint_every)
    job = RunJob(
        plan=plan,
        model=MODEL,
        data=DATA,
        seed=SEED,
        learning_rate=RATE,
        out=str(tmp_path),
        device="cpu",
        steps=STEPS,
        first_step=2,
        checkpoint_every=STEPS,
    )
    run_ranks(job)
    assert distance(checkpoint_weights(tmp_path, STEPS), whole) == 0.0
