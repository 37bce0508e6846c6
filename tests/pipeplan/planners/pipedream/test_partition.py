"""The search for partitions against every partition there is, and what it must not be sensitive to."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeplan.arrays import FloatArray
from pipeplan.costs.compute import interval_maxima
from pipeplan.costs.memory import kept_sums
from pipeplan.planners.pipedream import partition as partition_module
from pipeplan.planners.pipedream.budget import BUDGET
from pipeplan.planners.pipedream.fitting import Law
from pipeplan.planners.pipedream.partition import nearest, partition
from pipeplan.planners.pipedream.parts import Partition, held_bytes, search_of
from pipeplan.planners.pipedream.space import LevelLinks
from pipeplan.planners.pipedream.states import States
from tests.pipeplan.planners.every_partition import World, copies_of, flat
from tests.properties import examples

PLENTY = Law(fixed=copies_of((0, 0, 0, 0, 0)), each=copies_of((1, 1, 0, 0, 0)), limit_bytes=1e15)

bandwidths = st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0, 64.0])


def sums(values: list[float]) -> FloatArray:
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))


@st.composite
def chains(draw: st.DrawFn, most: int = 5) -> States:
    """States of a chain of small whole costs, so that ties are frequent and sums exact."""
    count = draw(st.integers(1, most))

    def values(*choices: float) -> list[float]:
        return draw(st.lists(st.sampled_from(choices), min_size=count, max_size=count))

    compute = values(0.0, 1.0, 2.0, 3.0, 5.0)
    assume(sum(compute) > 0)
    boundary = np.asarray([0.0, *values(0.0, 1.0, 2.0, 5.0)[1:], 0.0])
    transient_bytes = None
    if draw(st.booleans()):
        transient_bytes = np.zeros((count + 1, count + 1))
        transient_bytes[:-1, 1:] = interval_maxima(values(0.0, 1.0, 2.0))
    activations = np.asarray(values(0.0, 1.0, 4.0))
    added_bytes, kept_before = kept_sums(activations, np.minimum(activations, values(0.0, 1.0, 2.0)))
    return States(
        compute_s=sums(compute),
        weight_bytes=sums(values(0.0, 0.0, 1.0, 5.0, 20.0)),
        added_bytes=added_bytes,
        kept_before=kept_before,
        boundary_bytes=boundary,
        input_bytes=boundary + 1,
        late_bytes=sums(values(0.0, 1.0, 3.0)),
        transient_bytes=transient_bytes,
    )


@st.composite
def graphs(draw: st.DrawFn) -> States:
    """States of a graph of up to four blocks: the sets that hold all that their members read."""
    count = draw(st.integers(2, 4))
    edges = [(i, j) for j in range(count) for i in range(j) if draw(st.booleans())]
    cuts = [
        cut for cut in product((0, 1), repeat=count) if all(cut[source] or not cut[reader] for source, reader in edges)
    ]
    cuts.sort(key=lambda cut: (sum(cut), cut))
    member = np.asarray(cuts, dtype=np.float64)

    def total(*choices: float) -> FloatArray:
        drawn = draw(st.lists(st.sampled_from(choices), min_size=count, max_size=count))
        return np.asarray(member @ np.asarray(drawn))

    compute_s = total(0.0, 1.0, 2.0, 5.0) + member.sum(axis=1)
    boundary = total(0.0, 1.0, 3.0)
    boundary[-1] = 0.0
    before = np.all(member[:, None] <= member[None], axis=2) & ~np.eye(len(cuts), dtype=bool)
    return States(
        compute_s=compute_s,
        weight_bytes=total(0.0, 1.0, 5.0, 20.0),
        added_bytes=compute_s,
        kept_before=compute_s,
        boundary_bytes=boundary,
        input_bytes=boundary,
        late_bytes=total(0.0, 1.0, 3.0),
        before=before,
    )


@st.composite
def networks(draw: st.DrawFn, most: int = 5) -> tuple[LevelLinks, ...]:
    """One to three levels; the middle and the outer ones join at least two units."""
    sizes = draw(st.sampled_from([(most,), (2, 3), (3, 2), (2, 2, 2)]))
    least = 1 if len(sizes) == 1 else 2
    return tuple(
        LevelLinks(units=draw(st.integers(least, size)), bandwidth_bytes_per_s=draw(bandwidths)) for size in sizes
    )


laws = st.builds(
    Law,
    fixed=st.sampled_from([(0, 0, 0, 0, 0), (2, 0, 0, 1, 0), (1, 0, 0, 0, 1)]).map(copies_of),
    each=st.sampled_from([(1, 1, 0, 0, 0), (1, 1, 1, 0, 0)]).map(copies_of),
    limit_bytes=st.one_of(st.just(1e15), st.integers(1, 80).map(float)),
)


def found(world: World, law: Law = PLENTY, *, straight: bool = False, fewer: bool = False) -> Partition | None:
    return partition(
        search_of(world.states, world.levels, exchange=world.factor, law=law, straight=straight, fewer=fewer)
    )


@examples(250)
@given(st.one_of(chains(), graphs()), networks(), st.sampled_from([2.0, 4.0]), laws, st.booleans(), st.booleans())
def test_the_search_finds_what_trying_every_partition_finds(
    states: States, levels: tuple[LevelLinks, ...], factor: float, law: Law, straight: bool, fewer: bool
) -> None:
    world = World(states=states, levels=levels, factor=factor)
    every = world.every(straight=straight, fewer=fewer)
    fitting = [pieces for pieces in every if world.worst_bytes(pieces, law) <= law.limit_bytes]
    search = search_of(states, levels, exchange=factor, law=law, straight=straight, fewer=fewer)
    answer = partition(search)
    if answer is None:
        assert not fitting
        if every:
            closest, stage, most_bytes = nearest(search)
            assert most_bytes == min(world.worst_bytes(pieces, law) for pieces in every)
            assert held_bytes(search, closest)[stage] == most_bytes
        return
    assert answer.cost_s == pytest.approx(min(world.cost_s(pieces) for pieces in fitting), rel=1e-11)
    reached = [tuple((share.start, share.stop, share.replicas) for share in answer.shares)]
    same = [pieces for pieces in fitting if tuple(flat(pieces)) in reached]
    assert min(world.cost_s(pieces) for pieces in same) == pytest.approx(answer.cost_s, rel=1e-11)
    assert max(held_bytes(search, answer)) <= law.limit_bytes


@examples(150)
@given(chains(), networks(6), st.booleans())
def test_ties_prefer_fewer_stages_then_bytes_then_smaller_cuts_then_fewer_early_replicas(
    states: States, levels: tuple[LevelLinks, ...], weights: bool
) -> None:
    assume(len(levels) == 1)
    states = states if weights else replace(states, weight_bytes=np.zeros(len(states)))
    world = World(states=states, levels=levels, factor=4.0)
    every = world.every()
    best_s = min(world.cost_s(pieces) for pieces in every) * (1 + 1e-11)
    expected = min(
        (pieces for pieces in every if world.cost_s(pieces) <= best_s),
        key=lambda pieces: (
            len(pieces),
            round(world.sent_bytes(pieces), 9),
            [piece.stop for piece in pieces],
            [piece.units for piece in pieces],
        ),
    )
    answer = found(world)
    assert answer is not None
    assert [(s.start, s.stop, s.replicas) for s in answer.shares] == list(flat(expected))


@examples(80)
@given(chains(6), st.integers(2, 6), bandwidths, laws)
def test_where_memory_decides_the_fast_search_is_right_or_says_how_far_it_may_be_off(
    states: States, machines: int, bandwidth: float, law: Law
) -> None:
    levels = (LevelLinks(units=machines, bandwidth_bytes_per_s=bandwidth),)
    world = World(states=states, levels=levels, factor=4.0)
    fitting = [pieces for pieces in world.every() if world.worst_bytes(pieces, law) <= law.limit_bytes]
    search = search_of(states, levels, law=law)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition_module, "BUDGET", replace(BUDGET, recurrence_entries=0))
        answer = partition(search)
    if answer is None:
        assert not fitting or partition(search) is not None
        return
    best_s = min(world.cost_s(pieces) for pieces in fitting)
    assert answer.proof.bound_s * (1 - 1e-11) <= best_s <= answer.cost_s * (1 + 1e-11)
    assert max(held_bytes(search, answer)) <= law.limit_bytes


@examples(60)
@given(chains(8), networks(6), st.sampled_from([1.5, 2.0, 10.0]))
def test_faster_links_never_make_it_slower(states: States, levels: tuple[LevelLinks, ...], factor: float) -> None:
    faster = tuple(replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * factor) for level in levels)
    before = found(World(states=states, levels=levels, factor=4.0))
    after = found(World(states=states, levels=faster, factor=4.0))
    assert before is not None and after is not None
    assert after.cost_s <= before.cost_s * (1 + 1e-11)


@examples(60)
@given(chains(7), networks(5), laws)
def test_more_memory_never_makes_it_slower(states: States, levels: tuple[LevelLinks, ...], law: Law) -> None:
    world = World(states=states, levels=levels, factor=4.0)
    before, after = found(world, law), found(world, replace(law, limit_bytes=law.limit_bytes + 7))
    if before is not None:
        assert after is not None
        assert after.cost_s <= before.cost_s * (1 + 1e-11)


@examples(60)
@given(chains(8), networks(6))
def test_of_more_machines_fewer_may_be_used_so_that_they_never_make_it_slower(
    states: States, levels: tuple[LevelLinks, ...]
) -> None:
    *inside, outermost = levels
    more = (*inside, replace(outermost, units=outermost.units + 1))
    before = found(World(states=states, levels=levels, factor=4.0), fewer=True)
    after = found(World(states=states, levels=more, factor=4.0), fewer=True)
    assert before is not None and after is not None
    assert after.cost_s <= before.cost_s * (1 + 1e-11)
    assert len(after.placement) <= len(more) * 1000


def recurrence(states: States, machines: int, bandwidth: float) -> float:
    """A(N, M) of section 3.2, from the front, in plain loops over machines and arrays of states."""
    compute = states.compute_s - states.compute_s[:, None]
    weights = states.weight_bytes - states.weight_bytes[:, None]
    stage = np.triu(np.ones(compute.shape, dtype=bool), k=1)

    def stage_s(m: int) -> FloatArray:
        longer = np.maximum(compute, 4 * (m - 1) / m * weights / bandwidth) / m
        return np.where(stage, longer, np.inf)

    table = [np.full(len(states), np.inf)]
    for m in range(1, machines + 1):
        best = stage_s(m)[0]
        for last in range(1, m):
            before = np.maximum(table[m - last], 2 * states.boundary_bytes / bandwidth)
            best = np.minimum(best, np.maximum(before[:, None], stage_s(last)).min(axis=0))
        table.append(best)
    return float(table[machines][-1])


@examples(40)
@given(chains(40), st.integers(7, 30), st.sampled_from([0.25, 1.0, 4.0, 64.0]))
def test_what_the_search_leaves_out_changes_nothing(states: States, machines: int, bandwidth: float) -> None:
    """On more machines than all partitions could be tried on, against the bare recurrence."""
    world = World(states=states, levels=(LevelLinks(units=machines, bandwidth_bytes_per_s=bandwidth),), factor=4.0)
    answer = found(world)
    assert answer is not None
    assert answer.cost_s == pytest.approx(recurrence(states, machines, bandwidth), rel=1e-11)


def test_a_minibatch_stays_inside_one_server() -> None:
    """Two servers of three, a stage of two and one of one in each: replica k sits on server k mod 2."""
    states = States(
        compute_s=np.asarray([0.0, 2.0, 3.0]),
        weight_bytes=np.asarray([0.0, 0.0, 1.0]),
        added_bytes=np.zeros(3),
        kept_before=np.zeros(3),
        boundary_bytes=np.zeros(3),
        input_bytes=np.zeros(3),
    )
    levels = (
        LevelLinks(units=3, bandwidth_bytes_per_s=0.5),
        LevelLinks(units=2, bandwidth_bytes_per_s=4.0),
    )
    answer = found(World(states=states, levels=levels, factor=4.0))
    assert answer is not None
    assert answer.replicas == [4, 2]
    #                         server 0                server 1
    assert answer.placement == ((0, 0), (0, 2), (1, 0), (0, 1), (0, 3), (1, 1))
    servers = [{(stage, replica) for stage, replica in answer.placement[first : first + 3]} for first in (0, 3)]
    for minibatch in range(4):
        assert {(0, minibatch % 4), (1, minibatch % 2)} <= servers[minibatch % 2]


def test_zero_compute_between_two_cuts_is_no_trouble() -> None:
    states = States(
        compute_s=np.asarray([0.0, 0.0, 0.0, 1.0, 1.0]),
        weight_bytes=np.asarray([0.0, 3.0, 3.0, 3.0, 9.0]),
        added_bytes=np.zeros(5),
        kept_before=np.zeros(5),
        boundary_bytes=np.asarray([0.0, 0.0, 1.0, 0.0, 0.0]),
        input_bytes=np.zeros(5),
    )
    levels = (LevelLinks(units=3, bandwidth_bytes_per_s=1.0),)
    world = World(states=states, levels=levels, factor=4.0)
    answer = found(world)
    assert answer is not None
    assert answer.cost_s == min(world.cost_s(pieces) for pieces in world.every())


def test_all_machines_are_used_where_the_slowest_stage_needs_one_and_many_are_left_over() -> None:
    """Once left idle where the table of bytes was too large, and with it the last stage's exchange."""
    compute = [1.0] + [0.01] * 39
    states = States(
        compute_s=sums(compute),
        weight_bytes=sums([1000.0] + [0.0] * 39),
        added_bytes=sums([0.0] * 40),
        kept_before=sums([0.0] * 40),
        boundary_bytes=np.zeros(41),
        input_bytes=np.zeros(41),
    )
    for levels in (
        [LevelLinks(units=500, bandwidth_bytes_per_s=1.0)],
        [LevelLinks(units=2, bandwidth_bytes_per_s=1.0)] * 9,
    ):
        found = partition(search_of(states, levels))
        assert found is not None
        assert found.cost_s == 1.0
        assert sum(found.replicas) == len(found.placement) == np.prod([level.units for level in levels])
