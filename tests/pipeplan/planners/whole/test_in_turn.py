"""Stages beside slow links, and batches of which one stands for all."""

import random
from dataclasses import replace
from itertools import combinations, islice
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.plan import Plan
from pipeplan.planners.batches import first_rank_ends_last, one_pipeline, played_batches
from pipeplan.planners.complete import play, same_play
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.planners.whole.planner import whole_space
from pipeplan.planners.whole.split import least_longest
from pipeplan.programs.timeline import batch_ends_s
from tests.pipeplan.model_forms import transformer
from tests.properties import examples


def asked_of(layers: int, servers: int, network: float, memory: float, engine: str, **fixed: Any) -> PlanningProblem:
    held = transformer(layers=layers, hidden=1024, heads=16, sequence=512, vocabulary=4096, tensors=(1, 2), sizes=(1,))
    levels = (
        Level(size=4, bandwidth_bytes_per_s=200e9, latency_s=2e-6),
        Level(size=servers, bandwidth_bytes_per_s=network, latency_s=1e-5),
    )
    machines = Cluster(device=replace(held.device, memory_bytes=int(memory * 2**30)), levels=levels)
    options = Options(optimizer="adam", engine=engine, **fixed)
    return PlanningProblem(profile=held, cluster=machines, batch_size=16, options=options)


problems = st.builds(
    asked_of,
    st.integers(2, 9),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1e8, 1e9, 2e10]),
    st.sampled_from([0.6, 1.5, 80.0]),
    st.sampled_from(["megatron", "deepspeed", "fsdp"]),
)


def test_neighbours_with_a_slow_link_between_them_have_fewer_blocks() -> None:
    """Four ranks on two servers."""
    space, _ = whole_space(asked_of(18, 2, 5e9, 80.0, "megatron", tensor=2, stages=4, chunks=1, recompute=False))
    placed = next(each for each in space.likely() if each.inside == 1)  # 439 us there and back; a rank computes for 788
    first, *others = placed.splits()
    blocks = np.diff(first, prepend=0).tolist()
    assert blocks[1] + blocks[2] < blocks[0] + blocks[3]
    known = space.maker(placed.degrees).splitter.several
    assert first not in known and set(known) <= set(others)
    rates = []
    for stops in (first, max(known, key=placed.most_of)):
        plan = placed.plan(stops)
        simulated = None if plan is None else play(plan)
        assert simulated is not None
        rates.append(simulated.throughput_samples_per_s)
    assert rates[0] > 1.05 * rates[1]


@examples(6)
@given(problems)
def test_a_stage_ends_where_its_memory_does(asked: PlanningProblem) -> None:
    space, _ = whole_space(asked)
    for placed in islice((each for each in space.likely() if each.degrees.chunks == 1), 12):
        splitter, depth = space.maker(placed.degrees).splitter, placed.degrees.pipeline
        blocks = len(asked.profile.blocks)
        for rank, fits in enumerate(splitter.stages_fit(blocks + 1 - depth).tolist()):
            for start, stop in combinations(range(rank, blocks - depth + rank + 2), 2):
                if (rank == 0 < start) or (rank == depth - 1 and stop < blocks):
                    continue
                stops = (
                    *range(1, rank),
                    *([start] if rank else []),
                    stop,
                    *range(blocks - depth + rank + 2, blocks + 1),
                )
                held = splitter.by_rank(stops)[rank]
                assert (held <= splitter.device_bytes) == fits[start - rank][stop - start - 1]


