"""Bytes of a parameter by engine and sharding, as their authors publish them for Adam in mixed precision."""

import pytest

from pipeplan.costs.ledger import ledger
from pipeplan.documents.engines import ENGINES

D = 64


@pytest.mark.parametrize(
    ("engine", "sharding", "published"),
    [
        ("megatron", "none", 18),  # Megatron-LM, documentation of the distributed optimizer
        ("megatron", "optimizer", 6 + 12 / D),
        ("deepspeed", "none", 16),  # Rajbhandari et al. 2020, figure 1, K = 12
        ("deepspeed", "optimizer", 8 + 12 / D),  # 4 of them the sums of `BF16_Optimizer`
        ("deepspeed", "gradients", 2 + 14 / D),
        ("deepspeed", "weights", 16 / D),
        ("fsdp", "weights", 16 / D),  # Zhao et al. 2023, section 4.4
        ("fsdp", "gradients", 2 + 16 / D),
        ("pipeplan", "none", 18),
    ],
)
def test_adam_in_16_bits(engine: str, sharding: str, published: float) -> None:
    assert ledger(engine, sharding, dtype="bfloat16", optimizer="adamw", replicas=D).kept == pytest.approx(published)


def test_deepspeed_keeps_gradients_of_float16_as_the_weights_are() -> None:
    """Rajbhandari et al. 2020, figure 1, K = 12."""
    for sharding, published in (("none", 16), ("optimizer", 4 + 12 / D)):
        kept = ledger("deepspeed", sharding, dtype="float16", optimizer="adamw", replicas=D)
        assert kept.kept == pytest.approx(published) and kept.exchanged == 2


def test_deepspeed_exchanges_the_sums_of_bfloat16_where_it_has_them() -> None:
    """`runtime/engine.py` of 0.19.5: with ZeRO-1 alone, and not with the optimizer on the host."""
    for sharding, on_host, exchanged in (("none", False, 2), ("optimizer", False, 4), ("optimizer", True, 2)):
        kept = ledger("deepspeed", sharding, dtype="bfloat16", optimizer="adamw", replicas=D, optimizer_on_host=on_host)
        assert kept.exchanged == exchanged


@pytest.mark.parametrize(
    ("engine", "sharding", "left"),
    [
        ("megatron", "optimizer", 6),
        ("deepspeed", "optimizer", 4),
        ("deepspeed", "gradients", 2),  # Ren et al. 2021, section 4.1: the 16-bit weights alone
        ("deepspeed", "weights", 2 / D),
        ("fsdp", "gradients", 2),
        ("fsdp", "weights", 0),
    ],
)
def test_with_adam_on_the_host_its_weights_and_states_leave_the_device(engine: str, sharding: str, left: float) -> None:
    kept = ledger(engine, sharding, dtype="bfloat16", optimizer="adam", replicas=D, optimizer_on_host=True)
    assert kept.kept == pytest.approx(left)
    assert kept.host == pytest.approx(16 / D)  # weights, gradients and two states in float32


def test_a_gradient_crosses_once_and_so_does_a_weight() -> None:
    """Ren et al. 2021, section 4.1: 2 bytes of a gradient down, 2 of a weight up; the update uses 30 of the memory."""
    with_backward = ledger(
        "deepspeed", "gradients", dtype="float16", optimizer="adam", replicas=1, optimizer_on_host=True
    )
    assert (with_backward.gradient_down, with_backward.update_link, with_backward.update_host) == (2, 2, 30)
    with_update = ledger("megatron", "optimizer", dtype="float16", optimizer="adam", replicas=1, optimizer_on_host=True)
    assert (with_update.gradient_down, with_update.update_link, with_update.update_host) == (0, 4 + 2, 30)


@pytest.mark.parametrize("engine", ENGINES)
def test_sharding_more_keeps_less(engine: str) -> None:
    kept = [
        ledger(engine, sharding, dtype="float16", optimizer="adam", replicas=8).kept
        for sharding in ENGINES[engine].shardings
    ]
    assert kept == sorted(kept, reverse=True)


def test_one_replica_shares_nothing_out() -> None:
    whole = ledger("deepspeed", "none", dtype="float32", optimizer="sgd", replicas=1)
    assert whole.kept == 8
    assert ledger("deepspeed", "weights", dtype="float32", optimizer="sgd", replicas=1).kept == whole.kept
