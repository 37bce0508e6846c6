"""The split of least largest cost, against every split there is; and that it looks at few starts."""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, combinations, pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.arrays import FloatArray
from pipeplan.costs.compute import interval_sums, no_stage
from pipeplan.planners.chain import profiled
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.two_bw.candidate import Evaluator
from pipeplan.planners.two_bw.places import Bands
from pipeplan.planners.two_bw.shapes import ShapeSpace
from pipeplan.planners.two_bw.split import (
    Costs,
    SplitSearch,
    Starts,
    even_min_sum,
    every_start,
    least_squares,
    least_sum,
    min_sum,
    starts_within,
)
from pipeplan.planners.two_bw.terms import PipelineShape
from tests.pipeplan.builders import Cell, cells, cluster, profile
from tests.properties import examples

INFINITE = float("inf")


class Chain:
    """Stages that cost their blocks' work, and beyond it what a stage of its own adds; some do not fit."""

    def __init__(self, work: list[float], added: list[float], most_blocks: int) -> None:
        self.work = work
        self.added = added
        self.most_blocks = most_blocks
        self.looked_at = 0
        self._sums = interval_sums(work) + no_stage(len(work))

    def costs(self, stage: int, starts: slice, stops: slice) -> FloatArray:
        lasts = slice(stops.start - 1, stops.stop - 1)
        table = self._sums[starts, lasts] + self.added[stage % len(self.added)]
        blocks = np.arange(stops.start, stops.stop) - np.arange(starts.start, starts.stop)[:, None]
        self.looked_at += table.size
        return np.where(blocks <= self.most_blocks, table, INFINITE)

    def band_costs(self, at: Bands) -> FloatArray:
        starts, stops = at.ranges
        sums, added = np.asarray([0.0, *accumulate(self.work)]), np.asarray(self.added)
        blocks = stops - starts
        stages = np.arange(at.stages.start, at.stages.stop)[:, None, None]
        tables = sums[stops] - sums[starts] + added[stages % len(added)]
        self.looked_at += tables.size
        return np.where((blocks > 0) & (blocks <= self.most_blocks), tables, INFINITE)

    def limits(self, depth: int, limit: float) -> list[list[list[tuple[list[float], float]]]]:
        return [[[([0.0, *accumulate(self.work)], limit)]]] * depth

    def search(self, depth: int) -> SplitSearch:
        about = max(sum(self.work) / depth, *self.work)
        return SplitSearch(
            bands=lambda *_: self.band_costs,
            limits=partial(self.limits, depth),
            starts=every_start(len(self.work), depth),
            about=about,
        )

    def least_max(self, depth: int, ceiling: float = INFINITE) -> float:
        found = self.search(depth).least_max(ceiling)
        return found.worst if found else INFINITE

    def every_split(self, depth: int) -> Iterator[tuple[list[float], tuple[int, ...]]]:
        """The stages' costs and stops of all splits that fit."""
        blocks = len(self.work)
        for cuts in combinations(range(1, blocks), depth - 1):
            stops = (*cuts, blocks)
            pairs = enumerate(zip((0, *cuts), stops, strict=True))
            costs = [float(self.costs(s, slice(a, a + 1), slice(b, b + 1))[0, 0]) for s, (a, b) in pairs]
            if max(costs) < INFINITE:
                yield costs, stops


chains = st.builds(
    Chain,
    st.lists(st.integers(0, 5).map(float), min_size=2, max_size=8),
    st.lists(st.sampled_from([0.0, 1.0, 50.0]), min_size=1, max_size=3),
    st.integers(1, 8),
)


@given(chain=chains, depth=st.integers(1, 8))
def test_the_least_largest_cost_is_that_of_the_best_of_all_splits(chain: Chain, depth: int) -> None:
    depth = min(depth, len(chain.work))
    every = list(chain.every_split(depth))
    least = min((max(costs) for costs, _ in every), default=INFINITE)
    search = chain.search(depth)
    found = search.least_max()
    assert (found.worst if found else INFINITE) == least
    tied = [(sum(c * c for c in costs), stops) for costs, stops in every if max(costs) == least]
    assert (search.stops(found) if found else None) == min(tied, default=(0.0, None))[1]


