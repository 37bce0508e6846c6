"""Fused kernels: what a layer launches, moves and keeps where elementwise operations are computed together."""

from dataclasses import replace

import pytest

from pipeplan.documents.forms import WHOLE, Form
from worker_agent.profiler.counts import BlockCounts
from worker_agent.profiler.fusion import fused
from worker_agent.profiler.operations import DeviceOperation, Traffic
from worker_agent.profiler.sharded import count_form, shape_model

HIDDEN, FFN, HEADS, TOKENS = 96, 192, 12, 64
SIZES = (
    f"num_hidden_layers=2&hidden_size={HIDDEN}&intermediate_size={FFN}&num_attention_heads={HEADS}"
    f"&num_key_value_heads={HEADS}&vocab_size=96&max_position_embeddings=64"
)
LLAMA = f"hf:llama?{SIZES}"


def layer(spec: str = LLAMA, form: Form = WHOLE, *, fusion: str = "all") -> BlockCounts:
    model = shape_model(spec, "bfloat16")
    counts = count_form(model, form, microbatch_sizes=(1,), sequence_length=TOKENS, fusion=fusion)
    return counts.kinds[counts.blocks[1]].by_size[1]


def names(operations: tuple[DeviceOperation, ...]) -> list[str]:
    return [op.name.strip("_") for op in operations]


FLASH = "scaled_dot_product_flash_attention"


def test_a_layer_is_its_products_attention_and_a_kernel_between_them() -> None:
    counts = layer()
    assert names(counts.forward) == [
        *("fused", "mm", "mm", "mm", "fused", FLASH, "mm"),
        *("fused", "mm", "mm", "fused", "mm", "fused"),
    ]
    eager = layer(fusion="none")
    for one, other in ((counts.forward, eager.forward), (counts.backward, eager.backward)):
        assert [op.sizes for op in one if op.flops] == [op.sizes for op in other if op.flops]
        assert sum(op.moved_bytes for op in one) < sum(op.moved_bytes for op in other)
        assert len(one) < len(other) / 3


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_layer_keeps_what_its_products_read_and_its_sums(tensor: int) -> None:
    """Norms, queries, keys, values, attention, the sum, gate, up and their product, in 2 bytes each."""
    counts = layer(form=Form(tensor=tensor, sequence_parallel=tensor > 1))
    widths = 2 * HIDDEN + 3 * HIDDEN + HIDDEN + HIDDEN + 3 * FFN
    statistics = TOKENS * HEADS * 4 // tensor  # of attention's rows
    least = 2 * TOKENS * widths // tensor + statistics
    angles = 2 * 2 * TOKENS * HIDDEN // HEADS  # cosines and sines, which all devices have
    assert least <= counts.activation_bytes <= least + angles + 64


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_other_families_layers_are_fused_as_well(family: str) -> None:
    counts, eager = layer(f"hf:{family}?{SIZES}&head_dim=8"), layer(f"hf:{family}?{SIZES}&head_dim=8", fusion="none")
    assert len(counts.forward) <= 20 < len(eager.forward)
    assert counts.activation_bytes < eager.activation_bytes
    assert [op.sizes for op in counts.backward if op.flops] == [op.sizes for op in eager.backward if op.flops]


def test_the_backward_of_inputs_is_fused_and_a_part_of_the_backward() -> None:
    counts = layer()
    assert 0 < len(counts.backward_input) < len(counts.backward)
    assert sum(op.moved_bytes for op in counts.backward_input) < sum(op.moved_bytes for op in counts.backward)


ELEMENTS = DeviceOperation(name="add", flops=0, dtype="bfloat16", moved_bytes=0)
PRODUCT = replace(ELEMENTS, name="mm", flops=1)


def elementwise(reads: dict[int, int], writes: dict[int, int]) -> Traffic:
    return Traffic(operation=ELEMENTS, reads=reads, writes=writes, fuses=True)


def product(reads: dict[int, int], writes: dict[int, int]) -> Traffic:
    return Traffic(operation=PRODUCT, reads=reads, writes=writes, fuses=False)


def test_a_kernel_reads_once_and_writes_what_others_need() -> None:
    """1 -> 2 -> 3 -> product -> 4: the second is nobody else's."""
    first = [elementwise({1: 10}, {2: 20}), elementwise({2: 20, 1: 10}, {3: 30}), product({3: 30}, {4: 40})]
    found = fused(first, [], saved={}, sent={1, 4})
    assert [(op.name, op.moved_bytes) for op in found.forward] == [("fused", 40), ("mm", 0)]


