"""Equal calls run once; what differs in what a layer is, or in what it gets, runs again."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from worker_agent.models.cut import find_cuts
from worker_agent.models.equality import EqualCalls
from worker_agent.models.flow import find_flow
from worker_agent.models.hugging_face import build_family
from worker_agent.models.spec import parse_spec

HIDDEN = "num_hidden_layers=7&hidden_size=64&num_attention_heads=4&num_key_value_heads=2&vocab_size=128"
EXPERTS = "&first_k_dense_replace=1&moe_intermediate_size=16&n_routed_experts=4&num_experts_per_tok=2&n_group=2"
SPECS = {
    "windows": f"hf:gemma3_text?{HIDDEN}&head_dim=16&intermediate_size=96&sliding_window=32",
    "dense first": f"hf:deepseek_v3?{HIDDEN}{EXPERTS}&topk_group=1&intermediate_size=96".replace("heads=2", "heads=4"),
    "state spaces": "hf:mamba2?num_hidden_layers=3&hidden_size=64&vocab_size=128&num_heads=8&head_dim=16&state_size=16",
}


class Layer(nn.Module):
    """Counts the calls of all layers."""

    def __init__(self, calls: Counter[str], layer_idx: int, *, width: int = 4, variant: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device="meta"))
        self.calls = calls
        self.layer_idx = layer_idx
        self.variant = variant

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls["layer"] += 1
        return x * scale


@pytest.mark.parametrize(
    ("second", "argument", "runs"),
    [
        ({}, {}, 1),
        ({"variant": True}, {}, 2),
        ({"width": 5}, {}, 2),
        ({}, {"scale": 2.0}, 2),
    ],
)
def test_a_layer_runs_unless_an_equal_one_has_got_the_same(
    second: dict[str, Any], argument: dict[str, Any], runs: int
) -> None:
    calls = Counter[str]()
    layers, equal = (Layer(calls, 0), Layer(calls, 1, **second)), EqualCalls()
    hidden = torch.empty(2, 4, device="meta")
    for layer, named in zip(layers, ({}, argument), strict=True):
        run = partial(layer, hidden, **named)
        assert equal.result(layer, ((hidden,), named), run).shape == (2, 4)
    assert calls["layer"] == runs


@pytest.mark.each_case
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_a_model_has_the_flow_and_the_cuts_that_it_has_if_every_layer_runs(spec: str) -> None:
    found = []
    for apart in (False, True):
        root: Any = build_family(parse_spec(spec, field="model")).root
        layers = next(row for row in root.modules() if isinstance(row, nn.ModuleList))
        for number, layer in enumerate(layers):
            vars(layer)["place"] = number if apart else 0
        tokens = {"input_ids": torch.zeros(2, 5, dtype=torch.int64)}
        found.append((find_flow(root, tokens), find_cuts(root, tokens).before, find_cuts(root, tokens).after))
    assert found[0] == found[1]
