"""The runtime equals the mathematics, for every schedule, in float64."""

from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeplan.documents.plan import Plan
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.programs.instructions import Checkpoint, Instruction
from pipeplan.programs.timeline_document import LaneDocument
from pipeplan.simulation.predict import predict
from tests.pipeplan.builders import Cell, cluster, profile
from tests.schedules import ASP, INTERLEAVED, STASHING, V_SHAPED
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import Weights, train, train_in_turn, train_on_replicas
from worker_agent.engine.results import RankResult
from worker_agent.runtime.job import RunJob

MODEL = "worker_agent.models.presets:mlp?width=8&depth=4"
DATA = "worker_agent.models.presets:regression?width=8&samples=64"
CUTS = {1: (0, 4), 2: (0, 1, 4), 4: (0, 1, 2, 3, 4)}
STEPS, SEED, RATE = 5, 3, 0.2


def execute(plan: Plan, out: Path, *, steps: int = STEPS) -> tuple[Weights, tuple[RankResult, ...]]:
    """The weights after the last step, from the checkpoint, and the ranks' results."""
    results = run_ranks(job_of(plan, out, steps=steps))
    return checkpoint_weights(out, steps), results


def job_of(plan: Plan, out: Path, *, steps: int) -> RunJob:
    """So many steps, with a checkpoint after the last."""
    return RunJob(
        plan=plan,
        model=MODEL,
        data=DATA,
        steps=steps,
        seed=SEED,
        learning_rate=RATE,
        checkpoint_every=steps,
        out=str(out),
        device="cpu",
    )