def least_largest(costs: Costs, starts: Starts) -> float:
    """The least largest cost of all splits, every start of every stage looked at."""
    after = np.zeros(1)
    for stage in reversed(range(len(starts) - 1)):
        after = np.maximum(costs(stage, starts[stage], starts[stage + 1]), after).min(axis=1)
    return float(after[0])


long_chains = st.builds(
    Chain,
    st.lists(st.integers(0, 50).map(float), min_size=100, max_size=300),
    st.lists(st.sampled_from([0.0, 30.0, 500.0]), min_size=1, max_size=3),
    st.integers(20, 200),
)


@examples(50)
@given(chain=long_chains, depth=st.sampled_from([2, 3, 7, 12, 40]))
def test_bands_leave_out_no_split_that_could_be_the_best(chain: Chain, depth: int) -> None:
    assert chain.least_max(depth) == least_largest(chain.costs, every_start(len(chain.work), depth))


@pytest.mark.parametrize("depth", [3, 12, 40])
def test_the_nearest_miss_is_that_of_the_split_that_holds_least(depth: int) -> None:
    draw = Random(depth)
    cells = [
        Cell(
            weight_bytes=draw.randint(1, 5),
            output_bytes=draw.randint(1, 9),
            activation_bytes=int(draw.lognormvariate(4, 1)),
            workspace_bytes=draw.randint(0, 99),
        )
        for _ in range(150)
    ]
    problem = PlanningProblem(profile=profile(cells), cluster=cluster((64, 1.0), memory_bytes=1), batch_size=64)
    measured = profiled(problem)
    evaluator, space = Evaluator(problem=problem, measured=measured), ShapeSpace(problem=problem, measured=measured)
    for rows in space.rows:
        shape = space.shape(rows.execution, 1, 0, 64, depth)
        terms = evaluator.terms(shape, evaluator.links(shape)[0])
        miss = evaluator.nearest(shape)
        assert miss is not None
        assert miss.memory_bytes == int(least_largest(terms.memory_bytes, terms.every_start))


@given(chain=chains, depth=st.integers(1, 8), ceiling=st.integers(1, 60))
def test_a_ceiling_leaves_the_best_split_or_none(chain: Chain, depth: int, ceiling: int) -> None:
    depth = min(depth, len(chain.work))
    least = chain.least_max(depth)
    assert chain.least_max(depth, ceiling) == (least if least <= ceiling else INFINITE)


@given(chain=chains, depth=st.integers(1, 8))
def test_no_split_has_less_variance_of_work(chain: Chain, depth: int) -> None:
    depth = min(depth, len(chain.work))
    work = [0.0, *accumulate(chain.work)]

    def squares(_: Starts) -> Costs:
        def cost(stage: int, starts: slice, stops: slice) -> FloatArray:
            fits = np.isfinite(chain.costs(stage, starts, stops))
            sums = np.asarray(work)
            return np.where(fits, np.square(sums[stops] - sums[starts][:, None]), INFINITE)

        return cost

    tried = [
        (sum((work[b] - work[a]) ** 2 for a, b in pairwise((0, *stops))), stops)
        for _, stops in chain.every_split(depth)
    ]
    assert least_squares(squares, work, every_start(len(chain.work), depth)) == min(tried, default=(0.0, None))[1]


@given(chain=chains, depth=st.integers(1, 8), limit=st.integers(0, 20))
def test_starts_within_a_limit_leave_out_no_split_that_keeps_it(chain: Chain, depth: int, limit: int) -> None:
    depth = min(depth, len(chain.work))
    starts = starts_within(partial(chain.limits, depth), limit, every_start(len(chain.work), depth))
    for costs, stops in chain.every_split(depth):
        if max(costs) <= limit:
            assert starts is not None
            assert all(may.start <= start < may.stop for may, start in zip(starts, (0, *stops), strict=True))


