"""Transformers by their sizes: their parameters, what they compute, and that the runtime trains them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeplan.errors import InvalidInputError
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.test_executor import checkpoint_weights, distance
from worker_agent.models.chain import Chain, build_model
from worker_agent.models.data import default_feed
from worker_agent.runtime.job import RunJob

GPT = "preset:transformer?hidden=16&heads=2&vocabulary=32&sequence_length=8"
LLAMA = f"{GPT}&kv_heads=1&ffn=24&positions=rotary&norm=rms&activation=swiglu&bias=false"
DATA = "worker_agent.models.text:random_tokens?vocab_size=32&sequence_length=8"
TOKENS = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))


def parameters(chain: Chain) -> int:
    return sum(parameter.numel() for parameter in set(chain.root.parameters()))


def logits(spec: str, tokens: Tensor = TOKENS) -> Tensor:
    value = tokens
    for block in build_model(spec, seed=0, dtype=torch.float64).blocks:
        value = block(value)
    return value


def test_parameters_are_those_of_the_closed_form() -> None:
    h, v, s, layers, ffn = 16, 32, 8, 2, 24
    gpt = layers * (12 * h * h + 13 * h) + h * (v + s) + 2 * h  # Narayanan et al. 2021, formula (2)
    assert parameters(build_model(f"{GPT}&tied=true", seed=0)) == gpt
    assert parameters(build_model(GPT, seed=0)) == gpt + h * v
    llama = layers * (3 * h * h + 3 * h * ffn + 2 * h) + 2 * h * v + h  # one key/value head of two: 3 h^2
    assert parameters(build_model(LLAMA, seed=0)) == llama


@pytest.mark.parametrize("spec", [GPT, LLAMA])
def test_fused_kernels_change_nothing(spec: str) -> None:
    torch.testing.assert_close(logits(f"{spec}&fused=true"), logits(spec))


@pytest.mark.parametrize("spec", [GPT, LLAMA, f"{GPT}&positions=none"])
def test_a_token_changes_no_logits_before_it(spec: str) -> None:
    changed = TOKENS.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 32
    one, other = logits(spec), logits(spec, changed)
    torch.testing.assert_close(one[:, :5], other[:, :5])
    assert (one[:, 5:] - other[:, 5:]).abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize("spec", [f"{GPT}&layers=1", f"{LLAMA}&layers=1"])
def test_without_positions_only_the_set_of_earlier_tokens_counts(spec: str) -> None:
    swapped = TOKENS[:, [1, 0, *range(2, 8)]]
    assert (logits(spec)[:, -1] - logits(spec, swapped)[:, -1]).abs().max() > 1e-6
    plain = f"{spec}&positions=none".replace("positions=rotary&", "")
    torch.testing.assert_close(logits(plain)[:, -1], logits(plain, swapped)[:, -1])


@pytest.mark.each_case
@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("spec", [f"{GPT}&fused=true&tied=true", f"{LLAMA}&fused=true"])
def test_the_runtime_trains_it_on_two_stages_as_on_one(spec: str, split_backward: bool, tmp_path: Path) -> None:
    def trained(*cuts: int) -> dict[str, Tensor]:
        plan, out = make_plan("1f1b", cuts, split_backward=split_backward and len(cuts) > 2), tmp_path / str(len(cuts))
        options: dict[str, Any] = {"steps": 2, "seed": 3, "learning_rate": 0.2, "device": "cpu", "checkpoint_every": 2}
        run_ranks(RunJob(plan=plan, model=spec, data=DATA, out=str(out), **options))
        return checkpoint_weights(out, 2)

    begun = build_model(spec, seed=3, dtype=torch.float64).root.state_dict()
    one, two = trained(0, 4), trained(0, 2, 4)
    assert distance(one, two) < 1e-11
    assert all(float((one[name] - begun[name]).abs().max()) > 1e-6 for name in one)


def test_its_data_are_random_tokens_as_long_as_its_positions() -> None:
    assert "random_tokens?vocab_size=32&sequence_length=8" in default_feed(build_model(GPT, seed=0)).data


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("heads=3", "model.heads: must divide the 64 hidden features, got 3"),
        ("kv_heads=3", "model.kv_heads: must divide the 4 heads, got 3"),
        ("layers=0", "model.layers: must be a whole number of at least 1, got 0"),
        ("norm=batch", "model.norm: must be one of layer, rms, got 'batch'"),
        (
            "positions=rotary&hidden=4",
            "model.heads: must leave an even number of features each for rotary positions, g",
        ),
        ("dropout=1", "model.dropout: must be below 1, got 1"),
    ],
)
def test_sizes_that_do_not_fit_are_named(query: str, sentence: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        build_model(f"preset:transformer?{query}", seed=0)
    assert str(caught.value).startswith(sentence)
