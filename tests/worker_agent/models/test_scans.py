"""Models of today, small: one device's part of them, and recurrences as one operation."""

from math import prod

import pytest
import torch

from pipeplan.documents.forms import WHOLE, Form
from pipeplan.errors import InvalidInputError
from worker_agent.models.chain import build_model
from worker_agent.profiler.counts import BlockCounts
from worker_agent.profiler.sharded import FormCounts, count_form, shape_model

BODY = "hidden_size=64&num_attention_heads=4&num_key_value_heads=4&vocab_size=128&pad_token_id=0"
EXPERTS = f"{BODY}&num_hidden_layers=2&intermediate_size=96&moe_intermediate_size=32"
LATENTS = "&kv_lora_rank=16&q_lora_rank=24&qk_nope_head_dim=16&qk_rope_head_dim=8&v_head_dim=16"
ROUTED = f"{EXPERTS}&n_routed_experts=8&num_experts_per_tok=2&first_k_dense_replace=1&n_group=2&topk_group=1"
STATES = "&state_size=8&num_heads=8&head_dim=16&n_groups=2&chunk_size=16"
DELTA = (
    "&linear_num_key_heads=4&linear_num_value_heads=4&linear_key_head_dim=8&linear_value_head_dim=8&head_dim=16"
    '&layer_types=["linear_attention","full_attention"]'
)
KIMI = (
    "&linear_num_heads=4&linear_head_dim=16&num_experts=8&num_experts_per_tok=2"
    '&layer_types=["linear_attention","full_attention"]&mlp_layer_types=["dense","sparse"]'
)
MODELS = {
    "chosen keys": f"hf:deepseek_v32?{ROUTED}{LATENTS}&index_topk=16&index_n_heads=4&index_head_dim=16",
    "dbrx": "hf:dbrx?n_layers=2&d_model=64&n_heads=4&vocab_size=128&max_seq_len=64"
    '&attn_config={"kv_n_heads":4,"rope_theta":10000,"clip_qkv":8}'
    '&ffn_config={"hidden_size":64,"ffn_hidden_size":96,"moe_num_experts":8,"moe_top_k":2}',
    "delta nets": f"hf:qwen3_next?{EXPERTS}{DELTA}&num_experts=8&num_experts_per_tok=2"
    "&shared_expert_intermediate_size=32",
    "gated latents": f"hf:kimi_linear?{EXPERTS}{LATENTS}{KIMI}",
    "glm": f"hf:glm4_moe?{ROUTED}&n_shared_experts=1",
    "jamba": f"hf:jamba?{BODY}&num_hidden_layers=4&intermediate_size=96&mamba_dt_rank=8&num_experts=8"
    "&attn_layer_period=4&attn_layer_offset=2&expert_layer_period=2&expert_layer_offset=1",
    "mamba": "hf:mamba?num_hidden_layers=2&hidden_size=64&intermediate_size=128&state_size=8&vocab_size=128",
    "mamba2": f"hf:mamba2?num_hidden_layers=2&hidden_size=64&expand=2&vocab_size=128{STATES}",
    "own activation": f"hf:apertus?{BODY}&num_hidden_layers=2&intermediate_size=96",
}
"""By what is particular of them."""


def counted(spec: str, form: Form = WHOLE, length: int = 64) -> FormCounts:
    model = shape_model(spec, "bfloat16")
    return count_form(model, form, microbatch_sizes=(1,), sequence_length=length, fusion="all")


def forward_flops(counts: FormCounts) -> int:
    return sum(op.flops for kind in counts.blocks for op in counts.kinds[kind].by_size[1].forward)


def parameters(counts: FormCounts) -> tuple[int, int]:
    """All of them, and those of experts."""
    kinds = [counts.kinds[kind] for kind in counts.blocks]
    experts = sum(kind.expert_parameters for kind in kinds)
    return experts + sum(kind.parameters for kind in kinds), experts


@pytest.mark.each_case
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_of_today_is_counted_whole_and_in_shares(name: str) -> None:
    """Of these, some lost the answer, and some their tensor degree; others never came to an end."""
    spec = MODELS[name]
    whole, share = counted(spec), counted(spec, Form(tensor=2, sequence_parallel=True))
    held, of_experts = parameters(whole)
    root = build_model(spec, seed=0, empty=True).root
    assert held == sum(parameter.numel() for parameter in root.parameters())
    held_by_one, of_experts_by_one = parameters(share)
    assert of_experts == 2 * of_experts_by_one
    assert held / 2 <= held_by_one < 0.75 * held
    assert 0.5 * forward_flops(whole) <= forward_flops(share) < 0.75 * forward_flops(whole)
    if of_experts:
        assert parameters(counted(spec, Form(expert=4)))[1] * 4 == of_experts


def layer(spec: str, length: int) -> BlockCounts:
    counts = counted(spec, length=length)
    return counts.kinds[counts.blocks[1]].by_size[1]


@pytest.mark.each_case
@pytest.mark.parametrize("name", ["mamba", "mamba2", "delta nets", "gated latents"])
def test_a_recurrence_is_one_operation_of_any_sequence(name: str) -> None:
    short, long = layer(MODELS[name], 32), layer(MODELS[name], 1024)
    assert [len(each.forward) for each in (short, long)] == [len(short.forward)] * 2
    scans = [op for op in long.forward if op.name == "pipeplan.scan"]
    assert len(scans) == 1 and len(long.forward) < 40


def test_a_scan_does_the_arithmetic_of_its_paper_and_is_made_again_in_the_backward() -> None:
    """Mamba-2 with 8 heads of 16, 2 groups of 8 numbers, chunks of 16."""
    found = layer(MODELS["mamba2"], 64)
    (first,) = (op for op in found.forward if op.name == "pipeplan.scan")
    (second,) = (op for op in found.backward if op.name == "pipeplan.scan_backward")
    assert first.flops == 64 * (2 * 16 * (2 * 8 + 8 * 16) + 4 * 8 * 8 * 16)
    assert second.flops == 2.5 * first.flops


def test_a_layer_that_carries_other_things_is_another_kind() -> None:
    """Gemma 4's first layer also carries the embedding, in another order: it was taken for the others."""
    spec = (
        f"hf:gemma4_text?{BODY}&num_hidden_layers=3&intermediate_size=96&head_dim=16"
        "&hidden_size_per_layer_input=8&vocab_size_per_layer_input=128&num_kv_shared_layers=0"
        '&layer_types=["sliding_attention","sliding_attention","full_attention"]'
    )
    found = counted(spec)
    assert parameters(found)[0] == sum(prod(p.shape) for p in build_model(spec, seed=0, empty=True).root.parameters())


def test_a_small_constant_is_cast_with_its_value() -> None:
    """A fake tensor of one number keeps the number, in its type."""
    model = shape_model(MODELS["own activation"], "float32")
    with model.mode:
        kinds = {torch.zeros_like(parameter).dtype for parameter in model.chain.root.parameters()}
    assert kinds == {torch.float32}


def test_layers_that_share_chosen_keys_are_counted_whole() -> None:
    """The library's code asks for positions' contents, to find packed sequences: a sample is one."""
    spec = f"hf:glm_moe_dsa?{ROUTED}{LATENTS}&index_topk=16&index_n_heads=4&index_head_dim=16"
    whole, shared = counted(spec), counted(spec, Form(expert=2))
    assert forward_flops(whole) > 0
    assert 0 < parameters(shared)[1] < parameters(whole)[1]
    with pytest.raises(InvalidInputError, match="layers that exchange several tensors of glm_moe_dsa"):
        counted(spec, Form(tensor=2, sequence_parallel=True))
