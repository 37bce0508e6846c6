"""Kernels: what the size of an operation does to its time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.errors import InvalidInputError
from worker_agent.profiler.datasheets import DATASHEETS, FLOAT8
from worker_agent.profiler.kernels import Kernels, duration_s
from worker_agent.profiler.operations import DeviceOperation, MatrixSizes, OperationRecorder

A100 = DATASHEETS["a100-80gb"]
QUICK_MEMORY = replace(A100, memory_bandwidth_bytes_per_s=1e24, kernel_s=0.0, sustained=1.0)
"""So much bandwidth that arithmetic alone takes time."""

SHARES = A100.product_shares("bfloat16")
REACHED = 312e12 * SHARES.efficiency

sides = st.integers(1, 40_000)


def product(m: int, n: int, k: int, *, batch: int = 1, dtype: str = "bfloat16") -> DeviceOperation:
    moved = 2 * batch * (m * k + k * n + m * n)
    sizes = MatrixSizes(batch=batch, m=m, n=n, k=k)
    return DeviceOperation(name="mm", flops=2 * batch * m * n * k, dtype=dtype, moved_bytes=moved, sizes=sizes)


def attention(*, causal: bool, backward: bool = False) -> DeviceOperation:
    name = "_scaled_dot_product_flash_attention" + "_backward" * backward
    sizes = MatrixSizes(batch=32, m=4096, n=4096, k=128)
    return DeviceOperation(name=name, flops=10**12, dtype="bfloat16", moved_bytes=1, sizes=sizes, causal=causal)


def seconds(op: DeviceOperation) -> float:
    return float(Kernels.of([op]).seconds(QUICK_MEMORY)[0])


@given(sides, sides, sides, st.integers(1, 64))
def test_no_product_is_above_the_share_of_the_peak(m: int, n: int, k: int, batch: int) -> None:
    op = product(m, n, k, batch=batch)
    assert seconds(op) >= op.flops / (REACHED)


@given(sides, sides, sides, st.integers(1, 64))
def test_a_larger_product_takes_no_less_time(m: int, n: int, k: int, batch: int) -> None:
    least = seconds(product(m, n, k, batch=batch))
    for larger in (product(m + 1, n, k, batch=batch), product(m, n + 1, k, batch=batch), product(m, n, 2 * k)):
        if larger.sizes is not None and larger.sizes.batch == batch:
            assert seconds(larger) >= least * (1 - 1e-12)


@given(sides, sides, sides)
def test_rows_and_columns_count_alike(m: int, n: int, k: int) -> None:
    assert seconds(product(m, n, k)) == pytest.approx(seconds(product(n, m, k)))


def test_one_tile_too_many_takes_another_wave() -> None:
    # 108 multiprocessors: 9 x 12 tiles of 256 x 128 fill them once
    full, more = product(9 * 256, 12 * 128, 65536), product(9 * 256 + 1, 12 * 128, 65536)
    whole_s = 2 * 108 * 256 * 128 * (65536 + SHARES.start_depth) / REACHED
    assert seconds(full) == pytest.approx(whole_s)
    assert seconds(more) > 1.1 * seconds(full)


def test_a_deep_product_of_one_tile_is_shared_out() -> None:
    alone_s = 2 * 108 * 256 * 128 * (65536 + SHARES.start_depth) / REACHED
    assert seconds(product(256, 128, 65536)) < 0.3 * alone_s


def test_large_products_come_near_the_share_and_small_ones_do_not() -> None:
    large, small = product(16384, 16384, 16384), product(512, 512, 512)
    assert large.flops / seconds(large) > 0.95 * REACHED
    assert small.flops / duration_s([small], replace(A100, launch_s=0.0)) < 0.2 * REACHED


@given(sides, sides, sides, st.integers(1, 64))
def test_a_product_copied_in_parts_is_slower_by_at_most_the_share_of_the_tensor_cores(
    m: int, n: int, k: int, batch: int
) -> None:
    aligned = product(m, n, k, batch=batch)
    # NVIDIA A100 whitepaper (2020), table 1: 312 Tflop/s in tensor cores, 78 without
    for copied_bytes, slower in ((8, 2), (4, 4), (2, 312 / 78)):
        assert seconds(replace(aligned, copied_bytes=copied_bytes)) == pytest.approx(seconds(aligned) * slower)


@pytest.mark.parametrize(("vocabulary", "dtype", "copied_bytes"), [
    #                                 forward, of the logits' gradients: for the input, for the weights
    (50257, torch.bfloat16, [16, 2, 2]),
    (50258, torch.bfloat16, [16, 4, 4]),
    (50260, torch.bfloat16, [16, 8, 8]),
    (50264, torch.bfloat16, [16, 16, 16]),
    (50257, torch.float32, [16, 16, 16]),
])  # fmt: skip
def test_rows_are_copied_by_the_bytes_of_which_all_start_at_a_multiple(
    vocabulary: int, dtype: torch.dtype, copied_bytes: list[int]
) -> None:
    hidden = torch.empty(8, 64, dtype=dtype, device="meta", requires_grad=True)
    weights = torch.empty(vocabulary, 64, dtype=dtype, device="meta", requires_grad=True)
    with OperationRecorder() as recorder:
        logits = torch.nn.functional.linear(hidden, weights)
        torch.autograd.grad(logits, (hidden, weights), torch.empty_like(logits))
    operations = [each.operation for each in recorder.traffic]
    assert [op.copied_bytes for op in operations if op.sizes is not None] == copied_bytes


def test_attention_has_a_rate_of_its_own_and_skips_later_positions() -> None:
    start_s = A100.attention_start_s
    whole_s = 10**12 / (312e12 * A100.attention_efficiency * 4096 / (4096 + A100.attention_half_length))
    assert seconds(attention(causal=False)) == pytest.approx(whole_s + start_s)
    assert seconds(attention(causal=True)) == pytest.approx(whole_s / 2 + start_s)
    assert seconds(attention(causal=True, backward=True)) == pytest.approx(1.2 * whole_s / 2 + start_s)


def test_attention_to_more_keys_reaches_more_of_the_peak() -> None:
    def of_length(keys: int) -> float:
        whole = attention(causal=True)
        assert whole.sizes is not None
        return seconds(replace(whole, sizes=replace(whole.sizes, n=keys))) - A100.attention_start_s

    half = int(A100.attention_half_length)
    assert of_length(half) == pytest.approx(2 * of_length(10**9), rel=1e-3)
    assert of_length(1024) > of_length(2048) > of_length(8192)


def test_a_long_job_is_slower_than_single_kernels() -> None:
    ops = [product(4096, 4096, 4096), attention(causal=True)]
    alone, sustained = (Kernels.of(ops).seconds(replace(A100, sustained=share, kernel_s=0.0)) for share in (1.0, 0.8))
    np.testing.assert_allclose((sustained - [0.0, A100.attention_start_s]) * 0.8, alone - [0.0, A100.attention_start_s])


def test_eight_bits_take_half_the_time_and_need_a_datasheet_that_has_them() -> None:
    quick = replace(DATASHEETS["h100-sxm"], memory_bandwidth_bytes_per_s=1e24, kernel_s=0.0)
    wide, narrow = product(8192, 8192, 8192), product(8192, 8192, 8192, dtype=FLOAT8)
    of_wide, of_narrow = Kernels.of([wide, narrow]).seconds(quick)
    shares = (quick.product_shares("bfloat16"), quick.product_shares(FLOAT8))
    reached = [peak * each.efficiency for peak, each in zip((989.4e12, 1978.9e12), shares, strict=True)]
    assert of_narrow / of_wide == pytest.approx(reached[0] / reached[1], rel=0.02)
    with pytest.raises(InvalidInputError, match=FLOAT8):
        duration_s([narrow], A100)


@given(st.lists(st.builds(product, sides, sides, sides), max_size=5))
def test_operations_of_a_list_take_what_each_takes_alone(operations: list[DeviceOperation]) -> None:
    alone = [float(Kernels.of([op]).seconds(A100)[0]) for op in operations]
    np.testing.assert_allclose(Kernels.of(operations).seconds(A100), alone)