def checkpoint_weights(out: Path, step: int) -> Weights:
    """All stages' weights in a checkpoint, by their names in the whole model."""
    files = sorted((out / "checkpoints" / f"step-{step}").glob("stage-*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def distance(one: Weights, other: Weights) -> float:
    """The largest difference between any two entries."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def expected(plan: Plan) -> Weights:
    return train(plan, MODEL, DATA, steps=STEPS, seed=SEED, learning_rate=RATE)


@pytest.mark.each_case
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize(
    "schedule", ["naive", "gpipe", "1f1b", "pipedream-2bw", "pipedream", "pipedream-vertical-sync", "zb-h1"]
)
def test_weights_equal_the_single_process_reference(
    schedule: str, depth: int, width: int, recompute: bool, tmp_path: Path
) -> None:
    microbatches = 1 if schedule in STASHING else 4
    plan = make_plan(schedule, CUTS[depth], replicas=width, microbatches=microbatches, recompute=recompute)
    weights, _ = execute(plan, tmp_path)
    assert distance(weights, expected(plan)) < 1e-12


@pytest.mark.each_case
@pytest.mark.parametrize("recompute", [False, True])
def test_a_planned_gpipe_trains_exactly_whether_it_recomputes_or_not(recompute: bool, tmp_path: Path) -> None:
    model = replace(profile([Cell(output_bytes=128)] * 4, sizes=(2,)), dtype="float64")
    problem = PlanningProblem(
        profile=model, cluster=cluster((2, 1e9)), batch_size=8, options=Options(stages=2, recompute=recompute)
    )
    plan = solve("gpipe", problem)
    assert isinstance(plan, Plan)
    weights, results = execute(plan, tmp_path)
    assert distance(weights, expected(plan)) < 1e-12
    recomputed = [sum(text.startswith("R") for text in result.lane.instructions) for result in results]
    assert recomputed == [4 * STEPS * recompute] * 2
    assert [without_checkpoints(result.lane) for result in results] == [
        lane.instructions for lane in predict(plan, batches=STEPS).lanes
    ]


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", ["pipedream-2bw", "pipedream"])
def test_modules_that_want_to_see_their_weights_see_every_version(schedule: str, tmp_path: Path) -> None:
    plan = make_plan(schedule, CUTS[2], microbatches=1 if schedule in STASHING else 4)
    run_ranks(replace(job_of(plan, tmp_path, steps=STEPS), model="tests.worker_agent.runtime.awkward:seeing"))
    assert distance(checkpoint_weights(tmp_path, STEPS), expected(plan)) < 1e-12


def test_data_parallel_weights_equal_the_single_process_reference(tmp_path: Path) -> None:
    plan = make_plan("data-parallel", CUTS[1], replicas=2)
    weights, _ = execute(plan, tmp_path)
    assert distance(weights, expected(plan)) < 1e-12


@pytest.mark.parametrize(("width", "recompute", "optimizer"), [(1, False, "sgd"), (2, True, "adam")])
def test_interleaved_weights_equal_the_single_process_reference(
    width: int, recompute: bool, optimizer: str, tmp_path: Path
) -> None:
    """2 ranks a pipeline, 2 chunks each: rank 0 has the first and the third block, rank 1 the second and the last."""
    plan = interleaved_plan(replicas=width, recompute=recompute, optimizer=optimizer)
    weights, results = execute(plan, tmp_path)
    assert len(results) == 2 * width
    assert distance(weights, expected(plan)) < 1e-11
    for result, lane in zip(results, predict(plan, batches=STEPS).lanes, strict=True):
        assert without_checkpoints(result.lane) == lane.instructions


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", [INTERLEAVED, "zb-v"])
def test_stages_of_a_rank_may_have_other_numbers_of_blocks(schedule: str, tmp_path: Path) -> None:
    plan = make_plan(schedule, (0, 1, 3, 4, 7), chunks=2)
    model = MODEL.replace("depth=4", "depth=7")
    run_ranks(replace(job_of(plan, tmp_path, steps=STEPS), model=model))
    reference = train(plan, model, DATA, steps=STEPS, seed=SEED, learning_rate=RATE)
    assert distance(checkpoint_weights(tmp_path, STEPS), reference) < 1e-11


def test_an_interleaved_run_resumes_on_every_chunk(tmp_path: Path) -> None:
    plan = interleaved_plan(optimizer="momentum")
    whole, _ = execute(plan, tmp_path / "whole")
    job = job_of(plan, tmp_path / "stopped", steps=3)
    run_ranks(job)
    run_ranks(replace(job, first_step=3, steps=STEPS))
    assert distance(checkpoint_weights(tmp_path / "stopped", STEPS), whole) == 0.0


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", sorted(V_SHAPED))
@pytest.mark.parametrize(
    ("ranks", "width", "recompute", "optimizer"),
    [(1, 1, False, "sgd"), (2, 1, False, "adam"), (2, 2, True, "sgd"), (1, 2, False, "momentum")],
)
def test_weights_of_ranks_in_a_v_equal_the_single_process_reference(
    schedule: str, ranks: int, width: int, recompute: bool, optimizer: str, tmp_path: Path
) -> None:
    """Of 2 ranks rank 0 has the first and the last block; rank 1 has the others, and hands them over to itself."""
    plan = make_plan(schedule, CUTS[2 * ranks], replicas=width, chunks=2, recompute=recompute, optimizer=optimizer)
    weights, results = execute(plan, tmp_path)
    assert len(results) == ranks * width
    assert distance(weights, expected(plan)) < 1e-11
    for result, lane in zip(results, predict(plan, batches=STEPS).lanes, strict=True):
        assert without_checkpoints(result.lane) == lane.instructions


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", sorted(V_SHAPED))
def test_a_run_in_a_v_resumes_on_both_stages(schedule: str, tmp_path: Path) -> None:
    plan = make_plan(schedule, CUTS[4], chunks=2, optimizer="momentum")
    whole, _ = execute(plan, tmp_path / "whole")
    job = job_of(plan, tmp_path / "stopped", steps=3)
    run_ranks(job)
    run_ranks(replace(job, first_step=3, steps=STEPS))
    assert distance(checkpoint_weights(tmp_path / "stopped", STEPS), whole) == 0.0


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", [INTERLEAVED, "dual-pipe-v"])
def test_a_plan_with_uneven_chunks_runs_as_it_is_played(schedule: str, tmp_path: Path) -> None:
    """The last two blocks take longer: the planner gives their rank fewer blocks, in both of its stages together."""
    blocks = [Cell(output_bytes=128)] * 5 + [Cell(forward_s=3.0, backward_s=6.0, output_bytes=128)] * 2
    problem = PlanningProblem(
        profile=replace(profile(blocks, sizes=(2,)), dtype="float64"),
        cluster=cluster((2, 1e9)),
        batch_size=8,
        options=Options(schedule=schedule, stages=2, chunks=2),
    )
    plan = solve("exact", problem)
    assert isinstance(plan, Plan)
    assert len({stage.stop - stage.start for stage in plan.stages}) > 1
    model = MODEL.replace("depth=4", "depth=7")
    results = run_ranks(replace(job_of(plan, tmp_path, steps=STEPS), model=model))
    reference = train(plan, model, DATA, steps=STEPS, seed=SEED, learning_rate=RATE)
    assert distance(checkpoint_weights(tmp_path, STEPS), reference) < 1e-11
    for result, lane in zip(results, predict(plan, batches=STEPS).lanes, strict=True):
        assert without_checkpoints(result.lane) == lane.instructions


def interleaved_plan(**options: Any) -> Plan:
    return make_plan("1f1b-interleaved", CUTS[4], chunks=2, **options)


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", sorted(STASHING))
@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (3, 1), (3, 2)])
def test_pipedream_on_unequal_replicas_equals_its_formula(
    replicas: tuple[int, ...], schedule: str, tmp_path: Path
) -> None:
    plan = make_plan(schedule, CUTS[2], replicas=replicas, microbatches=1)
    weights, _ = execute(plan, tmp_path)
    minibatches = STEPS * lcm(*replicas)
    reference = train_on_replicas(plan, MODEL, DATA, minibatches=minibatches, seed=SEED, learning_rate=RATE)
    assert distance(weights, reference) < 1e-12


@pytest.mark.each_case
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw"])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream-2bw", "pipedream", "pipedream-vertical-sync"])
def test_stateful_optimizers_take_the_same_gradients(schedule: str, optimizer: str, tmp_path: Path) -> None:
    microbatches = 1 if schedule in STASHING else 4
    plan = make_plan(schedule, CUTS[2], microbatches=microbatches, optimizer=optimizer)
    weights, _ = execute(plan, tmp_path)
    assert distance(weights, expected(plan)) < 1e-11


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("pipedream-2bw", 4), ("pipedream", 1), ("pipedream-vertical-sync", 1)]
)
def test_delayed_weights_differ_from_plain_gradient_descent(schedule: str, microbatches: int, tmp_path: Path) -> None:
    plan = make_plan(schedule, CUTS[4], microbatches=microbatches)
    weights, _ = execute(plan, tmp_path)
    plain = train(plan, MODEL, DATA, steps=STEPS, seed=SEED, learning_rate=RATE, delayed=(0, 0, 0, 0))
    assert distance(weights, plain) > 1e-6


def test_weight_stashing_alone_differs_from_vertical_sync(tmp_path: Path) -> None:
    """Else the exact tests of both could not tell them apart."""
    stashing, synchronised = (make_plan(schedule, CUTS[4], microbatches=1) for schedule in sorted(STASHING))
    weights, _ = execute(stashing, tmp_path)
    assert distance(weights, expected(stashing)) < 1e-12
    assert distance(weights, expected(synchronised)) > 1e-6


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", sorted(STASHING))
def test_a_resumed_run_finds_the_older_versions_that_it_needs(schedule: str, tmp_path: Path) -> None:
    plan = make_plan(schedule, CUTS[2], replicas=(2, 1), microbatches=1)
    whole, _ = execute(plan, tmp_path / "whole")
    job = job_of(plan, tmp_path / "stopped", steps=3)
    run_ranks(job)
    run_ranks(replace(job, first_step=3, steps=STEPS))
    assert distance(checkpoint_weights(tmp_path / "stopped", STEPS), whole) == 0.0


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "pipedream-2bw", "pipedream", "zb-h1"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_runtime_executes_exactly_the_streams_that_the_simulator_plays(
    schedule: str, recompute: bool, tmp_path: Path
) -> None:
    plan = make_plan(schedule, CUTS[4], microbatches=1 if schedule == "pipedream" else 4, recompute=recompute)
    _, results = execute(plan, tmp_path)
    predicted = predict(plan, batches=STEPS)
    for result, lane in zip(results, predicted.lanes, strict=True):
        assert without_checkpoints(result.lane) == lane.instructions


def without_checkpoints(lane: LaneDocument) -> tuple[Instruction, ...]:
    return tuple(one for one in lane.lane().instructions if not isinstance(one, Checkpoint))


def test_a_lane_never_goes_back_in_time_and_counts_its_memory(tmp_path: Path) -> None:
    _, results = execute(make_plan("1f1b", CUTS[2]), tmp_path)
    for result in results:
        marks = [mark for pair in zip(result.lane.start_s, result.lane.end_s, strict=True) for mark in pair]
        assert marks == sorted(marks)
    weight_bytes = (8 * 8 + 8) * torch.float64.itemsize  # the first stage is one block, and an update frees gradients
    first = results[0].lane.lane()
    assert first.memory_bytes[-1] == weight_bytes
    assert first.peak_memory_bytes > first.memory_bytes[-1]


@pytest.mark.campaign
def test_memory_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    """Sends that were never waited for once kept every activation until the run's end."""
    plan = make_plan("1f1b", (0, 2, 4), microbatch_size=64)
    peaks = []
    for steps in (5, 100):
        job = RunJob(
            plan=plan,
            model=MODEL.replace("width=8", "width=512"),
            data=DATA.replace("width=8", "width=512"),
            steps=steps,
            out=str(tmp_path / str(steps)),
            device="cpu",
        )
        peaks.append(max(result.peak_resident_bytes for result in run_ranks(job)))
    message_bytes = 64 * 512 * 8
    assert peaks[1] - peaks[0] < 50 * 4 * message_bytes  # a leak keeps 95 steps of 4 messages or more


@pytest.mark.each_case
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(("replicas", "microbatches"), [(1, 2), (2, 2), (3, 1)])
def test_asp_weights_equal_its_formula(replicas: int, microbatches: int, optimizer: str, tmp_path: Path) -> None:
    plan = make_plan(ASP, CUTS[1], replicas=replicas, microbatches=microbatches, optimizer=optimizer)
    weights, results = execute(plan, tmp_path)
    stale = train_in_turn(plan, MODEL, DATA, steps=STEPS, seed=SEED, learning_rate=RATE)
    assert distance(weights, stale) < 1e-11
    for result, lane in zip(results, predict(plan, batches=STEPS).lanes, strict=True):
        assert without_checkpoints(result.lane) == lane.instructions


def test_asp_differs_from_updates_on_the_newest_weights_and_from_means(tmp_path: Path) -> None:
    plan = make_plan(ASP, CUTS[1], replicas=3, microbatches=1)
    weights, _ = execute(plan, tmp_path)
    fresh = train_in_turn(plan, MODEL, DATA, steps=STEPS, seed=SEED, learning_rate=RATE, behind=0)
    together = train(plan, MODEL, DATA, steps=STEPS, seed=SEED, learning_rate=RATE)
    assert min(distance(weights, fresh), distance(weights, together)) > 1e-6


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", [ASP, "pipedream-2bw"])
def test_a_run_that_is_resumed_while_gradients_were_exchanged_is_the_same(schedule: str, tmp_path: Path) -> None:
    """The checkpoint lies in the middle of the next batch, whose gradients are computed again."""
    cuts, replicas = (CUTS[1], 3) if schedule == ASP else (CUTS[2], 2)
    plan = make_plan(schedule, cuts, replicas=replicas, microbatches=2, optimizer="adam")
    whole, _ = execute(plan, tmp_path / "whole")
    job = job_of(plan, tmp_path / "stopped", steps=3)
    run_ranks(job)
    run_ranks(replace(job, first_step=3, steps=STEPS))
    assert distance(checkpoint_weights(tmp_path / "stopped", STEPS), whole) == 0.0
