"""Words of other tools: what can mean only one thing is taken as that, and all else leads on to what is meant."""

import json
from pathlib import Path

import pytest

from pipeplan.cli.words import _OPTIONS, VALUES, meant
from pipeplan.planners.solve import PLANNERS
from pipeplan.schedules.registry import schedule_names
from tests.pipeplan.cli.commands import cluster_document, pipeplan, profile_document, write
from tests.worker_agent.commands import finish


@pytest.mark.parametrize(
    ("option", "word", "value"),
    [
        ("dtype", "bf16", "bfloat16"),
        ("dtype", "BF16", "bfloat16"),
        ("dtype", "torch.float16", "float16"),
        ("dtype", "fp16", "float16"),
        ("dtype", "half", "float16"),
        ("dtype", "float", "float32"),
        ("dtype", "double", "float64"),
        ("autocast", "bf16", "bfloat16"),
        ("sharding", "zero3", "weights"),
        ("sharding", "ZeRO-2", "gradients"),
        ("sharding", "zero_1", "optimizer"),
        ("sharding", "fsdp", "weights"),
        ("optimizer", "AdamW", "adamw"),
        ("engine", "Megatron-LM", "megatron"),
        ("planner", "2bw", "pipedream-2bw"),
        ("schedule", "1F1B", "1f1b"),
        ("schedule", "my.schedules:Own", "my.schedules:Own"),
        ("dtype", "fp8", "fp8"),
        ("model", "bf16", "bf16"),
    ],
)
def test_a_word_that_can_mean_one_value_only_is_that_value(option: str, word: str, value: str) -> None:
    assert meant(option, word) == value


def test_the_words_mean_what_there_is() -> None:
    assert {*VALUES["planner"].values()} == {*PLANNERS}
    assert {*VALUES["schedule"].values()} <= {*schedule_names()}


def test_a_plan_by_the_fields_words_is_the_plan_by_ours(tmp_path: Path) -> None:
    profile = profile_document(4) | {"dtype": "float32", "model": {"name": "m"}}
    files = (
        "--profile",
        write(tmp_path / "P.json", profile),
        "--cluster",
        write(tmp_path / "C.json", cluster_document()),
    )
    asked = ("solve", *files, "--batch-size", "4", "--json", "--planner")
    plans = [
        pipeplan(*asked, "2BW", "--optimizer", "AdamW"),
        pipeplan(*asked, "pipedream-2bw", "--optimizer", "adamw"),
    ]
    assert [ended.status for ended in plans] == [0, 0]
    assert len({json.loads(ended.out)["id"] for ended in plans}) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("solve", "--tp", "4"), "No such option: --tp; --tensor is meant"),
        (("solve", "--pp=4"), "No such option: --pp; --stages is meant"),
        (("solve", "-tp", "4"), "No such option: -t; --tensor is meant"),
        (("solve", "--gbs", "4"), "No such option: --gbs; --batch-size is meant"),
        (("solve", "--micro_batch_size", "4"), "No such option: --micro_batch_size; --microbatch-size is meant"),
        (("solve", "--seq", "4"), "No such option: --seq; --sequence-length is meant"),
        (("solve", "--dp", "4"), "No such option: --dp; --data is meant"),
        (("solve", "--zero", "3"), "No such option: --zero; --sharding is meant"),
        (("solve", "--num-layers", "4"), "No such option: --num-layers; it is a key of the model's config: --model"),
        (("simulate", "--pp", "4"), "No such option: --pp; --stages is meant"),
        (("solve", "--recompute=full"), "Option '--recompute' does not take a value"),
        (("profile", "--model", "hf:gpt2"), "No such option: --model; `pipeplan-agent profile` measures"),
        (("run", "--plan", "x"), "No such command 'run'; `pipeplan-agent run` is meant"),
        (("blocks",), "No such command 'blocks'; `pipeplan-agent blocks` is meant"),
        (("solve", "--bogus", "1"), "No such option: --bogus"),
    ],
)
def test_an_option_of_another_tool_is_answered_with_ours(arguments: tuple[str, ...], sentence: str) -> None:
    ended = pipeplan(*arguments)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(f"error: {sentence}") and ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run", "--tp", "4"), "No such option: --tp; the plan says it: `pipeplan solve` has --tensor"),
        (("run", "--dataset", "x"), "No such option: --dataset; --data is meant"),
        (("profile", "--mbs", "4"), "No such option: --mbs; --microbatch-sizes is meant"),
        (("solve",), "No such command 'solve'; `pipeplan solve` is meant"),
    ],
)
def test_the_agents_command_answers_as_well(arguments: tuple[str, ...], sentence: str) -> None:
    ended = finish(arguments)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {sentence}")


def test_every_option_that_is_suggested_is_one_of_some_command() -> None:
    text = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [option for option in _OPTIONS if f"{option}`" not in text and f"{option} " not in text] == []


def test_a_models_config_in_a_documents_place_is_named(tmp_path: Path) -> None:
    config = write(tmp_path / "config.json", {"model_type": "llama", "hidden_size": 16})
    ended = pipeplan("solve", "--profile", config, "--cluster", "dgx-h100", "--batch-size", "8")
    rule = f"must be a profile, and this is a model's config: name it as --model hf:{config}, got 'llama'"
    assert (ended.status, ended.err) == (2, f"error: {config}: document: {rule}\n")
    cluster = pipeplan("solve", "--model", "hf:gpt2", "--cluster", config, "--batch-size", "8")
    assert cluster.status == 2 and "must be a cluster, and this is a model's config" in cluster.err


def test_a_planner_that_is_none_is_said_before_a_model_is_estimated() -> None:
    ended = pipeplan("solve", "--model", "hf:gpt2", "--cluster", "dgx-h100", "--batch-size", "8", "--planner", "dapple")
    assert ended.status == 2
    assert ended.err.startswith("error: --planner: must be one of pipedream, ") and ended.err.count("\n") == 1
