"""Outputs of modules that are freed and made again, as Megatron-LM does: which, their bytes, and what runs again."""

import pytest

from pipeplan.documents.forms import WHOLE, Form
from pipeplan.protocol.estimates import FormsAsked
from pipeplan.protocol.jobs import ProfileTask
from worker_agent.profiler.counts import BlockCounts, SelectiveCounts
from worker_agent.profiler.datasheets import DATASHEETS
from worker_agent.profiler.forms import profile_with_forms
from worker_agent.profiler.precision import RECIPES, in_recipe
from worker_agent.profiler.sharded import FormCounts, count_form, shape_model

HIDDEN, TOKENS, HEADS, CHOSEN, INNER = 64, 32, 4, 2, 48
QUERIES, KEYS, NOPE, ROPE, VALUE = 24, 16, 16, 8, 16
SIZES = f"num_hidden_layers=2&hidden_size={HIDDEN}&num_attention_heads={HEADS}&vocab_size=96&max_position_embeddings=64"
EXPERTS = f"num_experts_per_tok={CHOSEN}&moe_intermediate_size={INNER}"
QWEN = f"hf:qwen3_moe?{SIZES}&{EXPERTS}&num_key_value_heads=2&num_experts=4"
DEEPSEEK = (
    f"hf:deepseek_v3?{SIZES}&{EXPERTS}&num_key_value_heads={HEADS}&first_k_dense_replace=1&n_routed_experts=4&n_group=1"
    f"&topk_group=1&intermediate_size=96&q_lora_rank={QUERIES}&kv_lora_rank={KEYS}&qk_nope_head_dim={NOPE}"
    f"&qk_rope_head_dim={ROPE}&v_head_dim={VALUE}"
)
LLAMA = f"hf:llama?{SIZES}&num_key_value_heads=2&intermediate_size=96"


def counted(spec: str, form: Form = WHOLE, *, fusion: str = "all") -> FormCounts:
    model = shape_model(spec, "bfloat16")
    return count_form(model, form, microbatch_sizes=(1,), sequence_length=TOKENS, fusion=fusion)


def task(spec: str) -> ProfileTask:
    return ProfileTask(model=spec, microbatch_sizes=(1,), dtype="bfloat16", optimizer="adam", sequence_length=TOKENS)


def layers(counts: FormCounts) -> list[BlockCounts]:
    """Those between the embedding and the head."""
    return [counts.kinds[kind].by_size[1] for kind in counts.blocks[1:-1]]


def freed(layer: BlockCounts) -> tuple[SelectiveCounts, int]:
    """The way, and the elements of 16 bits a token that it frees."""
    assert layer.modules is not None
    return layer.modules, (layer.activation_bytes - layer.modules.activation_bytes) // 2 // TOKENS


@pytest.mark.parametrize("expert", [1, 2])
def test_experts_make_their_norm_and_their_activation_again(expert: int) -> None:
    for layer in layers(counted(QWEN, Form(expert=expert))):
        way, elements = freed(layer)
        assert way.modules == ("layernorm", "moe_act")
        assert elements == HIDDEN + CHOSEN * INNER, "the norm of attention is one kernel with its linear layer"
        assert [(op.name, op.flops) for op in way.operations] == [("fused", 0), ("fused", 0)]


def test_devices_of_a_tensor_group_free_their_shares() -> None:
    whole, share = (layers(counted(QWEN, form))[0] for form in (WHOLE, Form(tensor=2, sequence_parallel=True)))
    assert 2 * freed(share)[1] == freed(whole)[1]


def test_attention_by_latents_makes_heads_of_its_latents_again() -> None:
    """Of queries, keys and values are kept the latents alone; a dense layer frees nothing else but the first norm."""
    dense, mixed = layers(counted(DEEPSEEK))
    (of_dense, dense_elements), (of_mixed, mixed_elements) = freed(dense), freed(mixed)
    assert of_dense.modules == ("layernorm", "mla_up_proj")
    assert of_mixed.modules == ("layernorm", "moe_act", "mla_up_proj")
    latents = QUERIES + KEYS  # normed, which the products' gradients of weights read
    heads = HEADS * (2 * (NOPE + ROPE) + NOPE + VALUE)  # queries; keys put together; what keys and values come from
    assert dense_elements == HIDDEN + latents + heads
    assert mixed_elements == dense_elements + HIDDEN + CHOSEN * INNER
    for way in (of_dense, of_mixed):
        products = [(op.sizes.k, op.sizes.n) for op in way.operations if op.sizes]
        assert products == [(QUERIES, HEADS * (NOPE + ROPE)), (KEYS, HEADS * (NOPE + VALUE))]


def test_what_experts_do_between_the_ways_of_tokens_has_no_fixed_shapes() -> None:
    names = [op.name for op in layers(counted(QWEN))[0].forward]
    start, stop = names.index("index_select"), names.index("index_add") + 1
    assert names[start:stop] == ["index_select", "index_select", "bmm", "fused", "bmm", "fused", "index_add"]
    profile = profile_with_forms(FormsAsked(expert=2), task(QWEN), DATASHEETS["h100-sxm"])
    (form,) = profile.forms
    layer = form.kinds[form.blocks[1]].measurements[0]
    assert layer.dynamic_forward_operations == stop - start < layer.forward_operations
    assert 0 < layer.dynamic_backward_operations < layer.backward_operations
    assert form.graphs == ("attn", "moe_router", "moe_preprocess")
    assert layer.in_graphs.forward_operations == 1 + stop - start
    (mixed,) = profile_with_forms(FormsAsked(), task(DEEPSEEK), DATASHEETS["h100-sxm"]).forms
    assert mixed.graphs == ("attn", "mlp", "moe_router", "moe_preprocess")
    (dense,) = profile_with_forms(FormsAsked(), task(LLAMA), DATASHEETS["h100-sxm"]).forms
    assert dense.graphs == ("full",)
    assert all(m.dynamic_forward_operations == 0 for kind in dense.kinds for m in kind.measurements)


@pytest.mark.parametrize(("spec", "fusion"), [(LLAMA, "all"), (QWEN, "none")])
def test_a_dense_layer_and_a_program_of_single_operations_have_no_modules(spec: str, fusion: str) -> None:
    assert all(kind.by_size[1].modules is None for kind in counted(spec, fusion=fusion).kinds)


def test_an_input_that_is_made_again_is_not_kept_in_8_bits_either() -> None:
    counts = counted(DEEPSEEK)
    for wide, narrow in zip(layers(counts), layers(in_recipe(counts, RECIPES["fp8"])), strict=True):
        assert wide.modules is not None and narrow.modules is not None
        left = wide.modules.activation_bytes - narrow.modules.activation_bytes
        assert left < wide.activation_bytes - narrow.activation_bytes
        made = sum(sizes.batch * sizes.m * sizes.k for sizes in wide.modules.products)
        assert left + made == wide.activation_bytes - narrow.activation_bytes
        assert any(op.dtype == RECIPES["fp8"].dtype for op in narrow.modules.operations)


def test_looking_at_modules_leaves_no_hooks() -> None:
    model = shape_model(QWEN, "bfloat16")
    counts = count_form(model, WHOLE, microbatch_sizes=(1,), sequence_length=TOKENS, fusion="all")
    assert any(kind.by_size[1].modules for kind in counts.kinds)
    parts = [part for block in model.chain.blocks for part in block.modules()]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in parts)
