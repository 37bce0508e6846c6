"""Estimated profiles: from a SPEC and a datasheet to a plan, with no device."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse, read
from pipeplan.documents.profile import Profile
from pipeplan.documents.tied import TiedWeights
from pipeplan.errors import InvalidInputError
from pipeplan.protocol.jobs import ProfileTask
from tests.pipeplan.cli.commands import pipeplan
from worker_agent.cli import app
from worker_agent.models.chain import build_model
from worker_agent.profiler.analytic import estimate_cluster, estimate_profile, update_s_per_byte
from worker_agent.profiler.datasheets import DATASHEETS, Datasheet
from worker_agent.profiler.job import ProfileJob

GPT2 = "hf:gpt2?n_layer=3&n_embd=32&n_head=2&vocab_size=50&n_positions=16"
LLAMA_70B = (
    "hf:llama?num_hidden_layers=80&hidden_size=8192&num_attention_heads=64&num_key_value_heads=8"
    "&intermediate_size=28672&vocab_size=128256"
)


def estimate(
    model: str,
    *sizes: int,
    sheet: Datasheet = DATASHEETS["a100-80gb"],
    dtype: str = "float32",
    data: str | None = None,
    loss: str | None = None,
) -> Profile:
    task = ProfileTask.model_validate({"model": model, "data": data, "microbatch_sizes": sizes or (1,), "dtype": dtype})
    return estimate_profile(ProfileJob(task=task, loss=loss), sheet)


def test_a_profile_says_what_it_is() -> None:
    profile = estimate(GPT2, 2, 1)
    assert profile.estimated and profile.method is not None
    assert (profile.method.clock, profile.method.rounds) == ("datasheet", 0)
    assert profile.device == DATASHEETS["a100-80gb"].device()
    assert profile.model.spec == GPT2 and profile.microbatch_sizes == (1, 2)
    assert [block.name for block in profile.blocks] == ["embedding", "layer.0", "layer.1", "layer.2", "head"]
    assert tuple(block.weight_bytes for block in profile.blocks) == build_model(GPT2, seed=0).weight_bytes()
    assert profile.overheads.update_s_per_byte == update_s_per_byte("sgd", "float32", DATASHEETS["a100-80gb"])


def test_the_split_backward_adds_up_and_the_first_block_has_no_input_gradient() -> None:
    for block, m in zip((blocks := estimate(GPT2, 4).blocks), (b.at(4) for b in blocks), strict=True):
        assert m.backward_input_s is not None and m.backward_weight_s is not None
        assert m.backward_input_s + m.backward_weight_s == pytest.approx(m.backward_s)
        assert (m.backward_input_s == 0) == (block.name == "embedding")


def test_seventy_billion_parameters_are_profiled_exactly() -> None:
    profile = estimate(LLAMA_70B, 1, 4, sheet=DATASHEETS["h100-sxm"], dtype="bfloat16")
    hidden, intermediate, vocabulary, narrow = 8192, 28672, 128256, 1024
    layer = 2 * hidden * hidden + 2 * hidden * narrow + 3 * hidden * intermediate + 2 * hidden
    assert profile.weight_bytes == 2 * (80 * layer + 2 * hidden * vocabulary + hidden)
    first, last = (profile.blocks[i].at(4) for i in (1, 80))
    assert first == last
    # 512 tokens a sample; at this size arithmetic is nearly all of it
    sheet = DATASHEETS["h100-sxm"]
    reached = 4 * 512 * 2 * (layer - 2 * hidden) / (989.4e12 * sheet.compute_efficiency)
    assert reached < first.forward_s < 1.6 * reached


def test_twice_the_peaks_take_half_the_time() -> None:
    slow = Datasheet(name="x", memory_bytes=10**9, flops_per_s={"float32": 1e12}, memory_bandwidth_bytes_per_s=1e10)
    fast = Datasheet(
        name="x",
        memory_bytes=10**9,
        flops_per_s={"float32": 2e12},
        memory_bandwidth_bytes_per_s=2e10,
        launch_s=5e-5 / 2,
    )
    for a, b in zip(estimate(GPT2, 4, sheet=slow).at(4), estimate(GPT2, 4, sheet=fast).at(4), strict=True):
        assert a.forward_s == pytest.approx(2 * b.forward_s)
        assert a.backward_s == pytest.approx(2 * b.backward_s)
        assert a.activation_bytes == b.activation_bytes


@pytest.mark.parametrize(
    "spec", ["tests.worker_agent.models.factories:two_streams", "tests.worker_agent.models.factories:shared"]
)
def test_any_factory_can_be_estimated(spec: str) -> None:
    data = "worker_agent.models.presets:random_features?width=4"
    profile = estimate(spec, 2, data=data, loss="worker_agent.models.losses:mean_of_squares")
    assert sum(block.weight_bytes for block in profile.blocks) > 0
    assert all(m.forward_s > 0 and m.backward_s > 0 for m in profile.at(2)[:1])


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            "tests.worker_agent.models.factories:raising",
            "model: must be a model that can be built of tensors without contents",
        ),
        ("tests.worker_agent.models.factories:nothing", "model: must have at least one block"),
        ("hf:gpt2?n_head=5", "model: must be possible for gpt2"),
    ],
)
def test_a_model_that_cannot_be_is_refused(spec: str, sentence: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        estimate(spec)
    assert str(caught.value).startswith(sentence)


def raising_data(*, microbatch_size: int) -> None:
    raise KeyError("the file is not here")


def raising_loss(*, scale: float = 1.0) -> None:
    raise OSError("the file is not here")


@pytest.mark.parametrize(
    ("data", "loss", "sentence"),
    [
        ("raising_data", None, "data: must be a factory of microbatches that can be read (KeyError: 'the file is"),
        ("raising_data", "raising_loss", "loss: must be a loss or a factory of one (OSError: the file is not here, in"),
    ],
)
def test_data_and_losses_that_raise_are_refused(data: str, loss: str | None, sentence: str) -> None:
    here = "tests.worker_agent.profiler.test_analytic:"
    with pytest.raises(InvalidInputError) as caught:
        estimate(GPT2, data=here + data, loss=None if loss is None else here + loss)
    assert str(caught.value).startswith(sentence)


def test_a_dtype_that_the_device_does_not_have_is_refused() -> None:
    with pytest.raises(
        InvalidInputError, match="dtype: must be one in which V100-SXM2-16GB's datasheet gives its speed"
    ):
        estimate(GPT2, sheet=DATASHEETS["v100-16gb"], dtype="bfloat16")


def test_a_cluster_needs_a_link() -> None:
    assert estimate_cluster(DATASHEETS["a100-80gb"], 4).devices == 4
    without = Datasheet(name="x", memory_bytes=10, flops_per_s={"float32": 1.0}, memory_bandwidth_bytes_per_s=1.0)
    with pytest.raises(InvalidInputError, match="link_bandwidth_bytes_per_s: is needed to write a cluster"):
        estimate_cluster(without, 4)


@pytest.mark.parametrize(("key", "most"), [("a100-80gb", 8), ("v100-32gb", 16), ("rtx-4090", 8)])
def test_devices_of_several_servers_are_not_put_on_one_nvlink(key: str, most: int) -> None:
    """64 GPUs were once written as one server."""
    assert estimate_cluster(DATASHEETS[key], most).devices == most
    rule = f"devices: must be at most {most}, which one server holds: `pipeplan clusters` has clusters of several"
    with pytest.raises(InvalidInputError, match=rule):
        estimate_cluster(DATASHEETS[key], most + 1)


def test_the_commands_go_from_a_spec_to_a_plan_that_says_estimated(tmp_path: Path) -> None:
    profile, cluster = tmp_path / "P.json", tmp_path / "C.json"
    device = ("--analytic", "a100-80gb", "--dtype", "bfloat16", "--devices", "2")
    files = ("-o", str(profile), "--cluster-output", str(cluster))
    made = CliRunner().invoke(app, ["profile", "--model", GPT2, *device, *files], catch_exceptions=False)
    assert made.exit_code == 0
    assert "microbatches of 8 (estimated)" in made.output
    layers = [block.name for block in read(Profile, profile).blocks if block.name.startswith("layer.")]
    assert len(layers) > 1 and f"layer.0-{len(layers) - 1} " in made.output  # equal blocks are one row
    assert "estimated: times are computed from the device's datasheet, not measured" in made.output
    assert read(Profile, profile).estimated and read(Cluster, cluster).devices == 2
    wanted = ("--planner", "pipedream-2bw", "--batch-size", "16")
    solved = pipeplan("solve", "--profile", profile, "--cluster", cluster, *wanted, "--json")
    assert solved.status == 0 and solved.document["estimated"] is True
    shown = pipeplan("solve", "--profile", profile, "--cluster", cluster, *wanted).out
    assert re.search(r"samples/s, bubble [\d.]+ % \(estimated\)", shown)


def test_json_is_the_profile_alone() -> None:
    made = CliRunner().invoke(app, ["profile", "--model", GPT2, "--analytic", "l4", "--json"], catch_exceptions=False)
    assert parse(Profile, made.stdout).estimated


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--rounds", "5"), "--rounds"),
        (("--seconds", "5"), "--seconds"),
        (("--clock", "wall"), "--clock"),
        (("--device", "cuda"), "--device"),
        (("--warm-up-rounds", "0"), "--warm-up-rounds"),
        (("--devices", "9"), "--devices"),
        (("--microbatch-sizes", "65537"), "--microbatch-sizes"),
        (("--dtype", "int8"), "--dtype"),
        (("--analytic", "missing.json"), "--analytic"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(arguments: tuple[str, ...], field: str) -> None:
    outcome = CliRunner().invoke(app, ["profile", "--model", GPT2, "--analytic", "l4", *arguments])
    assert isinstance(outcome.exception, InvalidInputError)
    assert outcome.exception.field == field


def test_a_config_file_gives_the_profile_of_its_family(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {"model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    path.write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"], "tie_word_embeddings": True}))
    tied, untied = estimate(f"hf:{path}", 2), estimate(GPT2, 2)
    assert estimate(f"hf:{path}?tie_word_embeddings=false", 2).blocks == untied.blocks
    assert (tied.tied, untied.tied) == ((TiedWeights(block=0, also=(4,), weight_bytes=50 * 32 * 4),), ())
    assert untied.blocks[4].weight_bytes - tied.blocks[4].weight_bytes == 50 * 32 * 4
    assert len(estimate(f"hf:{path}?n_layer=1").blocks) == 3


def test_frozen_weights_and_buffers_are_in_a_profile_and_the_first_backward_is_the_first_trained_blocks() -> None:
    spec, data = "tests.worker_agent.runtime.awkward:{}", "preset:regression?width=64"
    adapted = estimate(spec.format("adapters"), 2, data=data)
    layer, low_rank = 4 * (64 * 64 + 64), 4 * 2 * 2 * 64
    assert {(b.weight_bytes, b.frozen_bytes, b.buffer_bytes) for b in adapted.blocks} == {(layer + low_rank, layer, 0)}
    extracting = estimate(spec.format("extractor?trained=2"), 2, data=data)
    assert [block.trained_bytes for block in extracting.blocks] == [*[0] * 6, layer, layer]
    assert {block.untrained_bytes - block.frozen_bytes for block in extracting.blocks} == {4 * 64 * 64}
    backward_s = [block.at(2).backward_s for block in extracting.blocks]
    assert backward_s[:6] == [0.0] * 6 and 0 < backward_s[6] < backward_s[7]  # the first needs no gradient of its input
    embedded = estimate(
        spec.format("frozen_embedding"),
        2,
        data="worker_agent.models.text:random_tokens?vocab_size=256&sequence_length=8",
    )
    assert embedded.tied_frozen == (TiedWeights(block=0, also=(5,), weight_bytes=4 * 256 * 32),) and not embedded.tied
