"""Runs with 2BP end on the weights of the fused single-process reference, in float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeplan.documents.plan import Plan
from pipeplan.programs.instructions import BackwardInput, BackwardWeight, Forward, Update
from pipeplan.programs.program import Program
from pipeplan.programs.timeline import Lane
from pipeplan.simulation.predict import predict, program_of
from tests.worker_agent.commands import finish
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import CLASSES, Weights
from tests.worker_agent.runtime.test_executor import CUTS, checkpoint_weights, distance, without_checkpoints
from tests.worker_agent.runtime.test_run_command import command
from worker_agent.engine.clocks import HostClock
from worker_agent.engine.graphs import CALL_BYTES, NODE_BYTES
from worker_agent.engine.optimizers import Optimizer
from worker_agent.engine.results import RankResult
from worker_agent.engine.weights import Weights as Versions
from worker_agent.engine.weights import find_slots
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.losses import build_loss
from worker_agent.models.randomness import random_seed
from worker_agent.runtime.executor import Executor, Hooks
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.mail import Mail
from worker_agent.runtime.recorder import Recorder
from worker_agent.runtime.stage import StageBlocks

MODEL = "tests.worker_agent.runtime.awkward:awkward?width=8"
VARIED = "tests.worker_agent.runtime.varied"
DATA = "worker_agent.models.presets:regression?width=8&samples=64"
STEPS, SEED, RATE = 4, 3, 0.2
SCHEDULES = {"naive": ("naive", 1), "gpipe": ("gpipe", 4), "1f1b-1": ("1f1b", 1), "1f1b-2": ("1f1b", 2)}
"""2BP's four: the schedule, and a batch's microbatches a stage (naive, and GPipe on 2 stages: in all)."""


def plan_of(name: str, depth: int, **options: Any) -> Plan:
    schedule, a_stage = SCHEDULES[name]
    microbatches = a_stage * depth if schedule == "1f1b" else a_stage
    return make_plan(schedule, CUTS[depth], microbatches=microbatches, split_backward=True, **options)


def execute(plan: Plan, out: Path, **options: Any) -> tuple[Weights, tuple[RankResult, ...]]:
    """The weights after the last step, and the ranks' results."""
    changed: dict[str, Any] = {"model": MODEL, "steps": STEPS, "checkpoint_every": STEPS} | options
    job = RunJob(
        plan=plan,
        data=DATA,
        seed=SEED,
        learning_rate=RATE,
        out=str(out),
        device="cpu",
        **changed,
    )
    results = run_ranks(job)
    return checkpoint_weights(out, job.steps), results


def reference(plan: Plan, model: str = MODEL) -> Weights:
    """Plain training, microbatch by microbatch and block by block, with autograd's own backward."""
    chain = build_model(model, seed=SEED, dtype=torch.float64)
    chain.root.train()
    source = open_data(DATA, microbatch_size=plan.microbatch_size, seed=SEED)
    optimizer = CLASSES[plan.optimizer](list(chain.root.parameters()), lr=RATE)
    batch = plan.batch_size // plan.microbatch_size
    for step in range(STEPS):
        optimizer.zero_grad()
        for k in range(step * batch, (step + 1) * batch):
            inputs, targets = (t.double() for t in source.microbatch(k))  # type: ignore[union-attr]
            values: Any = (inputs,)
            for index, block in enumerate(chain.blocks):
                torch.manual_seed(random_seed(SEED, k + 1, index))
                result = block(*values)
                values = result if isinstance(result, tuple) else (result,)
            torch.autograd.backward(build_loss(None)(values[0], targets) / batch)
        optimizer.step()
    return {name: p.detach() for name, p in chain.root.named_parameters()}