@given(chain=chains, depth=st.integers(1, 8))
def test_the_least_sum_is_that_of_the_best_of_all_splits(chain: Chain, depth: int) -> None:
    depth = min(depth, len(chain.work))
    every = [(sum(costs), stops) for costs, stops in chain.every_split(depth)]
    starts = every_start(len(chain.work), depth)
    assert least_sum(chain.costs, starts) == min(every, default=(INFINITE, ()))[0]
    if every:
        assert min_sum(chain.costs, starts) == min(every)[1]


@given(
    chain=chains,
    depth=st.integers(1, 8),
    held=st.lists(st.integers(0, 3).map(float), min_size=8, max_size=8),
    squared=st.lists(st.integers(0, 3).map(float), min_size=8, max_size=8),
)
def test_of_splits_of_the_least_sum_the_worst_stage_holds_least_and_then_they_are_even(
    chain: Chain, depth: int, held: list[float], squared: list[float]
) -> None:
    depth = min(depth, len(chain.work))
    every = list(chain.every_split(depth))
    if not every:
        return

    def of_blocks(amounts: list[float]) -> Costs:
        sums = np.asarray([0.0, *accumulate(amounts)])
        return lambda stage, starts, stops: sums[stops] - sums[starts][:, None]

    def squares(stage: int, starts: slice, stops: slice) -> FloatArray:
        return np.square(of_blocks(squared)(stage, starts, stops))

    def key(costs: list[float], stops: tuple[int, ...]) -> tuple[float, float, float, tuple[int, ...]]:
        stages = list(pairwise((0, *stops)))
        return sum(costs), max(sum(held[a:b]) for a, b in stages), sum(sum(squared[a:b]) ** 2 for a, b in stages), stops

    found = even_min_sum(chain.costs, every_start(len(chain.work), depth), held=of_blocks(held), squares=squares)
    assert found == min(key(*split) for split in every)[-1]


def test_of_a_thousand_blocks_in_64_stages_few_starts_are_looked_at() -> None:
    """All of them took a minute for the shapes of 64 devices."""
    chain = Chain([1.0 + i % 7 for i in range(1000)], [0.0, 0.25], 1000)
    assert chain.least_max(64) < 1.1 * sum(chain.work) / 64
    assert chain.looked_at < 64 * 937 * 937 / 50


@examples(60)
@given(st.lists(cells(), min_size=2, max_size=9), st.integers(1, 9), st.integers(10, 400), st.data())
def test_bands_have_the_numbers_of_tables(
    blocks: list[Cell], depth: int, memory_bytes: int, data: st.DataObject
) -> None:
    depth = min(depth, len(blocks))
    machines = cluster((2, 4.0), (8, 1.0), memory_bytes=memory_bytes)
    problem = PlanningProblem(profile=profile(blocks, input_bytes=3), cluster=machines, batch_size=32)
    evaluator = Evaluator(problem=problem, measured=profiled(problem))
    shape = PipelineShape(
        schedule="pipedream-2bw", width=2, depth=depth, microbatch_size=1, microbatches=16, recompute=None
    )
    terms = evaluator.terms(shape, data.draw(st.sampled_from(evaluator.links(shape))))
    starts, reach = every_start(len(blocks), depth), len(blocks)
    lows = np.asarray([may.start for may in starts[:-1]])
    rows = max(may.stop - may.start for may in starts)
    at = Bands(slice(0, depth), lows, np.ones(depth, dtype=np.int64), rows, reach, len(blocks))
    times_s, held = terms.bands_within(starts, 0.0)(at), terms.smallest().bands(starts, 0.0)(at)
    within = terms.within(starts, 0.0)
    for stage, (may, ends) in enumerate(pairwise(starts)):
        for start in range(may.start, may.stop):
            for stop in range(max(start + 1, ends.start), ends.stop):
                place = stage, slice(start, start + 1), slice(stop, stop + 1)
                cell = stage, start - may.start, stop - start - 1
                assert times_s[cell] == within(*place)[0, 0]
                assert held[cell] == terms.memory_bytes(*place)[0, 0]