def test_the_backward_computes_again_what_no_product_reads() -> None:
    """1 -> 2 -> 3 -> product; the backward reads 2, which it makes of 1."""
    first = [elementwise({1: 10}, {2: 20}), elementwise({2: 20}, {3: 30}), product({3: 30}, {4: 40})]
    second = [product({5: 40, 3: 30}, {6: 60}), elementwise({6: 60, 2: 20}, {7: 70})]
    found = fused(first, second, saved={2: 20, 3: 30}, sent={1, 4, 7})
    assert (set(found.dropped), dict(found.added)) == ({2}, {})
    assert [op.moved_bytes for op in found.backward] == [0, 60 + 10 + 70]


def test_what_is_computed_again_keeps_what_it_is_made_of() -> None:
    """A product's result of which nothing was kept before."""
    first = [product({1: 10}, {2: 20}), elementwise({2: 20}, {3: 30}), product({3: 30}, {4: 40})]
    second = [product({5: 40}, {6: 60}), elementwise({6: 60, 3: 30}, {7: 70})]
    found = fused(first, second, saved={3: 30}, sent={1, 4, 7})
    assert (set(found.dropped), dict(found.added)) == (set(), {}), "a product reads it: it is written, and kept"
    eager = [product({1: 10}, {2: 20}), elementwise({2: 20}, {3: 30}), elementwise({3: 30}, {4: 40})]
    found = fused(eager, [elementwise({5: 40, 3: 30}, {7: 70})], saved={3: 30}, sent={1, 4, 7})
    assert (set(found.dropped), dict(found.added)) == ({3}, {2: 20})


def test_a_result_to_which_many_ways_lead_is_computed_again_once() -> None:
    """Two results that both take both of the step before: 2 ** 60 ways, which were all gone. And one in its place."""
    steps = [elementwise({2 * i: 10, 2 * i + 1: 10}, {2 * i + side: 10}) for i in range(1, 61) for side in (2, 3)]
    first = [elementwise({1: 10}, {2: 10}), elementwise({2: 10}, {2: 10}), elementwise({1: 10}, {3: 10}), *steps]
    found = fused(first, [elementwise({200: 10, 122: 10, 123: 10}, {201: 10})], saved={122: 10, 123: 10}, sent={1, 201})
    assert [op.moved_bytes for op in found.backward] == [10 + 10 + 10]


def test_an_operation_joins_the_only_kernel_that_takes_its_result() -> None:
    """As the activation of a gate, after which another product comes first."""
    first = [
        product({1: 10}, {2: 20}),
        elementwise({2: 20}, {3: 30}),
        product({1: 10}, {4: 20}),
        elementwise({3: 30, 4: 20}, {5: 50}),
        product({5: 50}, {6: 60}),
    ]
    found = fused(first, [], saved={}, sent={1, 6})
    assert [op.name for op in found.forward] == ["mm", "mm", "fused", "mm"]
    assert found.forward[2].moved_bytes == 20 + 20 + 50


def test_a_gradient_of_weights_is_added_inside_its_product() -> None:
    """The product reads and writes the gradient 1, and no operation adds to it."""
    second = [product({2: 20, 3: 30}, {4: 40}), elementwise({1: 40, 4: 40}, {1: 40}), elementwise({4: 1}, {5: 1})]
    assert len(fused([], second, saved={}, sent={1, 5}).backward) == 2, "another kernel reads the product's result"
    found = fused([], second[:2], saved={}, sent={1})
    assert [(op.name, op.moved_bytes) for op in found.backward] == [("mm", 40)]


def test_the_workspace_is_what_kernels_write_for_later_ones_less_what_they_were_last_to_need() -> None:
    """6 and 8 are alive together in the backward; 2 is kept from the forward, and gone once 6 is made."""
    first = [product({1: 10}, {2: 20}), product({2: 20}, {3: 30}), product({3: 30}, {4: 40})]
    second = [product({5: 40, 2: 20}, {6: 60}), product({5: 40}, {8: 80}), product({6: 60, 8: 80}, {7: 70})]
    assert fused(first, [], saved={2: 20}, sent={1, 4}).workspace_bytes == 30
    assert fused(first, second, saved={2: 20}, sent={1, 4, 5, 7}).workspace_bytes == 60 + 80 - 20


def test_a_fused_loss_keeps_logits_in_16_bits_and_no_copies_of_32() -> None:
    def head(fusion: str) -> BlockCounts:
        model = shape_model(LLAMA, "bfloat16")
        counts = count_form(model, WHOLE, microbatch_sizes=(1,), sequence_length=TOKENS, fusion=fusion)
        return counts.kinds[counts.blocks[-1]].by_size[1]

    logits, norm = TOKENS * 96, 2 * TOKENS * HIDDEN
    assert head("none").activation_bytes >= 4 * logits
    assert 2 * logits + norm <= head("all").activation_bytes <= 2 * logits + norm + 16 * TOKENS
    assert head("all").workspace_bytes < head("none").workspace_bytes
    assert head("loss") == head("all")
    assert layer(fusion="loss") == layer(fusion="none")
