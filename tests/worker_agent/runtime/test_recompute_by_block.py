"""Runs whose stages recompute by block: the weights of runs that do not, the streams that are played, their bytes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeplan.costs.estimate import estimate
from pipeplan.documents.plan import Plan
from pipeplan.programs.instructions import Backward, Checkpoint, Forward, Recompute, Update
from pipeplan.schedules.registry import schedule_named
from pipeplan.simulation.predict import predict
from tests.pipeplan.builders import Cell, cluster, profile
from tests.schedules import ASP, INTERLEAVED, STASHING
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.test_executor import (
    MODEL,
    STEPS,
    checkpoint_weights,
    distance,
    job_of,
    without_checkpoints,
)
from worker_agent.models.chain import build_model
from worker_agent.models.losses import default_loss
from worker_agent.profiler.block_memory import measure_memory

CASES: tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...] = (
    ("naive", (0, 3, 4), {}),
    ("data-parallel", (0, 4), {"replicas": 2, "optimizer": "adam"}),
    ("gpipe", (0, 3, 4), {"replicas": 2}),
    ("1f1b", (0, 2, 4), {"optimizer": "adam"}),
    ("1f1b", (0, 1, 4), {"replicas": 2, "optimizer": "momentum"}),
    ("pipedream-2bw", (0, 2, 4), {"replicas": 2, "optimizer": "adam"}),
    ("pipedream", (0, 3, 4), {"replicas": (2, 1)}),
    ("pipedream-vertical-sync", (0, 2, 4), {}),
    (ASP, (0, 4), {"replicas": 2}),
    (INTERLEAVED, (0, 1, 2, 3, 5), {"chunks": 2}),
)


def plan_of(schedule: str, cuts: tuple[int, ...], **options: Any) -> Plan:
    return make_plan(schedule, cuts, microbatches=1 if schedule in STASHING else 4, **options)


@pytest.mark.each_case
@pytest.mark.parametrize(("schedule", "cuts", "options"), CASES)
def test_a_run_by_block_has_the_weights_of_one_that_keeps_all_to_the_last_bit(
    schedule: str, cuts: tuple[int, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    found = []
    for name, ways in (("kept", {}), ("by block", {"recompute": True, "recompute_unit": "block"})):
        plan = plan_of(schedule, cuts, **options, **ways)
        job = job_of(plan, tmp_path / name, steps=STEPS)
        results = run_ranks(replace(job, model=job.model.replace("depth=4", f"depth={cuts[-1]}")))
        for result, lane in zip(results, predict(plan, batches=STEPS).lanes, strict=True):
            assert without_checkpoints(result.lane) == lane.instructions
            assert not any(isinstance(one, Recompute) for one in lane.instructions)
        found.append(checkpoint_weights(tmp_path / name, STEPS))
    assert distance(*found) == 0.0


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "cuts", "options"),
    [
        ("gpipe", (0, 3, 6), {"optimizer": "momentum"}),
        ("1f1b", (0, 2, 6), {}),
        ("pipedream-2bw", (0, 3, 6), {}),
        ("pipedream", (0, 4, 6), {}),
        (INTERLEAVED, (0, 2, 3, 4, 6), {"chunks": 2}),
    ],
)
def test_what_a_rank_holds_is_what_its_plan_says(
    schedule: str, cuts: tuple[int, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    """After a forward, and while a backward runs: but for one block's input, which its activations may hold too."""
    ways: dict[str, Any] = {"recompute": True, "recompute_unit": "block", "microbatch_size": 1}
    plan = plan_of(schedule, cuts, **options, **ways)
    spec = MODEL.replace("depth=4", f"depth={cuts[-1]}")
    chain = build_model(spec, seed=0, dtype=torch.float64)
    inputs = torch.ones(1, 8, dtype=torch.float64)
    memories = measure_memory(chain.blocks, default_loss, (inputs, inputs), torch.device("cpu"))
    weight_bytes = (8 * 8 + 8) * torch.float64.itemsize
    measured = [
        Cell(
            weight_bytes=weight_bytes,
            output_bytes=m.output_bytes,
            activation_bytes=m.activation_bytes + m.graph_bytes,
            shared_bytes=m.shared_bytes,
            kept_output_bytes=m.kept_output_bytes,
            passed_bytes=m.passed_bytes,
        )
        for m in memories
    ]
    model = profile(measured, input_bytes=memories[0].input_bytes)
    costs = estimate(
        model,
        cluster((plan.workers, 1.0)),
        plan.stages,
        plan.placement,
        microbatch_size=1,
        optimizer=plan.optimizer,
        schedule=schedule_named(schedule),
    )
    plan = replace(plan, costs=costs)
    results = run_ranks(replace(job_of(plan, tmp_path, steps=STEPS), model=spec))
    row_bytes = 8 * torch.float64.itemsize
    for result, lane in zip(results, predict(plan, batches=STEPS).lanes, strict=True):
        ran = [event for event in result.lane.lane().events() if not isinstance(event.instruction, Checkpoint)]
        pairs = list(zip(ran, lane.events(), strict=True))
        first = next(index for index, (event, _) in enumerate(pairs) if isinstance(event.instruction, Update))
        compared = [pair for pair in pairs[first:] if isinstance(pair[0].instruction, Forward | Backward)]
        for event, predicted in compared:
            within = row_bytes if isinstance(event.instruction, Backward) else 0
            assert predicted.memory_bytes is not None
            assert event.memory_bytes is not None
            assert predicted.memory_bytes - within <= event.memory_bytes <= predicted.memory_bytes
        peak_bytes = max(event.memory_bytes or 0 for event, _ in compared)
        assert lane.peak_memory_bytes - row_bytes <= peak_bytes <= lane.peak_memory_bytes
