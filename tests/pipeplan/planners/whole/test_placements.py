"""Placements: those that differ, against all of them when played, and a mixture that beats both ends."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.plan import Worker
from pipeplan.documents.profile import Profile
from pipeplan.exports.formats import format_named
from pipeplan.exports.source import ExportSource
from pipeplan.planners.auto.ranking import CLOSE
from pipeplan.planners.complete import play
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.whole.placements import placement, placements
from pipeplan.planners.whole.planner import whole_space
from pipeplan.programs.program import pipelines_in_a_row, stages_in_a_row
from tests.pipeplan.planners.whole.test_whole import answered, model, problem
from tests.properties import examples

HELD = model(layers=6)
FIXED: dict[str, Any] = {"tensor": 1, "microbatch_size": 1, "chunks": 1, "sharding": "none", "recompute": False}


def machines(profile: Profile, sizes: tuple[int, ...], bandwidths: tuple[float, ...]) -> Cluster:
    levels = tuple(
        Level(size=size, bandwidth_bytes_per_s=bandwidth) for size, bandwidth in zip(sizes, bandwidths, strict=True)
    )
    return Cluster(device=replace(profile.device, memory_bytes=80 * 2**30), levels=levels)


def rates(asked: PlanningProblem, options: tuple[int, ...]) -> dict[int, float]:
    """What the one configuration of a problem plays with so many replicas inside."""
    space, _ = whole_space(asked)
    maker = space.maker(next(iter(space.configurations())).degrees)
    stops = maker.splitter.several[0]
    found = {}
    for inside in options:
        plan = maker.plan(stops, inside=inside)
        simulated = None if plan is None else play(plan)
        assert simulated is not None
        found[inside] = simulated.throughput_samples_per_s
    return found


clusters = st.builds(
    lambda sizes, bandwidths: machines(HELD, sizes, tuple(sorted(bandwidths[: len(sizes)], reverse=True))),
    st.sampled_from([(4, 4), (2, 2, 4), (2, 4, 2), (4, 2, 2), (6, 4), (3, 4)]),
    st.lists(st.sampled_from([1e9, 4e9, 2e10, 1e11]), min_size=3, max_size=3),
)


@examples(25)
@given(clusters, st.sampled_from([2, 4]), st.sampled_from([2, 32]))
def test_no_other_placement_plays_faster_than_those_that_differ(cluster: Cluster, ranks: int, batches: int) -> None:
    replicas = cluster.devices // ranks
    asked = problem(HELD, cluster, batch_size=batches * replicas, stages=ranks, data=replicas, **FIXED)
    every = tuple(inside for inside in range(1, replicas + 1) if replicas % inside == 0)
    kept = placements(cluster, ranks, replicas)
    assert set(kept) <= set(every) and kept[0] == replicas
    played = rates(asked, every)
    assert max(played[inside] for inside in kept) >= max(played.values()) * (1 - 1e-9)


def test_a_mixture_beats_replicas_and_pipelines_as_neighbours_and_is_found() -> None:
    """Racks of two servers of two: with two replicas inside, each rack has half a pipeline of two replicas."""
    cluster = machines(HELD, (2, 2, 4), (1e11, 5e10, 2e9))
    asked = problem(HELD, cluster, batch_size=128, stages=4, data=4, **FIXED)
    played = rates(asked, (1, 2, 4))
    assert played[2] > 1.1 * max(played[1], played[4])
    plan = answered(asked)
    assert plan.throughput_samples_per_s is not None
    assert plan.throughput_samples_per_s >= played[2] * (1 - CLOSE)
    assert plan.placement == placement(4, 4, inside=2)
    source = ExportSource(plan_id="0" * 32, plan=plan, cluster=cluster, block_names=tuple(b.name for b in HELD.blocks))
    assert "in another order" in format_named("megatron").write(source)


@given(st.integers(1, 5), st.integers(1, 6))
def test_the_ends_are_stages_in_a_row_and_pipelines_in_a_row(ranks: int, replicas: int) -> None:
    assert placement(ranks, replicas, inside=replicas) == stages_in_a_row((replicas,) * ranks)
    assert placement(ranks, replicas, inside=1) == pipelines_in_a_row((replicas,) * ranks)


def test_between_the_ends_as_many_replicas_as_asked_are_neighbours() -> None:
    drawn = [f"{worker.stage}{'abcd'[worker.replica]}" for worker in placement(2, 4, inside=2)]
    assert drawn == ["0a", "0b", "1a", "1b", "0c", "0d", "1c", "1d"]
    assert placement(1, 1, inside=1) == (Worker(stage=0),)


def test_where_all_devices_are_alike_there_is_one_placement() -> None:
    assert placements(machines(HELD, (16,), (1e9,)), 4, 4) == (4,)


@pytest.mark.parametrize(("together", "expected"), [(1, {8, 1, 4}), (2, {8, 2, 4}), (8, {8})])
def test_replicas_that_share_experts_stay_neighbours(together: int, expected: set[int]) -> None:
    """8 replicas of 4 ranks on servers of 8: one or two inside both put two whole pipelines on a server."""
    assert set(placements(machines(HELD, (8, 4), (1e11, 1e9)), 4, 8, together=together)) == expected


def test_a_single_stage_has_one_placement() -> None:
    cluster = machines(HELD, (2, 2, 4), (1e11, 5e10, 2e9))
    asked = problem(HELD, cluster, batch_size=128, engine="fsdp", stages=1, tensor=1)
    space, _ = whole_space(asked)
    assert all(each.inside == each.degrees.data for each in space.configurations())
