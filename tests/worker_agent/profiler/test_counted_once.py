"""Counts that are found in quick ways equal those of the whole way."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeplan.documents.forms import Form
from worker_agent.models.chain import build_model
from worker_agent.models.losses import default_loss
from worker_agent.profiler.counts import BlockRun, build_shapes, count_blocks
from worker_agent.profiler.sharded import count_form, shape_model

EXPERTS = (
    "hf:deepseek_v3?num_hidden_layers=3&first_k_dense_replace=1&hidden_size=32&num_attention_heads=4"
    "&num_key_value_heads=4&intermediate_size=48&moe_intermediate_size=16&vocab_size=64&q_lora_rank=12&kv_lora_rank=8"
    "&qk_rope_head_dim=4&qk_nope_head_dim=8&v_head_dim=8&n_routed_experts=8&num_experts_per_tok=2&n_group=2"
    "&topk_group=1"
)
SPECS = {
    "tied": "hf:llama?num_hidden_layers=3&hidden_size=64&num_attention_heads=8&num_key_value_heads=4"
    "&intermediate_size=96&vocab_size=128&tie_word_embeddings=true",
    "windows": "hf:gemma3_text?num_hidden_layers=7&hidden_size=64&num_attention_heads=4&num_key_value_heads=2"
    "&head_dim=16&intermediate_size=96&vocab_size=128&sliding_window=32",
    "latents and dense layers": EXPERTS.replace("n_routed_experts=8", "n_routed_experts=4"),
    "state spaces": "hf:mamba2?num_hidden_layers=2&hidden_size=64&vocab_size=128&num_heads=8&head_dim=16&state_size=16",
}
TOKENS = torch.zeros(2, 64, dtype=torch.int64)


@pytest.mark.each_case
@pytest.mark.parametrize("name", ["tied", "windows", "state spaces"])  # the library routes by type of device
def test_counts_on_the_meta_device_are_those_of_fake_tensors(name: str) -> None:
    spec = SPECS[name]
    fake = FakeTensorMode()
    with fake:
        whole = build_model(spec, seed=0, dtype=torch.bfloat16, fused=True)
    chain, mode = build_shapes(spec, torch.bfloat16, gpu=True, fused=True)
    assert all(parameter.is_meta for parameter in chain.root.parameters())
    slow, quick = (
        count_blocks(each, blocks, default_loss, (TOKENS, TOKENS), floating=torch.bfloat16, gpu=True)
        for each, blocks in ((fake, whole.blocks), (mode, chain.blocks))
    )
    assert quick == slow
    assert (chain.weight_bytes(), chain.tied_weights()) == (whole.weight_bytes(), whole.tied_weights())


@pytest.mark.each_case
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("fused", [True, False])
def test_the_backward_for_inputs_is_that_of_frozen_weights(spec: str, fused: bool) -> None:
    shaped = shape_model(spec, "bfloat16")
    hidden = int(shaped.chain.root.config.hidden_size)  # type: ignore[union-attr,arg-type]
    layer = shaped.chain.blocks[1]
    with shaped.mode:
        values = (torch.empty(2, 64, hidden, dtype=torch.bfloat16),)
        trained, _ = BlockRun(block=layer, inputs=values, graded=True, end=None, gpu=True, fused=fused).count()
        frozen, _ = BlockRun(
            block=layer.requires_grad_(False), inputs=values, graded=True, end=None, gpu=True, fused=fused
        ).count()
    # torch multiplies by a frozen weight sequence by sequence where the input is not contiguous
    ours, theirs = ([(op.flops, op.moved_bytes) for op in each] for each in (trained.backward_input, frozen.backward))
    assert ours == theirs
    assert len(trained.backward) > len(frozen.backward)


def test_blocks_without_experts_are_counted_once_for_all_expert_degrees() -> None:
    sizes, form = (1, 2, 4, 8), Form(tensor=2, sequence_parallel=True)
    shaped = shape_model(EXPERTS, "bfloat16")
    alone = count_form(shaped, form, microbatch_sizes=sizes, sequence_length=64)
    known = sum(map(len, shaped.known.values()))
    together = [
        count_form(shaped, replace(form, expert=expert), microbatch_sizes=sizes, sequence_length=64)
        for expert in (2, 4, 1)
    ]
    assert together[-1] == alone
    assert 0 < sum(map(len, shaped.known.values())) - known < known  # only the layers with experts are new
    fresh = shape_model(EXPERTS, "bfloat16")
    assert together[0] == count_form(fresh, together[0].form, microbatch_sizes=sizes, sequence_length=64)


@pytest.mark.parametrize("own", [None, 1])
@pytest.mark.parametrize("length", [64, 63])  # of 63 tokens, experts' rows are padded
def test_experts_between_two_degrees_are_those_that_would_be_counted(length: int, own: int | None) -> None:
    spec, sizes = EXPERTS.replace("n_routed_experts=8", "n_routed_experts=32"), (1, 2, 4, 8)
    form = Form(tensor=1) if length % 2 else Form(tensor=2, sequence_parallel=True, expert_tensor=own)
    shaped = shape_model(spec, "bfloat16")
    for expert in (1, 2, 4, 32, 8, 16):
        each = replace(form, expert=expert)
        together, alone = (
            count_form(model, each, microbatch_sizes=sizes, sequence_length=length)
            for model in (shaped, shape_model(spec, "bfloat16"))
        )
        assert together == alone
