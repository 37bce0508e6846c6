"""Splits of a configuration: those that may be fast enough are counted and listed without looking at the others."""

from itertools import combinations
from math import inf

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.planners.auto.chunks import CHUNKED, ChunkedSpace
from pipeplan.planners.auto.planner import played_spaces
from pipeplan.planners.auto.space import SEARCHED, PlacedShape, PlayedSpace
from pipeplan.planners.auto.splits import MOST_ROWS, SplitsWithin, splits_above
from pipeplan.planners.bound import most_samples_per_s
from pipeplan.planners.complete import play
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.spaces import EverySplit
from tests.pipeplan.planners.auto.random_problems import random_problem, with_ties
from tests.properties import examples


def configurations(problem: PlanningProblem) -> list[PlacedShape]:
    spaces = [space for space in played_spaces(problem, SEARCHED) if isinstance(space, PlayedSpace)]
    return [each for space in spaces for each in space.configurations()]


def every_split(configuration: PlacedShape) -> list[tuple[int, ...]]:
    blocks, depth = configuration.space.evaluator.measured.blocks, configuration.shape.depth
    return [(*cuts, blocks) for cuts in combinations(range(1, blocks), depth - 1)]


def test_every_split_counts_all_and_lists_those_that_may_be_fast() -> None:
    splits = EverySplit((2, 4), lambda stops: float(stops[0]), 1.0)
    assert splits.count == 3
    assert list(splits) == [(2, 4), (3, 4)]
    assert splits.highest(3) == [(3.0, (3, 4)), (2.0, (2, 4))] and not splits.highest(2)


@examples(60)
@given(seed=st.integers(0, 10_000), chosen=st.integers(0, 10**6), share=st.floats(0.3, 1.0), is_tied=st.booleans())
def test_listed_are_the_splits_that_fit_and_may_be_fast_enough(
    seed: int, chosen: int, share: float, is_tied: bool
) -> None:
    kind, problem = random_problem(seed)
    assume(kind not in ("deep", "server"))
    if is_tied and len(problem.profile.blocks) > 1:
        problem = with_ties(problem, seed)
    found = configurations(problem)
    assume(found)
    one = found[chosen % len(found)]
    rate = one.most * share
    assume(rate < inf)
    terms = one.space.evaluator.terms(one.shape, one.wiring.links)
    splits = splits_above(rate, one.space.model, terms, one.wiring)
    listed = list(splits)
    assert len(set(listed)) == len(listed)
    assert splits.count == len(listed) if splits.count <= MOST_ROWS else splits.count > len(listed)
    for stops in every_split(one):
        plan = one.plan(stops)
        if stops in listed:
            assert plan is not None and one.most_of(stops) >= rate * (1 - 1e-9)
            assert one.most_of(stops) >= min(one.most, most_samples_per_s(plan)) * (1 - 1e-9)
        elif plan is not None:  # no play of what is left out is as fast
            simulated = play(plan)
            bound = min(one.most_of(stops), most_samples_per_s(plan))
            assert simulated is None or min(simulated.throughput_samples_per_s, bound) <= rate * (1 + 1e-6)


@examples(60)
@given(seed=st.integers(0, 10_000), chosen=st.integers(0, 10**6), share=st.floats(0.3, 1.0), is_tied=st.booleans())
def test_of_ranks_with_several_stages_those_are_listed_that_fit_and_may_be_fast_enough(
    seed: int, chosen: int, share: float, is_tied: bool
) -> None:
    kind, problem = random_problem(seed)
    assume(kind not in ("deep", "server"))
    if is_tied and len(problem.profile.blocks) > 1:
        problem = with_ties(problem, seed)
    spaces = [space for space in played_spaces(problem, CHUNKED) if isinstance(space, ChunkedSpace)]
    found = [each for space in spaces for each in space.configurations()]
    assume(found)
    one = found[chosen % len(found)]
    rate = one.most_of_any() * share
    assume(rate < inf)
    split, blocks = one.split(), one.terms.blocks
    listed = one.splits_above(rate, split)
    assert len(set(listed)) == len(list(listed)) == listed.count
    for stops in ((*cuts, blocks) for cuts in combinations(range(1, blocks), len(split) - 1)):
        plan = one.plan(stops)
        if stops in listed:
            assert plan is not None and one.most_of(stops) >= rate * (1 - 1e-6)
        elif plan is not None and one.most_of(stops) > rate * (1 + 1e-6):  # memory decides: no play is as fast
            simulated = play(plan)
            assert simulated is None or simulated.throughput_samples_per_s <= rate * (1 + 1e-6)


@examples(60)
@given(
    least_s=st.lists(st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0]), min_size=6, max_size=6), min_size=12, max_size=12),
    limit_s=st.sampled_from([2.0, 3.0, 4.0]),
    count=st.integers(1, 12),
)
def test_the_highest_are_those_that_take_the_shortest(least_s: list[list[float]], limit_s: float, count: int) -> None:
    """Seven blocks in three stages, of up to five blocks each. The second cut's place counts as well."""
    table = np.resize(np.asarray(least_s), (3, 7, 5))

    def whole_s(stops: IntArray) -> FloatArray:
        starts = np.column_stack((np.zeros(len(stops), dtype=np.int64), stops[:, :-1]))
        lengths = stops - starts
        own_s = np.where(lengths > 5, inf, table[np.arange(3), starts, np.minimum(lengths, 5) - 1])
        return np.asarray(np.maximum(own_s.max(axis=1), stops[:, 1] / 2))

    def sent_s(stops: IntArray) -> FloatArray:
        return stops[:, 0].astype(np.float64)

    splits = SplitsWithin(least_s=table, limit_s=limit_s, whole_s=whole_s, sent_s=sent_s, batch_size=12)
    every = [(*cuts, 7) for cuts in combinations(range(1, 7), 2)]
    every = [each for each in every if whole_s(np.asarray([each]))[0] <= limit_s]
    assert sorted(splits) == sorted(every) and splits.count == len(every)
    highest = splits.highest(count)
    rates = sorted((12 / float(whole_s(np.asarray([each]))[0]) for each in every), reverse=True)
    assert [rate for rate, _ in highest] == pytest.approx(rates[:count])
    assert {stops for _, stops in highest} <= set(every)
    keys = [(-rate, stops[0]) for rate, stops in highest]
    assert keys == sorted(keys)  # of equal bounds, what sends least comes first


def test_few_of_very_many_splits_are_listed_at_once() -> None:
    blocks, depth = 40, 20  # 68,923,264,410 splits
    lengths = np.arange(1, blocks - depth + 2)

    def ones(stops: IntArray) -> FloatArray:
        return np.ones(len(stops))

    least_s = np.broadcast_to(np.where(lengths == 2, 1.0, 3.0), (depth, blocks, len(lengths)))
    splits = SplitsWithin(least_s=least_s, limit_s=2.0, whole_s=ones, sent_s=ones, batch_size=1)
    assert list(splits) == [tuple(range(2, 42, 2))] and splits.count == 1


def test_of_very_many_equal_splits_some_are_listed() -> None:
    blocks, depth = 40, 20

    def ones(stops: IntArray) -> FloatArray:
        return np.ones(len(stops))

    splits = SplitsWithin(
        least_s=np.ones((depth, blocks, blocks - depth + 1)), limit_s=2.0, whole_s=ones, sent_s=ones, batch_size=1
    )
    assert splits.count == 68_923_264_410 and len(splits.highest(24)) == 24
