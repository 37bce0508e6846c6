"""What one device does in a form, against the papers' formulas and against what the whole model does."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.forms import WHOLE, Collective, Form, Routing
from pipeplan.errors import InvalidInputError
from tests.properties import examples
from worker_agent.models.losses import default_loss, mean_of_squares
from worker_agent.profiler.counts import BlockCounts, count_blocks
from worker_agent.profiler.operations import DeviceOperation, MatrixSizes
from worker_agent.profiler.sharded import FormCounts, ShapedModel, count_form, shape_model

LLAMA = (
    "hf:llama?num_hidden_layers=3&hidden_size=64&num_attention_heads=8&num_key_value_heads=4"
    "&intermediate_size=96&vocab_size=128&max_position_embeddings=64"
)
GPT2 = "hf:gpt2?n_layer=2&n_embd=64&n_head=4&vocab_size=128&n_positions=64"
SMALL = (LLAMA, GPT2, "preset:transformer?fused=true&dropout=0.1&tied=true")

model = cache(shape_model)


def gpt(hidden: int, heads: int, length: int, dtype: str = "float16") -> ShapedModel:
    sizes = f"hidden={hidden}&heads={heads}&sequence_length={length}&layers=1&vocabulary=64"
    return shape_model(f"preset:transformer?{sizes}&dropout=0.1&fused=true", dtype)


def counts_of(shaped: ShapedModel, form: Form, *, b: int = 2, s: int = 64, attention: str = "flash") -> FormCounts:
    return count_form(shaped, form, microbatch_sizes=(b,), sequence_length=s, attention=attention)


def layer_of(shaped: ShapedModel, form: Form, *, b: int = 2, s: int = 64, attention: str = "flash") -> BlockCounts:
    return counts_of(shaped, form, b=b, s=s, attention=attention).kinds[1].by_size[b]


def flops(operations: Sequence[DeviceOperation]) -> int:
    return sum(operation.flops for operation in operations)


def exchanged(collectives: Sequence[Collective]) -> dict[tuple[str, str], tuple[int, int]]:
    return {(each.kind, each.axis): (each.count, each.size_bytes) for each in collectives}


@pytest.mark.each_case
@examples(6)
@given(
    b=st.sampled_from((2, 6)), width=st.sampled_from((8, 16)), per=st.sampled_from((2, 4)), s=st.sampled_from((20, 24))
)
@pytest.mark.parametrize("t", [1, 2, 4])
def test_unfused_attention_keeps_what_korthikanti_et_al_write_in_table_2(
    t: int, b: int, width: int, per: int, s: int
) -> None:
    a = t * per
    h = a * width
    shaped, statistics = gpt(h, a, s), 2 * 2 * 2 * s * b  # of two layer norms, two numbers for every token
    scores = 5 * a * s * s * b
    plain = layer_of(shaped, Form(tensor=t), b=b, s=s, attention="unfused")
    assert plain.activation_bytes == s * b * h * (10 + 24 / t) + scores / t + statistics
    assert plain.selective is not None
    assert plain.selective.activation_bytes == s * b * h * (10 + 24 / t) + statistics
    if t > 1:
        parallel = layer_of(shaped, Form(tensor=t, sequence_parallel=True), b=b, s=s, attention="unfused")
        assert parallel.activation_bytes == (34 * s * b * h + scores + statistics) / t
        assert parallel.selective is not None
        assert parallel.selective.activation_bytes == (34 * s * b * h + statistics) / t


@pytest.mark.parametrize(("b", "s"), [(1, 32), (2, 16), (2, 34)])
def test_a_softmax_that_the_fused_kernel_does_not_take_runs_in_steps(b: int, s: int) -> None:
    # two heads a device: b of 1 has no multiple of 4 rows of heads, 16 keys are too few, 34 queries no multiple of 4
    layer = layer_of(gpt(64, 4, s), Form(tensor=2), b=b, s=s, attention="unfused")
    assert layer.selective is not None
    names = [operation.name.removeprefix("pipeplan.").removeprefix("aten.") for operation in layer.selective.operations]
    assert "scaled_softmax" not in names and "without_later" in names
    assert len(names) == 4 + 4


def test_selective_recomputation_runs_the_core_again() -> None:
    b, a, s, h = 2, 4, 32, 64
    layer = layer_of(gpt(h, a, s), Form(tensor=2), b=b, s=s, attention="unfused")
    assert layer.selective is not None
    names = [operation.name.removeprefix("pipeplan.") for operation in layer.selective.operations]
    assert names == ["heads_product", "scaled_softmax", "native_dropout", "heads_product"]
    assert flops(layer.selective.operations) == 4 * b * s**2 * h // 2
    assert [operation.sizes for operation in layer.selective.operations if operation.sizes] == [
        MatrixSizes(batch=b * a // 2, m=s, n=s, k=h // a),
        MatrixSizes(batch=b * a // 2, m=s, n=h // a, k=s),
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_selective_recomputation_of_fused_attention_keeps_it_and_every_second_product(size: int) -> None:
    b, a, s, h = 2, 4, 32, 64
    layer = layer_of(gpt(h, a, s, dtype="float16" if size == 2 else "float32"), WHOLE, b=b, s=s)
    assert layer.selective is not None and layer.selective.unit == "operation"
    again = [op for op in layer.selective.operations if op.sizes]
    products = [op for op in layer.forward if op.sizes and "attention" not in op.name]
    assert again == products[1::2] and not any("attention" in op.name for op in layer.selective.operations)
    kept = 3 * h + h + 4 * h  # queries, keys and values; attention; the inner layer
    assert layer.selective.activation_bytes == size * b * s * (h + kept)
    assert layer.selective.activation_bytes < layer.activation_bytes


@pytest.mark.each_case
@pytest.mark.parametrize("spec", SMALL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_one_device_counts_are_those_of_the_whole_blocks(spec: str, dtype: str) -> None:
    shaped = model(spec, dtype)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    chain, floating = shaped.chain, getattr(torch, dtype)
    whole = count_blocks(shaped.mode, chain.blocks, default_loss, (tokens, tokens), floating=floating, gpu=True)
    found = counts_of(shaped, Form())
    assert tuple(found.kinds[kind].by_size[2] for kind in found.blocks) == whole
    assert sum(found.kinds[kind].parameters for kind in found.blocks) == sum(
        parameter.numel() for parameter in set(chain.root.parameters())
    )


@pytest.mark.each_case
@pytest.mark.parametrize("spec", SMALL)
@pytest.mark.parametrize("attention", ["flash", "unfused"])
@pytest.mark.parametrize(
    "form",
    [Form(tensor=2), Form(tensor=4, sequence_parallel=True), Form(context=2), Form(tensor=2, context=4)],
    ids=str,
)
def test_devices_share_the_arithmetic_without_repeating_any(spec: str, attention: str, form: Form) -> None:
    shaped = model(spec, "bfloat16")
    whole, share = (counts_of(shaped, each, attention=attention) for each in (Form(), form))
    assert share.blocks == whole.blocks
    for one, other in zip(whole.kinds, share.kinds, strict=True):
        assert one.name == other.name
        for part in ("forward", "backward", "backward_input"):
            all_of_it, own = (flops(getattr(kind.by_size[2], part)) for kind in (one, other))
            assert own * form.devices == all_of_it
    assert flops(whole.kinds[1].by_size[2].forward) > 0


@pytest.mark.parametrize("spec", SMALL)
def test_devices_hold_the_model_once_and_what_is_not_shared_once_each(spec: str) -> None:
    shaped = model(spec, "bfloat16")
    whole, share = (counts_of(shaped, form) for form in (Form(), Form(tensor=4)))
    shared: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "gate_proj",
        "up_proj",
        "o_proj.weight",
        "down_proj.weight",
    )
    shared += ("c_attn", "c_fc", "c_proj.weight", "qkv", "projection.weight", "mlp.up", "mlp.down.weight")
    block = shaped.chain.blocks[1]
    split = sum(p.numel() for name, p in block.named_parameters() if any(part in name for part in shared))
    assert share.kinds[1].parameters == whole.kinds[1].parameters - split + split // 4
    everywhere = sum(p.numel() for name, p in shaped.chain.blocks[0].named_parameters() if "position" in name)
    assert 4 * share.kinds[0].parameters == whole.kinds[0].parameters + 3 * everywhere


@pytest.mark.parametrize("spec", SMALL)
def test_a_layer_exchanges_what_megatron_does(spec: str) -> None:
    b, s, h, number = 2, 64, 64, 2
    whole_bytes = b * s * h * number
    shaped = model(spec, "bfloat16")
    plain = layer_of(shaped, Form(tensor=2))
    assert exchanged(plain.forward_collectives) == {("all-reduce", "tensor"): (2, whole_bytes)}
    assert exchanged(plain.backward_collectives) == {("all-reduce", "tensor"): (2, whole_bytes)}
    parallel = layer_of(shaped, Form(tensor=2, sequence_parallel=True))
    gathers, scatters = ("all-gather", "tensor"), ("reduce-scatter", "tensor")
    assert exchanged(parallel.forward_collectives) == {gathers: (2, whole_bytes), scatters: (2, whole_bytes)}
    # two gathers for the gradients, two of the inputs for the gradients of weights
    assert exchanged(parallel.backward_collectives) == {gathers: (4, whole_bytes), scatters: (2, whole_bytes)}
    assert (parallel.input_bytes, parallel.output_bytes) == (whole_bytes // 2, whole_bytes // 2)


@pytest.mark.parametrize("tensor", [1, 2])
def test_keys_and_values_pass_by_in_a_ring(tensor: int) -> None:
    b, s, kv_heads, width, number, c = 2, 64, 4, 8, 2, 4
    layer = layer_of(model(LLAMA, "bfloat16"), Form(tensor=tensor, context=c))
    others_bytes = 2 * b * s * (kv_heads // tensor) * width * number * (c - 1) // c
    assert exchanged(layer.forward_collectives)["ring", "context"] == (1, others_bytes)
    assert exchanged(layer.backward_collectives)["ring", "context"] == (1, 2 * others_bytes)
    kernel = next(operation for operation in layer.forward if "attention" in operation.name)
    assert kernel.sizes == MatrixSizes(batch=b * 8 // tensor, m=s // c, n=s, k=width) and kernel.causal


def test_a_device_keeps_its_own_keys_and_values_alone() -> None:
    shaped = model(LLAMA, "bfloat16")
    alone, of_four = (layer_of(shaped, form, s=32).activation_bytes for form in (Form(), Form(context=4)))
    state = 2 * 2 * 8  # flash attention keeps the state of its random numbers besides
    assert abs(of_four - alone / 4) < 2 * state


def test_the_vocabulary_is_shared_and_the_loss_exchanges_three_numbers_a_token() -> None:
    b, s, h, number = 2, 64, 64, 2
    embedding, _, head = (
        kind.by_size[b] for kind in counts_of(model(LLAMA, "bfloat16"), Form(tensor=4, sequence_parallel=True)).kinds
    )
    whole_bytes = b * s * h * number
    assert exchanged(embedding.forward_collectives) == {("reduce-scatter", "tensor"): (1, whole_bytes)}
    assert exchanged(embedding.backward_collectives) == {("all-gather", "tensor"): (1, whole_bytes)}
    assert exchanged(head.forward_collectives) == {
        ("all-gather", "tensor"): (1, whole_bytes),
        ("all-reduce", "tensor"): (3, b * s * 4),
    }
    assert head.output_bytes == b * s * (128 // 4) * number


def test_sizes_of_matrix_products_are_noted_wherever_there_is_arithmetic() -> None:
    b, s, h, ffn, t = 2, 64, 64, 96, 2
    layer = layer_of(model(LLAMA, "bfloat16"), Form(tensor=t))
    for operation in (*layer.forward, *layer.backward):
        sizes = operation.sizes
        assert (sizes is None) == (operation.flops == 0)
        if sizes is not None and operation.name == "mm":
            assert operation.flops == 2 * sizes.batch * sizes.m * sizes.n * sizes.k
    up = MatrixSizes(batch=1, m=b * s, n=ffn // t, k=h)
    assert [operation.sizes for operation in layer.forward].count(up) == 2  # gate and up


def test_the_workspace_holds_what_is_gathered_for_the_heads() -> None:
    b, s, h, number, vocabulary = 2, 64, 64, 2, 128
    t = 4
    head = counts_of(model(LLAMA, "bfloat16"), Form(tensor=t, sequence_parallel=True)).kinds[-1].by_size[b]
    gathered, logits = b * s * h * number, b * s * vocabulary * 4 // t  # float32
    assert head.workspace_bytes > max(gathered, logits)
    whole = counts_of(model(LLAMA, "bfloat16"), Form()).kinds[-1].by_size[b]
    assert head.workspace_bytes < whole.workspace_bytes


MIXTRAL = (
    "hf:mixtral?num_hidden_layers=2&hidden_size=64&num_attention_heads=8&num_key_value_heads=4&intermediate_size=96"
    "&num_local_experts=8&num_experts_per_tok=2&vocab_size=128&max_position_embeddings=64&sliding_window=null"
)
EXPERT_FORMS = [
    Form(expert=4),
    Form(context=2, expert=8),
    Form(tensor=2, sequence_parallel=True),
    Form(tensor=4, sequence_parallel=True, expert=2),
    Form(tensor=2, sequence_parallel=True, expert=4, expert_tensor=1),
    Form(tensor=4, sequence_parallel=True, expert_tensor=1),
]


@pytest.mark.each_case
@pytest.mark.parametrize("form", EXPERT_FORMS, ids=str)
def test_experts_are_shared_and_work_on_as_many_tokens_everywhere(form: Form) -> None:
    h, ffn, experts = 64, 96, 8
    shaped = model(MIXTRAL, "bfloat16")
    whole, share = (counts_of(shaped, each).kinds[1] for each in (Form(), form))
    assert whole.expert_parameters == experts * 3 * h * ffn
    assert share.expert_parameters * form.expert_devices == whole.expert_parameters
    assert whole.parameters == 3 * h * h + 2 * h + experts * h  # attention, norms and the router
    assert share.parameters == 3 * h * h // form.tensor + 2 * h + experts * h
    # copies of a stage trade tokens: each has as much to do as without
    assert flops(share.by_size[2].forward) * form.devices == flops(whole.by_size[2].forward)
    assert flops(share.by_size[2].backward) * form.devices == flops(whole.by_size[2].backward)


def test_balanced_experts_do_the_arithmetic_of_those_that_route() -> None:
    shaped = model(MIXTRAL, "bfloat16")
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    pair = (tokens, tokens)
    routed = count_blocks(shaped.mode, shaped.chain.blocks, default_loss, pair, floating=torch.bfloat16, gpu=True)[1]
    balanced = layer_of(shaped, Form())
    assert flops(balanced.forward) == flops(routed.forward) and flops(balanced.backward) == flops(routed.backward)
    b, s, h, k, ffn = 2, 64, 64, 2, 96
    experts = [o for o in balanced.forward if o.name == "bmm"]
    assert flops(experts) == 6 * k * b * s * h * ffn
    assert experts[0].sizes == MatrixSizes(batch=8, m=k * b * s // 8, n=2 * ffn, k=h)


@pytest.mark.parametrize("form", EXPERT_FORMS, ids=str)
def test_tokens_are_traded_to_their_experts_and_back(form: Form) -> None:
    b, s, h, k, number = 2, 64, 64, 2, 2
    layer = layer_of(model(MIXTRAL, "bfloat16"), form)
    rows_bytes = k * b * s * h * number // form.devices
    for collectives in (layer.forward_collectives, layer.backward_collectives):
        traded = [each for each in collectives if each.axis == "expert"]
        weights_bytes = rows_bytes // h  # one of the router's for each row
        there_and_back = [("all-to-all", 1, weights_bytes), ("all-to-all", 2, rows_bytes)] * (form.expert > 1)
        assert sorted((each.kind, each.count, each.size_bytes) for each in traded) == there_and_back
        cut = form.expert_tensor_degree > 1
        gathered = [each for each in collectives if each.size_bytes == rows_bytes * form.tensor and form.tensor > 1]
        assert len(gathered) == 2 * cut  # a gather and a scatter of what the experts work on


def test_exchanges_of_tokens_say_how_these_choose_their_experts() -> None:
    form = Form(tensor=2, sequence_parallel=True, expert=4, expert_tensor=1)
    layer = counts_of(model(SCALED["experts"], "bfloat16"), form).kinds[-2].by_size[2]
    for collectives in (layer.forward_collectives, layer.backward_collectives):
        traded = [each.routing for each in collectives if each.axis == "expert"]
        assert set(traded) == {Routing(experts=8, chosen=2, groups=2, chosen_groups=1)}


def test_tokens_that_experts_cannot_share_evenly_are_rounded_up() -> None:
    layer = layer_of(model(MIXTRAL, "bfloat16"), Form(), b=1, s=5)
    assert [o.sizes.m for o in layer.forward if o.name == "bmm" and o.sizes] == [2, 2]  # 10 choices of 8 experts


SCALED = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "experts": "hf:deepseek_v3?num_hidden_layers=2&first_k_dense_replace=1&hidden_size=32&num_attention_heads=4"
    "&num_key_value_heads=4&intermediate_size=48&moe_intermediate_size=16&vocab_size=64&q_lora_rank=12&kv_lora_rank=8"
    "&qk_rope_head_dim=4&qk_nope_head_dim=8&v_head_dim=8&n_routed_experts=8&num_experts_per_tok=2&n_group=2"
    "&topk_group=1",
    "sinks and windows": "hf:gpt_oss?num_hidden_layers=2&hidden_size=32&num_attention_heads=4&num_key_value_heads=2"
    "&head_dim=8&intermediate_size=16&vocab_size=64&num_local_experts=4&num_experts_per_tok=2&sliding_window=16",
}


@pytest.mark.each_case
@pytest.mark.parametrize("spec", SCALED.values(), ids=SCALED.keys())
@pytest.mark.parametrize("form", [Form(), Form(tensor=2, sequence_parallel=True)], ids=str)
def test_counts_that_are_scaled_are_those_that_would_be_counted(spec: str, form: Form) -> None:
    shaped, sizes = model(spec, "bfloat16"), (1, 2, 4, 8)
    together = count_form(shaped, form, microbatch_sizes=sizes, sequence_length=64)
    for size in sizes:
        alone = count_form(shaped, form, microbatch_sizes=(size,), sequence_length=64)
        assert [kind.by_size[size] for kind in alone.kinds] == [kind.by_size[size] for kind in together.kinds]


def test_sizes_that_are_on_no_line_are_counted() -> None:
    """Three tokens for eight experts are padded to eight, six too, and twelve to sixteen."""
    shaped = model(SCALED["experts"], "bfloat16")
    together = count_form(shaped, Form(), microbatch_sizes=(1, 2, 4, 8), sequence_length=3)
    alone = count_form(shaped, Form(), microbatch_sizes=(4,), sequence_length=3)
    assert [kind.by_size[4] for kind in alone.kinds] == [kind.by_size[4] for kind in together.kinds]


def test_equal_blocks_are_one_kind() -> None:
    found = counts_of(model(LLAMA, "bfloat16"), Form(tensor=2))
    assert found.blocks == (0, 1, 1, 1, 2)
    assert [kind.name for kind in found.kinds] == ["embedding", "layer.0", "head"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"form": Form(expert=2)}, "expert: must be 1 for a model without experts, got 2"),
        ({"attention": "quick"}, "attention: must be one of flash, unfused, got 'quick'"),
        ({"microbatch_sizes": ()}, "microbatch_sizes: must hold at least one size, got ()"),
        ({"microbatch_sizes": (1, 1)}, "microbatch_sizes: must not hold a size twice, got 1"),
        ({"sequence_length": 0}, "sequence_length: must be a whole number of at least 1, got 0"),
        (
            {"loss": mean_of_squares},
            "loss: must be cross entropy where the vocabulary is shared, got 'mean_of_squares'",
        ),
    ],
)
def test_what_is_not_possible_is_named(options: dict[str, Any], sentence: str) -> None:
    usual: dict[str, Any] = {"form": Form(tensor=2), "microbatch_sizes": (1,), "sequence_length": 64}
    with pytest.raises(InvalidInputError) as caught:
        count_form(model(LLAMA, "bfloat16"), **(usual | options))
    assert str(caught.value) == sentence


def test_a_model_that_is_no_language_model_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="model: must be a language model to be shared among devices"):
        shape_model("preset:mlp", "float32")


def test_frozen_parameters_are_counted_apart() -> None:
    shaped = shape_model("tests.worker_agent.profiler.factories:mostly_frozen_transformer", "bfloat16")
    whole, half = (counts_of(shaped, Form(tensor=degree), s=16) for degree in (1, 2))
    every, frozen, tied = (
        shaped.chain.weight_bytes(),
        shaped.chain.frozen_bytes(),
        shaped.chain.tied_weights(trained=False),
    )
    kinds = [whole.kinds[kind] for kind in whole.blocks]
    assert tuple(2 * kind.parameters for kind in kinds) == every
    assert tuple(2 * kind.frozen_parameters for kind in kinds) == frozen
    assert kinds[0].frozen_parameters == kinds[0].parameters
    assert kinds[-1].tied_parameters == kinds[-1].frozen_tied_parameters == tied[0].weight_bytes // 2
    assert kinds[1] != kinds[2] and 0 < kinds[2].frozen_parameters < kinds[2].parameters
    assert not kinds[1].by_size[2].backward  # nothing before the last layer is trained
    assert kinds[2].by_size[2].backward
    assert half.kinds[0].frozen_parameters < whole.kinds[0].frozen_parameters