@pytest.mark.each_case
@pytest.mark.parametrize(("depth", "recompute", "concatenate"), [(2, True, True), (4, False, True), (4, True, False)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_weights_equal_the_fused_reference(
    name: str, depth: int, recompute: bool, concatenate: bool, tmp_path: Path
) -> None:
    plan = plan_of(name, depth, recompute=recompute)
    weights, _ = execute(plan, tmp_path, concatenate=concatenate)
    assert distance(weights, reference(plan)) < 1e-13


@pytest.mark.each_case
@pytest.mark.parametrize(("name", "depth"), [("gpipe", 2), ("1f1b-1", 2), ("1f1b-2", 2), ("1f1b-2", 4)])
def test_weights_with_p2_half_way_equal_the_fused_reference(name: str, depth: int, tmp_path: Path) -> None:
    plan = plan_of(name, depth, half_way=True, replicas=2 if depth == 2 else 1, recompute=name == "1f1b-1")
    weights, results = execute(plan, tmp_path, concatenate=True, checkpoint_every=1)
    assert distance(weights, reference(plan)) < 1e-13
    for result, lane in zip(results, predict(plan, batches=STEPS).lanes, strict=True):
        assert without_checkpoints(result.lane) == lane.instructions


@pytest.mark.each_case
@pytest.mark.parametrize("name", ["gpipe", "1f1b-2"])
def test_weights_of_replicas_equal_the_fused_reference(name: str, tmp_path: Path) -> None:
    plan = plan_of(name, 2, replicas=2, optimizer="adam")
    weights, _ = execute(plan, tmp_path)
    assert distance(weights, reference(plan)) < 1e-11


def test_data_parallel_weights_equal_the_fused_reference(tmp_path: Path) -> None:
    plan = make_plan("data-parallel", CUTS[1], replicas=2, split_backward=True)
    weights, _ = execute(plan, tmp_path)
    assert distance(weights, reference(plan)) < 1e-13


@pytest.mark.each_case
@pytest.mark.parametrize("name", ["gpipe", "1f1b-2"])
def test_the_runtime_executes_exactly_the_split_streams_that_the_simulator_plays(name: str, tmp_path: Path) -> None:
    plan = plan_of(name, 4)
    _, results = execute(plan, tmp_path, checkpoint_every=1)
    for result, lane in zip(results, predict(plan, batches=STEPS).lanes, strict=True):
        assert any(isinstance(one, BackwardWeight) for one in lane.instructions)
        assert without_checkpoints(result.lane) == lane.instructions


@pytest.mark.each_case
@pytest.mark.parametrize("concatenate", [False, True])
def test_a_run_resumed_between_checkpoints_ends_bit_for_bit_like_one_that_never_stopped(
    concatenate: bool, tmp_path: Path
) -> None:
    plan = plan_of("1f1b-2", 4, optimizer="momentum")
    whole, _ = execute(plan, tmp_path / "whole", concatenate=concatenate)
    execute(plan, tmp_path / "stopped", steps=3, checkpoint_every=3, concatenate=concatenate)
    weights, _ = execute(plan, tmp_path / "stopped", first_step=3, concatenate=concatenate)
    assert distance(weights, whole) == 0.0


def run_alone(program: Program, model: str = MODEL) -> tuple[Weights, Lane]:
    """Executes a program of one stage in this process: its weights afterwards and its lane."""
    chain = build_model(model, seed=SEED, dtype=torch.float64)
    cpu = torch.device("cpu")
    stage = StageBlocks(
        chain.blocks,
        first_block=0,
        criterion=build_loss(None),
        recompute=False,
        seed=SEED,
        device=cpu,
        split_backward=True,
    )
    weights = Versions(find_slots(chain.blocks, chain.names()), Optimizer("sgd", RATE))
    source = open_data(DATA, microbatch_size=2, seed=SEED)
    recorder = Recorder(HostClock())
    Executor(
        stream=program.streams[0],
        stage=stage,
        weights=weights,
        mail=Mail(program, 0, {}, cpu),
        replicas=None,
        recorder=recorder,
        hooks=Hooks(on_instruction=lambda *_: None, on_update=lambda *_: None, on_checkpoint=lambda _: None),
        inputs=lambda k: source.microbatch(k - 1)[0].double(),  # type: ignore[union-attr]
        targets=lambda k: source.microbatch(k - 1)[1].double(),  # type: ignore[union-attr]
        update_microbatches=4,
    ).run()
    return weights.version_tensors(STEPS), recorder.lane(rank=0, stage=0, replica=0)


@pytest.mark.each_case
@pytest.mark.parametrize(("depth", "recompute"), [(2, True), (4, False)])
def test_zb_h1s_weights_equal_the_fused_reference(depth: int, recompute: bool, tmp_path: Path) -> None:
    plan = make_plan("zb-h1", CUTS[depth], microbatches=6, recompute=recompute, optimizer="adam")
    weights, _ = execute(plan, tmp_path)
    assert distance(weights, reference(plan)) < 1e-11


def test_interleaved_stages_send_each_other_tensors_of_several_shapes(tmp_path: Path) -> None:
    """Between two ranks the outputs of the first and of the third stage go the same way: one tensor, and three."""
    plan = make_plan("1f1b-interleaved", CUTS[4], chunks=2, optimizer="adam")
    model = "tests.worker_agent.runtime.awkward:forking_late?width=8"
    weights, _ = execute(plan, tmp_path, model=model)
    assert distance(weights, reference(plan, model)) < 1e-11


def test_weights_without_p2_are_others() -> None:
    """What the other tests compare would not be equal if p2 were left out."""
    plan = make_plan("1f1b", (0, 4), split_backward=True)
    split = program_of(plan, batches=STEPS)
    assert distance(run_alone(split)[0], reference(plan)) < 1e-13
    assert distance(run_alone(split_off(split))[0], reference(plan)) > 1e-3


def split_off(program: Program) -> Program:
    """The program without its p2."""
    streams = [
        replace(stream, instructions=tuple(i for i in stream.instructions if not isinstance(i, BackwardWeight)))
        for stream in program.streams
    ]
    return replace(program, streams=tuple(streams))


def test_what_p1_lets_go_and_p2_keeps_is_counted() -> None:
    """Four linear layers: their inputs and output gradients, where the graph had kept inputs, outputs and targets."""
    program = program_of(make_plan("gpipe", (0, 4), split_backward=True), batches=STEPS)
    lane = run_alone(program, model="worker_agent.models.presets:mlp?width=8&depth=4")[1]
    held = dict(zip(lane.instructions, lane.memory_bytes, strict=True))
    tensor = 2 * 8 * torch.float64.itemsize
    empty, gradients = held[Update(1)], 4 * (8 * 8 + 8) * torch.float64.itemsize
    graph = held[Forward(1)] - empty - (4 + 2) * tensor  # its nodes, and the objects of saved tensors
    assert 4 * NODE_BYTES < graph < 40 * NODE_BYTES
    activations, kept = (4 + 2) * tensor + graph, (4 + 4) * tensor + 4 * CALL_BYTES
    assert [held[Forward(k)] - empty for k in (1, 2, 3, 4)] == [k * activations for k in (1, 2, 3, 4)]
    assert [held[BackwardInput(k)] - empty for k in (4, 3, 2, 1)] == [
        (4 - n) * activations + n * kept for n in (1, 2, 3, 4)
    ]
    assert held[BackwardWeight((4, 3, 2, 1))] == empty + gradients


def test_half_way_half_of_what_waits_for_p2_is_held() -> None:
    """Inputs and output gradients of four layers, as above, of two microbatches of four."""
    lanes = [
        run_alone(program_of(make_plan("naive", (0, 4), split_backward=True, half_way=half_way), batches=STEPS))[1]
        for half_way in (False, True)
    ]
    held, saved = (dict(zip(lane.instructions, lane.memory_bytes, strict=True)) for lane in lanes)
    empty = held[Update(1)]
    assert saved[Update(1)] == empty
    early = 2 * (held[BackwardInput(2)] - empty) - (held[BackwardInput(4)] - empty)  # the gradients that p1 makes
    every = saved[BackwardWeight((1, 2))] - empty
    assert 0 <= early < every
    assert saved[BackwardInput(2)] == held[BackwardInput(2)] == saved[BackwardInput(4)] - every + early


@pytest.mark.campaign
def test_the_command_runs_a_plan_with_a_split_backward(tmp_path: Path) -> None:
    plan = plan_of("1f1b-1", 2)
    arguments = command(plan, tmp_path, "--lr", str(RATE), "--concatenate", "--json", model=MODEL, steps=STEPS)
    result = finish(arguments)
    assert result.returncode == 0, result.stderr
    assert distance(checkpoint_weights(tmp_path / "out", STEPS), reference(plan)) < 1e-13
    trace = (tmp_path / "out" / "trace.json").read_text()
    assert '"W1,2"' in trace


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("model", "defers"), [(MODEL, True), (f"{VARIED}:packed", False), (f"{VARIED}:recurrent", True)]
)
def test_a_run_says_how_much_of_its_backward_was_deferred(model: str, defers: bool, tmp_path: Path) -> None:
    """Measured, and 0 where p2 had nothing to do."""
    _, results = execute(plan_of("1f1b-1", 2), tmp_path / "split", model=model)
    shares = [result.deferred_share for result in results]
    assert all(share is not None and (0.0 < share < 1.0 if defers else share == 0.0) for share in shares)
    _, fused = execute(make_plan("1f1b", CUTS[2]), tmp_path / "fused", model=model)
    assert [result.deferred_share for result in fused] == [None, None]
