"""Coordinates: ranks and their places on every axis are the same thing, and groups lie where the costs have them."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.costs.groups import axis_links, links_among
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.coordinates import GROUPS, Coordinates, coordinates_of, group_of, rank_at
from pipeplan.documents.forms import Form
from pipeplan.documents.plan import Plan, Stage
from pipeplan.documents.profile import Device
from pipeplan.errors import InvalidInputError
from pipeplan.formats import layout
from pipeplan.planners.whole.placements import placement
from tests.pipeplan.documents.test_plan import gpipe_by_hand


def plan_of(form: Form, pipeline: int, data: int, inside: int) -> Plan:
    """A plan of so many stages and replicas, of which `inside` are neighbours."""
    hand = gpipe_by_hand()
    return replace(
        hand,
        engine="megatron",
        form=form,
        stages=tuple(Stage(start=stage, stop=stage + 1, replicas=data) for stage in range(pipeline)),
        costs=(hand.costs[0],) * pipeline,
        placement=placement(pipeline, data, inside=inside),
    )


def shared_plan(form: Form, pipeline: int, inside: int, outside: int) -> Plan:
    """Replicas that hold whole copies of experts stand together."""
    together = inside * form.replicas_together
    return plan_of(form, pipeline, together * outside, together)


plans = st.builds(
    shared_plan,
    st.builds(
        lambda tensor, context, expert, whole: Form(
            tensor=tensor, context=context, expert=expert, expert_tensor=1 if whole and tensor > 1 else None
        ),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([1, 3]),
        st.sampled_from([1, 2, 4]),
        st.booleans(),
    ),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
)


@given(plans)
def test_every_rank_has_coordinates_of_its_own_and_they_lead_back(plan: Plan) -> None:
    places = [coordinates_of(plan, rank) for rank in range(plan.workers)]
    assert len(set(places)) == plan.workers
    assert [rank_at(plan, place) for place in places] == list(range(plan.workers))


@given(plans)
def test_the_groups_of_an_axis_are_as_large_as_its_degree_and_divide_the_ranks(plan: Plan) -> None:
    form = plan.form
    sizes = (form.tensor, form.context, form.expert, plan.width, plan.depth)
    for axis, size in zip(GROUPS, sizes, strict=True):
        groups = {group_of(plan, rank, axis) for rank in range(plan.workers)}
        assert {len(group) for group in groups} == {size}
        assert sorted(rank for group in groups for rank in group) == list(range(plan.workers))


@given(plans, st.sampled_from([(4, 2, 2), (2, 8), (8, 4)]))
def test_groups_lie_where_the_costs_have_them(plan: Plan, sizes: tuple[int, ...]) -> None:
    """The links of an axis are those among devices as far from each other as the group of rank 0."""
    levels = tuple(Level(size=size, bandwidth_bytes_per_s=1e9 / 4**depth) for depth, size in enumerate(sizes))
    machines = Cluster(device=Device(name="gpu", memory_bytes=100), levels=levels)
    for axis, links in axis_links(machines, plan.form).items():
        ranks = group_of(plan, 0, axis)
        steps = {after - before for before, after in pairwise(ranks)} or {1}
        assert len(steps) == 1
        assert links == links_among(machines, len(ranks), steps.pop())


def test_whole_experts_are_shared_across_tensor_groups_and_replicas() -> None:
    """Megatron-LM's ranks with tensor 2, expert 4 and `--expert-tensor-parallel-size 1`: four in a row."""
    own, cut = Form(tensor=2, expert=4, expert_tensor=1), Form(tensor=2, expert=4)
    assert group_of(plan_of(own, pipeline=2, data=4, inside=4), 5, "expert") == (4, 5, 6, 7)
    assert group_of(plan_of(cut, pipeline=2, data=4, inside=4), 5, "expert") == (1, 3, 5, 7)
    assert layout(plan_of(own, pipeline=2, data=2, inside=2)) == "tensor 0, 1; expert 0-3; replica 0, 2; pipeline 0, 4"


def test_a_layout_in_a_line() -> None:
    plan = plan_of(Form(tensor=4), pipeline=2, data=6, inside=2)
    assert layout(plan) == "tensor 0-3; replica 0, 4, ..., 36; pipeline 0, 8"
    assert layout(plan_of(Form(), pipeline=1, data=1, inside=1)) == "one"


def test_what_is_not_a_rank_is_refused() -> None:
    plan = plan_of(Form(tensor=2), pipeline=2, data=2, inside=1)
    for rank in (-1, plan.workers):
        with pytest.raises(InvalidInputError, match="from 0 to 7"):
            coordinates_of(plan, rank)
    nowhere = Coordinates(pipeline=0, replica=0, tensor=2, context=0, expert=0)
    with pytest.raises(InvalidInputError):
        rank_at(plan, nowhere)
    with pytest.raises(InvalidInputError):
        group_of(plan, 0, "data")
