"""Block times: what is timed, in which order, and with which gradients in place."""

from typing import NoReturn

import torch
from torch import nn

from tests.worker_agent.profiler.clocks import SquaresClock
from worker_agent.models.chain import build_model
from worker_agent.models.data import Microbatch, open_data
from worker_agent.models.losses import default_loss
from worker_agent.profiler.times import (
    BlockTimes,
    measure_times,
    measure_version_s_per_byte,
    measure_without_graph,
    sampled,
)

CHAIN = "worker_agent.models.presets:mlp?width=4&depth=3"
DATA = "worker_agent.models.presets:regression?width=4"


def test_every_piece_of_a_round_is_timed_once_in_the_order_of_execution() -> None:
    # piece:  F0 F1 F2 B2 B1 B0
    # takes:   1  5  9 13 17 21
    times = measure_times(
        build_model(CHAIN, seed=0).blocks,
        default_loss,
        open_data(DATA, microbatch_size=2, seed=0).microbatch,
        warm_up_rounds=0,
        rounds=2,
        make_clock=SquaresClock,
        before_round=lambda number: None,
    )
    assert times == (
        BlockTimes(forward_s=(1, 1), backward_s=(21, 21)),
        BlockTimes(forward_s=(5, 5), backward_s=(17, 17)),
        BlockTimes(forward_s=(9, 9), backward_s=(13, 13)),
    )


def test_warm_up_rounds_run_but_do_not_count_and_every_round_has_its_own_microbatch() -> None:
    read: list[int] = []
    waited: list[int] = []
    source = open_data(DATA, microbatch_size=2, seed=0)

    def microbatch(index: int) -> Microbatch:
        read.append(index)
        return source.microbatch(index)

    times = measure_times(
        build_model(CHAIN, seed=0).blocks,
        default_loss,
        microbatch,
        warm_up_rounds=2,
        rounds=3,
        make_clock=SquaresClock,
        before_round=waited.append,
    )
    assert read == waited == [0, 1, 2, 3, 4]
    assert {len(block.forward_s) for block in times} == {3}


def test_backwards_add_to_gradients_that_stay_where_they_are() -> None:
    chain = build_model(CHAIN, seed=0)
    addresses: list[list[int]] = []

    def before_round(number: int) -> None:
        gradients = [p.grad for p in chain.root.parameters() if p.grad is not None]
        assert len(gradients) == 6 and not any(g.any() for g in gradients)
        addresses.append([g.data_ptr() for g in gradients])

    measure_times(
        chain.blocks,
        default_loss,
        open_data(DATA, microbatch_size=2, seed=0).microbatch,
        warm_up_rounds=1,
        rounds=2,
        make_clock=SquaresClock,
        before_round=before_round,
    )
    assert addresses[0] == addresses[1] == addresses[2]


def test_a_model_without_weights_copies_no_version() -> None:
    def never(anything: object) -> NoReturn:
        raise AssertionError

    assert measure_version_s_per_byte([], rounds=1, make_clock=SquaresClock, before_copy=never) == 0.0


def test_a_weight_version_costs_the_seconds_of_its_copy_by_byte_and_changes_nothing() -> None:
    weights = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(7))]
    seconds_by_byte = measure_version_s_per_byte(
        weights, rounds=3, make_clock=SquaresClock, before_copy=lambda number: None
    )
    assert seconds_by_byte == 1 / (12 * 4)
    assert all(bool((weight == 1).all()) for weight in weights)


def test_a_sample_of_tensors_ends_before_it_is_too_large_but_is_never_empty() -> None:
    huge, small = torch.empty(2**28, device="meta"), torch.empty(5)
    assert sampled([huge, small]) == [huge]
    assert sampled([small, huge]) == [small]
    assert sampled([]) == []


def test_a_forward_without_a_graph_is_timed_as_a_whole_and_touches_no_gradient() -> None:
    blocks = build_model(CHAIN, seed=0).blocks
    graphs: list[bool] = []
    blocks[0].register_forward_hook(lambda module, inputs, output: graphs.append(output.requires_grad))
    seconds = measure_without_graph(
        blocks,
        default_loss,
        open_data(DATA, microbatch_size=2, seed=0).microbatch,
        rounds=2,
        make_clock=SquaresClock,
    )
    assert seconds == (1.0, 1.0)
    assert graphs == [False, False, False]  # the first warms up
    assert all(parameter.grad is None for block in blocks for parameter in block.parameters())