@examples(40)
@given(st.integers(1, 4), st.integers(0, 4), st.randoms(use_true_random=False))
def test_no_split_has_a_shorter_longest_stage_or_a_more_even_one_of_the_same(
    stages: int, more: int, drawn: random.Random
) -> None:
    places = more + 1
    reach = drawn.randint(1, places)
    cost_s = np.asarray([[[drawn.choice([1.0, 2.0, 3.0, inf]) for _ in range(reach)] for _ in range(places)]] * stages)
    step_s = np.asarray([[[drawn.random() for _ in range(reach)] for _ in range(places)]] * stages)
    every = {}
    for cuts in combinations(range(1, stages + more), stages - 1):
        stops = (*cuts, stages + more)
        at = [(r, a - r, b - a - 1) for r, (a, b) in enumerate(zip((0, *stops), stops, strict=False))]
        if all(length < reach for _, _, length in at):
            every[stops] = max(cost_s[each] for each in at), sum(step_s[each] ** 2 for each in at)
    longest_s, squares = min(every.values(), default=(inf, 0.0))
    ends = np.add.outer(np.arange(places), np.arange(reach)).astype(np.float64)
    found, least_s = least_longest(cost_s, [step_s**2, np.asarray([-ends] * stages)])
    assert least_s == longest_s
    if found:
        assert [every[each][0] for each in found] == [longest_s] * 2
        assert every[found[0]][1] == pytest.approx(squares)
        assert sum(found[1]) == max(sum(stops) for stops in every if every[stops][0] == longest_s)


@examples(6)
@given(problems)
def test_one_batch_says_what_two_do_where_the_first_rank_ends_last(asked: PlanningProblem) -> None:
    for placed in islice(whole_space(asked)[0].likely(), 30):
        stops = placed.split()
        plan = None if stops is None else placed.plan(stops)
        if plan is not None:
            played, ends_s = played_batches(plan, 2), batch_ends_s(one_pipeline(plan, batches=2))
            assert played.batch_ends_s == pytest.approx(ends_s, rel=1e-6)


def test_a_long_exchange_of_a_later_rank_is_seen() -> None:
    plan = solve("auto", asked_of(4, 2, 1e9, 80.0, "deepspeed", stages=2, data=4, tensor=1))
    assert isinstance(plan, Plan)
    own = [replace(each, reduce_s=1.0, update_s=0.0, backward_s=0.5, gradient_transfer_s=0.0) for each in plan.costs]
    alike, long = (replace(plan, costs=(own[0], replace(own[1], reduce_s=each))) for each in (1.4, 1.6))
    assert first_rank_ends_last(alike) and not first_rank_ends_last(long)


def test_plays_that_differ_by_rounding_are_the_same() -> None:
    plan = solve("auto", asked_of(4, 2, 1e9, 80.0, "megatron"))
    assert isinstance(plan, Plan) and plan.simulated is not None
    slow = replace(plan.simulated, throughput_samples_per_s=1e-5)  # a small rate is compared as closely as a large one
    rate, busy = slow.throughput_samples_per_s, slow.busy_fraction
    assert same_play(slow, replace(slow, throughput_samples_per_s=rate * (1 + 1e-12)))
    assert not same_play(slow, replace(slow, throughput_samples_per_s=rate * (1 + 1e-6)))
    assert not same_play(slow, replace(slow, bubble_fraction=slow.bubble_fraction + 1e-6))
    assert not same_play(slow, replace(slow, busy_fraction=(*busy[:-1], busy[-1] - 1e-6)))
    assert not same_play(slow, replace(slow, busy_fraction=busy[:-1]))
    assert not same_play(slow, replace(slow, peak_memory_bytes=tuple(each + 1 for each in slow.peak_memory_bytes)))


def test_a_stage_of_more_than_twice_an_equal_share_of_the_blocks_is_found() -> None:
    """Of 26 blocks in four stages, three take longer than all others together: these have a rank each."""
    space, _ = whole_space(asked_of(24, 1, 2e10, 80.0, "megatron", tensor=1, stages=4, chunks=1, recompute=False))
    splitter = space.maker(next(iter(space.likely())).degrees).splitter
    costs_s = np.append(0.0, np.cumsum([9.0, *[0.1] * 23, 9.0, 9.0]))

    def cost_s(starts: IntArray, stops: IntArray) -> FloatArray:
        return np.asarray(costs_s[stops] - costs_s[starts])

    found, longest_s = splitter._least(cost_s)
    assert longest_s == pytest.approx(9.0) and found == [(1, 24, 25, 26)]
