"""Weights that several stages share: one parameter, whose gradient is summed over the stages."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeplan.documents.plan import Plan
from pipeplan.documents.tied import TiedStages, TiedWeights
from pipeplan.errors import InvalidInputError
from pipeplan.programs.text import format_stream
from pipeplan.protocol.runs import read_run
from tests.worker_agent.commands import finish
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import Weights, train
from tests.worker_agent.runtime.test_executor import CUTS, DATA, RATE, SEED, STEPS, checkpoint_weights, distance
from tests.worker_agent.runtime.test_run_command import command
from worker_agent.models.chain import build_model
from worker_agent.runtime.among_stages import stages_of, tied_groups
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.model_checks import require_match

TIED = "tests.worker_agent.runtime.awkward:tied?width=8"
THRICE = "tests.worker_agent.runtime.awkward:thrice?width=8"
UNTIED = "tests.worker_agent.runtime.awkward:untied?width=8"
GPT2 = "hf:gpt2?n_layer=2&n_embd=16&n_head=2&vocab_size=32&n_positions=16&tie_word_embeddings=true"
TOKENS = "worker_agent.models.text:random_tokens?vocab_size=32&sequence_length=8"


def execute(plan: Plan, out: Path, **options: Any) -> Weights:
    given: dict[str, Any] = {"model": TIED, "data": DATA, "steps": STEPS, "checkpoint_every": STEPS} | options
    run_ranks(RunJob(plan=plan, seed=SEED, learning_rate=RATE, out=str(out), device="cpu", **given))
    return checkpoint_weights(out, STEPS)


def expected(plan: Plan, model: str = TIED, **options: Any) -> Weights:
    return train(plan, model, DATA, steps=STEPS, seed=SEED, learning_rate=RATE, **options)


def copies(out: Path, name: str, step: int = STEPS) -> list[torch.Tensor]:
    """A parameter from the files of every stage that holds it."""
    files = sorted((out / "checkpoints" / f"step-{step}").glob("stage-?.safetensors"))
    return [tensors[name] for tensors in map(load_file, files) if name in tensors]


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "depth", "options"),
    [
        ("naive", 2, {}),
        ("gpipe", 4, {"recompute": True}),
        ("1f1b", 4, {"optimizer": "adam"}),
        ("1f1b", 2, {"replicas": 2}),
        ("1f1b", 4, {"split_backward": True}),
        ("pipedream-2bw", 4, {"optimizer": "momentum"}),
        ("pipedream-2bw", 2, {"replicas": 2}),
        ("pipedream", 1, {"microbatches": 1}),
        ("1f1b-interleaved", 4, {"chunks": 2, "optimizer": "momentum"}),
        ("1f1b-interleaved", 4, {"chunks": 2, "replicas": 2, "recompute": True}),
        ("zb-v", 4, {"chunks": 2, "replicas": 2}),
        ("zb-v", 2, {"chunks": 2, "replicas": 2}),
        ("v-half", 4, {"chunks": 2, "optimizer": "adam"}),
        ("v-half", 2, {"chunks": 2}),
        ("dual-pipe-v", 4, {"chunks": 2, "recompute": True}),
    ],
)
def test_tied_weights_equal_the_single_process_reference_and_each_other(
    schedule: str, depth: int, options: dict[str, Any], tmp_path: Path
) -> None:
    plan = make_plan(schedule, CUTS[depth], **options)
    weights = execute(plan, tmp_path)
    assert distance(weights, expected(plan)) < 1e-11
    for name in ("0.0.weight", "1.0.bias"):
        first, *others = copies(tmp_path, name)
        assert all(torch.equal(first, other) for other in others)
    assert len(copies(tmp_path, "0.0.weight")) == min(depth, 2)


@pytest.mark.each_case
@pytest.mark.parametrize(("schedule", "clip_norm"), [("1f1b-interleaved", 0.2), ("zb-v", None), ("1f1b", 0.2)])
def test_a_module_in_three_stages_is_one_wherever_these_are(
    schedule: str, clip_norm: float | None, tmp_path: Path
) -> None:
    """Stages 0, 2 and 3. In a loop of two ranks two of them are on one rank, in a V another two."""
    chunks = 1 if schedule == "1f1b" else 2
    plan = make_plan(schedule, CUTS[4], chunks=chunks, optimizer="adam")
    assert tied_groups(stages_of(plan, build_model(THRICE, seed=0))) == ((0, 2, 3), (1, 2))
    weights = execute(plan, tmp_path, model=THRICE, clip_norm=clip_norm)
    assert distance(weights, expected(plan, THRICE, clip_norm=clip_norm)) < 1e-11
    for name, stages in (("0.0.weight", 3), ("1.0.bias", 2)):
        first, *others = copies(tmp_path, name)
        assert len(others) == stages - 1 and all(torch.equal(first, other) for other in others)


def test_the_copies_of_one_rank_are_rounded_alike(tmp_path: Path) -> None:
    """Their gradients add up in float32, of which a sum between ranks is rounded to 16 bits before it is sent."""
    plan = make_plan("zb-v", CUTS[2], chunks=2, dtype="bfloat16", master_weights=True, optimizer="momentum")
    execute(plan, tmp_path, clip_norm=0.2)
    first, second = copies(tmp_path, "0.0.weight")
    assert torch.equal(first, second)


def test_without_the_sum_they_would_train_to_something_else() -> None:
    plan = make_plan("1f1b", CUTS[2])
    together, alone = expected(plan), expected(plan, UNTIED)
    assert max(float((together[name] - alone[name]).abs().max()) for name in together) > 1e-3


def test_a_shared_weight_counts_once_in_the_norm(tmp_path: Path) -> None:
    plan = make_plan("1f1b", CUTS[4])
    weights = execute(plan, tmp_path, clip_norm=0.2)
    assert distance(weights, expected(plan, clip_norm=0.2)) < 1e-11
    assert distance(weights, expected(plan)) > 1e-4


@pytest.mark.each_case
@pytest.mark.parametrize(("schedule", "chunks"), [("pipedream-2bw", 1), ("zb-v", 2)])
def test_a_resumed_run_ends_on_the_same_copies(schedule: str, chunks: int, tmp_path: Path) -> None:
    plan = make_plan(schedule, CUTS[2], optimizer="adam", chunks=chunks)
    whole = execute(plan, tmp_path / "whole", checkpoint_every=2)
    execute(plan, tmp_path / "resumed", steps=STEPS, checkpoint_every=2)
    resumed = execute(plan, tmp_path / "resumed", first_step=2)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    first, second = copies(tmp_path / "resumed", "0.0.weight")
    assert torch.equal(first, second)


@pytest.mark.campaign
def test_gpt2_with_tied_embeddings_trains_on_two_stages_as_on_one(tmp_path: Path) -> None:
    options = {"model": GPT2, "data": TOKENS}
    one = execute(make_plan("1f1b", (0, 4)), tmp_path / "one", **options)
    two = execute(make_plan("1f1b", (0, 2, 4)), tmp_path / "two", **options)
    assert distance(one, two) < 1e-11
    first, second = copies(tmp_path / "two", "transformer.wte.weight")
    assert torch.equal(first, second)
    assert not any("lm_head" in name for name in two)


@pytest.mark.campaign
def test_the_run_command_follows_the_streams_that_its_ranks_execute(tmp_path: Path) -> None:
    result = finish(command(make_plan("1f1b", (0, 2, 4)), tmp_path, "--json", model=TIED))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == 6
    for lane in read_run(tmp_path / "out").timeline.lanes:
        assert "T1:0,1 U1" in format_stream(lane.instructions)


@pytest.mark.campaign
def test_pipedream_refuses_stages_that_share_weights(tmp_path: Path) -> None:
    plan = make_plan("pipedream", CUTS[2], microbatches=1)
    result = finish(command(plan, tmp_path, model=TIED))
    assert result.returncode == 2
    assert "or to share weights between stages, got 'pipedream'" in result.stderr


def test_every_group_of_stages_is_found_once() -> None:
    plan = make_plan("1f1b", CUTS[4])
    assert tied_groups(stages_of(plan, build_model(TIED, seed=0))) == ((0, 3), (1, 3))
    assert tied_groups(stages_of(plan, build_model(UNTIED, seed=0))) == ()


def test_a_frozen_shared_weight_is_not_exchanged() -> None:
    chain = build_model(TIED, seed=0)
    chain.blocks[0].requires_grad_(False)
    assert tied_groups(stages_of(make_plan("1f1b", CUTS[4]), chain)) == ((1, 3),)


def test_a_profile_says_which_weights_are_tied() -> None:
    """8 x 8 weights in float32 of the first block, and the second one's 8 biases, which the last block uses as well."""
    weight, bias = build_model(TIED, seed=0).tied_weights()
    assert weight == TiedWeights(block=0, also=(3,), weight_bytes=256)
    assert bias == TiedWeights(block=1, also=(3,), weight_bytes=32)
    assert build_model(UNTIED, seed=0).tied_weights() == ()
    shared, middle = build_model(THRICE, seed=0).tied_weights()
    assert (shared.blocks, middle.blocks) == ((0, 2, 3), (1, 2))


def test_a_plan_counts_a_stages_copies_or_is_older_than_that() -> None:
    """Two blocks of 8 x 8 weights and 8 biases in float32 are on each stage; those of the last are copies."""
    chain = build_model(TIED, seed=0)
    plan = make_plan("1f1b", (0, 2, 4), spec=TIED)
    ties = (TiedStages(stages=(0, 1), seconds=0.0),)
    for counted, tied in ((576, ties), (288, ())):
        sizes = (576, counted)
        costs = tuple(replace(own, version_bytes=size) for own, size in zip(plan.costs, sizes, strict=True))
        job = RunJob(plan=replace(plan, costs=costs, tied=tied), model=TIED, data=DATA, steps=1, out="/out")
        require_match(job, chain)
        with pytest.raises(InvalidInputError, match="bytes of weights in stage 1"):
            require_match(replace(job, plan=replace(job.plan, tied=ties if not tied else ())), chain)
