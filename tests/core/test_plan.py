"""What a plan cannot be."""

from dataclasses import replace

import pytest

from planner_service.contract.documents import dump, parse_plan, plan_document
from planner_service.core.errors import InvalidInputError
from planner_service.core.plan import Plan, Worker
from tests.worker.runtime.plans import make_plan


def interleaved() -> Plan:
    """2 ranks with 2 of the 4 stages each."""
    return make_plan("1f1b-interleaved", (0, 1, 2, 3, 4), chunks=2)


def test_an_interleaved_plan_has_a_worker_for_several_stages() -> None:
    plan = interleaved()
    assert (plan.depth, plan.workers, plan.placement) == (4, 2, (Worker(stage=0), Worker(stage=1)))
    assert parse_plan(dump(plan_document(plan))) == plan


@pytest.mark.parametrize(
    ("changes", "law"),
    [
        ({"schedule": "1f1b"}, "chunks: must divide the 4 stages, and is 1 but for 1f1b-interleaved"),
        ({"chunks": 3}, "chunks: must divide the 4 stages"),
        ({"chunks": 0}, "chunks: must be a whole number of at least 1"),
        ({"chunks": 1}, "placement: must place each of the 4 replicas"),
        ({"placement": (Worker(stage=0), Worker(stage=2))}, "placement: must place each of the 2 replicas"),
        ({"split_backward_half_way": True}, "split_backward_half_way: is a variant of split_backward"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, object], law: str) -> None:
    with pytest.raises(InvalidInputError, match=law):
        replace(interleaved(), **changes)  # type: ignore[arg-type]
