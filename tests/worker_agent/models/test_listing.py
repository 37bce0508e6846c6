"""Listing: the command that shows a model's blocks, and how to begin them elsewhere."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from pipeplan.cli.console import run_app
from tests.house.pages import DOCS, fences
from worker_agent.cli import app

PLACE = "tests.worker_agent.models.own_modules"


def blocks(*arguments: str) -> tuple[object, str, str]:
    """The command's status, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        run_app(app, ["blocks", *arguments])
        raise SystemExit(0)
    return ended.value.code, out.getvalue(), err.getvalue()


def listed(*arguments: str) -> str:
    status, out, err = blocks(*arguments)
    assert status in (0, None), err
    return out


def test_the_blocks_of_an_own_module_are_listed_in_a_form_to_paste() -> None:
    out = listed(f"{PLACE}:Masked", "--data", f"{PLACE}:tokens", "--microbatch-size", "2")
    assert 'model.cuts = ["embed", "layers.0", "layers.1", "layers.2"]' in out
    row = next(line for line in out.splitlines() if line.startswith("layers.1"))
    assert "bool 2 x 6, float32 2 x 6 x 8" in row


def test_what_it_lists_can_be_given_back() -> None:
    found = json.loads(listed(f"{PLACE}:Twice", "--data", "preset:regression?width=8", "--json"))
    assert found["names"] == ["layer", "layer:2", "layer:3", "head"] and found["own"]
    cuts = json.dumps(["layer", "layer:3", "head"], separators=(",", ":"))
    again = listed(f"{PLACE}:twice_with_cuts?cuts={cuts}", "--data", "preset:regression?width=8", "--json")
    assert json.loads(again)["names"] == ["layer", "layer:3", "head"]


def test_the_pages_module_is_cut_where_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = next(each for each in fences(DOCS / "models.md") if "class Net(" in each.text)
    (tmp_path / "page_net.py").write_text(fence.text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = json.loads(listed("page_net:model", "--data", "preset:random_tokens?vocab_size=256", "--json"))
    assert found["names"] == ["embed", "layers.1", "layers.3", "head"]


@pytest.mark.parametrize("spec", ["preset:mlp", "hf:gpt2?n_layer=1&n_embd=16&n_head=2&vocab_size=32&n_positions=16"])
def test_the_blocks_of_every_other_model_are_listed(spec: str) -> None:
    found = json.loads(listed(spec, "--json"))
    assert len(found["names"]) == len(found["hands_on"]) == len(found["weight_bytes"]) and not found["own"]


def test_a_model_of_any_size_is_listed_without_its_weights() -> None:
    """A model of 28 GB, whose weights this command once made."""
    found = json.loads(listed("preset:llama_7b", "--json"))
    assert sum(found["weight_bytes"]) > 26e9 and len(found["names"]) == 34
    assert found["hands_on"][1] == [{"shape": [1, 512, 4096], "dtype": "float32"}]


def test_a_mixture_of_any_size_is_listed_without_its_weights() -> None:
    """Torch's rule for grouped products without contents refuses float32: 26 GB of weights were once made for it."""
    spec = "hf:mixtral?num_hidden_layers=4&vocab_size=50"
    status, out, err = blocks(spec, "--json")
    assert status in (0, None) and err == ""
    found = json.loads(out)
    assert found["names"] == ["embedding", *(f"layer.{i}" for i in range(4)), "head"]
    assert sum(found["weight_bytes"]) > 20e9
    assert found["hands_on"][1] == [{"shape": [1, 512, 4096], "dtype": "float32"}]


DEIT = "hf:deit?image_size=32&num_labels=3&num_attention_heads=2"


def test_weights_that_blocks_depend_on_are_made_and_it_says_so() -> None:
    """Its constructor reads a number out of a tensor."""
    spec = f"{DEIT}&num_hidden_layers=1&hidden_size=16&intermediate_size=16"
    status, out, err = blocks(spec, "--data", "preset:random_images?size=32", "--json")
    assert status in (0, None)
    found = json.loads(out)
    assert found["names"] == ["embedding", "layer.0", "head"]
    assert err == "what the blocks give depends on contents: 55.5 KiB of weights are made here\n"


def test_more_weights_than_a_listing_may_make_are_refused_before_any_is_made() -> None:
    spec = f"{DEIT}&num_hidden_layers=10&hidden_size=4096&intermediate_size=16384"
    status, _, err = blocks(spec, "--data", "preset:random_images?size=32")
    assert status == 2
    assert err.startswith("error: model: must have at most 4 GiB of weights, because what its blocks give depends on")
    assert "num_hidden_layers=2), got '7.51 GiB'" in err


def test_a_block_that_fails_for_another_reason_is_not_tried_again_with_contents() -> None:
    spec = "hf:deepseek_v2?num_hidden_layers=2&hidden_size=32&num_attention_heads=2&vocab_size=50&n_routed_experts=4"
    status, _, err = blocks(f"{spec}&moe_intermediate_size=8&intermediate_size=32")
    assert status == 1 and "made here" not in err
    assert err.startswith("error: TypeError: topk(): argument 'k' must be int, not NoneType, in block 1 (layer.0)")


def test_a_model_whose_inputs_nobody_knows_needs_data() -> None:
    status, _, err = blocks(f"{PLACE}:Masked")
    assert status == 2 and "data: must be named (--data)" in err
