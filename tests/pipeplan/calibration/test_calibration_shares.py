"""Which of a profile's overheads a stage has: by its schedule, its place, and whether it recomputes."""

from dataclasses import replace
from itertools import pairwise

import pytest

from pipeplan.calibration.observed import costs_of
from pipeplan.costs.estimate import backward_follows_forward
from pipeplan.documents.profile import Overheads
from pipeplan.documents.stage_costs import StageCosts
from pipeplan.errors import InvalidInputError
from pipeplan.programs.footprint import last_uses
from pipeplan.programs.instructions import Backward, Forward, Recompute, Update, is_compute
from pipeplan.schedules.registry import schedule_named
from pipeplan.simulation.predict import predict
from tests.pipeplan.calibration.measured import CLUSTER, PROFILE, plan_for

SHAPES = (
    ("naive", (3, 6), 1),
    ("data-parallel", (6,), 2),
    ("gpipe", (3, 6), 1),
    ("1f1b", (2, 4, 6), 1),
    ("pipedream-2bw", (2, 4, 6), 1),
    ("pipedream-2bw", (2, 4, 6), 2),
    ("pipedream-2bw", (6,), 2),
    ("pipedream", (2, 4, 6), 1),
    ("pipedream", (6,), 2),
)


def costs(schedule: str, overheads: Overheads, *, recompute: bool = False) -> tuple[StageCosts, ...]:
    plan = plan_for(schedule, (3, 6), 1, recompute=recompute)
    return costs_of(plan, replace(PROFILE, overheads=overheads), CLUSTER)


def test_a_stage_that_recomputes_forwards_without_a_graph_and_once_more_with_one() -> None:
    overheads = Overheads(forward_without_graph=0.5, recompute=0.25)
    plain, again = costs("gpipe", overheads)[0], costs("gpipe", overheads, recompute=True)[0]
    assert again.forward_s == pytest.approx(0.5 * plain.forward_s)
    assert again.recompute_s == pytest.approx(0.25 * plain.forward_s)


def test_backwards_are_quicker_where_they_follow_their_forward() -> None:
    overheads = Overheads(backward_after_forward=0.5)
    first, last = costs("1f1b", overheads)
    plain_first, plain_last = costs("1f1b", Overheads())
    assert (first.backward_s, last.backward_s) == (plain_first.backward_s, 0.5 * plain_last.backward_s)
    assert [c.backward_s for c in costs("gpipe", overheads)] == [plain_first.backward_s, plain_last.backward_s]
    both = costs("gpipe", overheads, recompute=True)
    assert [c.backward_s for c in both] == [0.5 * plain_first.backward_s, 0.5 * plain_last.backward_s]


def test_updates_pay_for_a_copy_where_the_version_before_is_still_needed() -> None:
    overheads = Overheads(update_s_per_byte=1e-6, version_s_per_byte=1e-6)
    update_s = {schedule: [c.update_s for c in costs(schedule, overheads)] for schedule in ("1f1b", "pipedream")}
    first_s, last_s = update_s["1f1b"]
    assert update_s["pipedream"] == [2 * first_s, last_s]
    assert [c.update_s for c in costs("pipedream-2bw", overheads)] == [2 * first_s, 2 * last_s]


def test_an_exchange_takes_its_factor_longer_on_top_of_the_latency() -> None:
    plan = plan_for("data-parallel", (6,), 2)
    plain = costs_of(plan, PROFILE, CLUSTER)[0].reduce_s
    slow = costs_of(plan, replace(PROFILE, overheads=Overheads(exchange_factor=3.0)), CLUSTER)[0].reduce_s
    latency_s = 2 * CLUSTER.levels[0].latency_s  # a ring of two devices has two hops
    assert slow - latency_s == pytest.approx(3 * (plain - latency_s))


@pytest.mark.parametrize(("schedule", "stops", "replicas"), SHAPES)
def test_the_rules_are_what_the_streams_show_in_steady_state(
    schedule: str, stops: tuple[int, ...], replicas: int
) -> None:
    """Most updates leave a version that is still used, most backwards follow their forward, where the rules say so."""
    plan = plan_for(schedule, stops, replicas)
    for lane in predict(plan, batches=12).lanes:
        stream = [event.instruction for event in lane.events()]
        last = last_uses(stream)
        updates = [(index, i) for index, i in enumerate(stream) if isinstance(i, Update)]
        kept = [last[update.version - 1] > index for index, update in updates]
        rule = schedule_named(schedule).keeps_versions(plan.replicas, lane.stage)
        assert (sum(kept) > len(kept) / 2) == rule
        compute = [i for i in stream if is_compute(i)]
        follows = [
            isinstance(before, Forward | Recompute) and before.microbatch == i.microbatch
            for before, i in pairwise(compute)
            if isinstance(i, Backward)
        ]
        if plan.depth == 1 or lane.stage == plan.depth - 1:
            hot = backward_follows_forward(schedule_named(schedule), recompute=False, last=True)
            assert (sum(follows) > len(follows) / 2) == hot


@pytest.mark.parametrize("field", ["forward_without_graph", "recompute", "backward_after_forward", "exchange_factor"])
def test_shares_are_above_nothing(field: str) -> None:
    with pytest.raises(InvalidInputError, match=field):
        Overheads(**{field: 0.0})
