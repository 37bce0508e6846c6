"""What blocks hand on: several tensors, token numbers, masks; drop-out stays what it was when it is recomputed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeplan.documents.plan import Plan
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from tests.pipeplan.builders import Cell, cluster
from tests.pipeplan.graphs import DIAMOND, graph
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import Weights, train
from tests.worker_agent.runtime.test_executor import CUTS, DATA, RATE, SEED, STEPS, checkpoint_weights, distance
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.losses import build_loss
from worker_agent.models.randomness import random_seed
from worker_agent.runtime.job import RunJob

READER = "tests.worker_agent.runtime.awkward:reader?width=8"
SENTENCES = "tests.worker_agent.runtime.awkward:sentences"
BRANCHING = "tests.worker_agent.runtime.awkward:branching?width=8"
IN_PLACE = "tests.worker_agent.runtime.awkward:in_place?width=8"


def execute(plan: Plan, out: Path) -> Weights:
    given: dict[str, Any] = {"steps": STEPS, "checkpoint_every": STEPS, "seed": SEED, "learning_rate": RATE}
    run_ranks(RunJob(plan=plan, model=READER, data=SENTENCES, out=str(out), device="cpu", **given))
    return checkpoint_weights(out, STEPS)


def reference(plan: Plan, *, masks_of: int = 0) -> Weights:
    """Plain training, block by block; the masks of drop-out may be those of a later microbatch."""
    chain = build_model(READER, seed=SEED, dtype=torch.float64)
    source = open_data(SENTENCES, microbatch_size=plan.microbatch_size, seed=SEED)
    optimizer = torch.optim.SGD(chain.root.parameters(), lr=RATE)
    batch = plan.batch_size // plan.microbatch_size
    for step in range(STEPS):
        optimizer.zero_grad()
        for k in range(step * batch, (step + 1) * batch):
            values, targets = source.microbatch(k)
            for index, block in enumerate(chain.blocks):
                torch.manual_seed(random_seed(SEED, k + 1 + masks_of, index))
                values = block(*values)
            torch.autograd.backward(build_loss(None)(values, targets) / batch)
        optimizer.step()
    return {name: p.detach() for name, p in chain.root.named_parameters()}


@pytest.mark.each_case
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("schedule", "depth", "options"),
    [
        ("naive", 2, {}),
        ("gpipe", 4, {}),
        ("1f1b", 4, {}),
        ("1f1b", 4, {"split_backward": True}),
        ("1f1b", 2, {"replicas": 2}),
    ],
)
def test_whole_numbers_and_masks_pass_the_stages(
    schedule: str, depth: int, options: dict[str, Any], recompute: bool, tmp_path: Path
) -> None:
    plan = make_plan(schedule, CUTS[depth], recompute=recompute, **options)
    assert distance(execute(plan, tmp_path), reference(plan)) < 1e-12


def test_2bw_on_four_stages_equals_2bw_on_one(tmp_path: Path) -> None:
    one = execute(make_plan("pipedream-2bw", CUTS[1]), tmp_path / "one")
    four = execute(make_plan("pipedream-2bw", CUTS[4], recompute=True), tmp_path / "four")
    assert distance(one, four) < 1e-12


def test_other_masks_would_train_to_something_else() -> None:
    plan = make_plan("1f1b", CUTS[2])
    assert distance(reference(plan), reference(plan, masks_of=1)) > 1e-3


@pytest.mark.each_case
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream-2bw"])
def test_a_plan_that_cuts_a_graph_between_its_branches_trains_as_one_process_does(
    schedule: str, recompute: bool, tmp_path: Path
) -> None:
    """
    0 (1 s) -+- 1 (4 s) -+- 3 (1 s)     {0, 1} and {2, 3} take 5 s each. The outputs of 0 and 1 cross, 128 bytes each
             +- 2 (4 s) -+              for microbatches of 2, 8 numbers and 8 bytes a number.
    """
    cells = [Cell(forward_s=s, backward_s=0.0, weight_bytes=576, output_bytes=64) for s in (1, 4, 4, 1)]
    model = replace(graph(cells, DIAMOND, sizes=(2,)), dtype="float64")
    options = Options(schedule=schedule, stages=2, recompute=recompute)
    problem = PlanningProblem(profile=model, cluster=cluster((2, 1e9)), batch_size=8, options=options)
    plan = solve("gpipe" if schedule == "gpipe" else "pipedream-2bw", problem)
    assert isinstance(plan, Plan)
    assert [(stage.start, stage.stop) for stage in plan.stages] == [(0, 2), (2, 4)]
    assert plan.costs[1].input_bytes == 256

    run_ranks(
        RunJob(plan=plan, model=BRANCHING, data=DATA, steps=3, checkpoint_every=3, out=str(tmp_path), device="cpu")
    )
    reference = train(plan, BRANCHING, DATA, steps=3, seed=0, learning_rate=0.1)
    assert distance(checkpoint_weights(tmp_path, 3), reference) < 1e-12


@pytest.mark.each_case
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream-2bw"])
def test_blocks_may_change_what_they_are_given_in_place(schedule: str, recompute: bool, tmp_path: Path) -> None:
    """Wherever a stage begins, and however often it runs its forward."""
    plan = make_plan(schedule, (0, 2, 4), recompute=recompute)
    run_ranks(
        RunJob(plan=plan, model=IN_PLACE, data=DATA, steps=3, checkpoint_every=3, out=str(tmp_path), device="cpu")
    )
    reference = train(plan, IN_PLACE, DATA, steps=3, seed=0, learning_rate=0.1)
    assert distance(checkpoint_weights(tmp_path, 3), reference) < 1e-12


def test_a_stage_may_change_its_input_in_place_though_the_same_rank_keeps_it(tmp_path: Path) -> None:
    """What is handed over on a rank is as much the next stage's own as what is sent to it."""
    model = "tests.worker_agent.runtime.awkward:kept_and_changed?width=8"
    given: dict[str, Any] = {"model": model, "data": DATA, "steps": 3, "checkpoint_every": 3, "device": "cpu"}
    weights = []
    for schedule, chunks in (("1f1b", 1), ("zb-v", 2)):
        out = tmp_path / schedule
        run_ranks(RunJob(plan=make_plan(schedule, CUTS[4], chunks=chunks), out=str(out), **given))
        weights.append(checkpoint_weights(out, 3))
    assert distance(*weights) < 1e-12
