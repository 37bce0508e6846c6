"""What a plan cannot be, and its id."""

from dataclasses import replace

import pytest

from pipeplan.documents.files import dump, parse_plan, plan_document
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Plan, Stage, Worker
from pipeplan.documents.profile import Model
from pipeplan.documents.stage_costs import unit_costs
from pipeplan.errors import InvalidInputError
from pipeplan.simulation.predict import program_of
from tests.worker_agent.runtime.plans import make_plan


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


def test_a_plan_without_warnings_has_the_id_and_the_document_from_before_there_were_any() -> None:
    """Stored plans keep their ids: these were computed by the release before plans had warnings."""
    costs = unit_costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    plan = Plan(
        planner="gpipe",
        cost_model="by hand",
        model=Model(name="chain"),
        dtype="float32",
        profile_id="p" * 32,
        cluster_id="c" * 32,
        batch_size=8,
        stages=(Stage(start=0, stop=2), Stage(start=2, stop=3)),
        costs=(costs, costs),
        placement=(Worker(stage=0), Worker(stage=1)),
        schedule="gpipe",
        microbatch_size=2,
        microbatches=4,
        optimizer="sgd",
        memory_accounting="training",
        time_per_microbatch_s=4.0,
        throughput_samples_per_s=0.5,
        bubble_fraction=0.25,
        optimal_in_flight=2,
        configurations_considered=1,
    )
    assert content_id(plan) == "73c230e4167e4dc9fc2d302a5141a9cc"
    assert content_id(plan_document(plan)) == "1bbf555965506be7d4a9abdd12885268"
    warned = replace(plan, warnings=("look here",))
    assert content_id(warned) != content_id(plan)
    assert plan_document(warned)["warnings"] == ("look here",)
    assert parse_plan(dump(plan_document(warned))) == warned
    assert parse_plan(dump(plan_document(plan))) == plan


def test_a_schedule_whose_ranks_have_one_stage_is_refused_for_a_plan_with_several() -> None:
    with pytest.raises(InvalidInputError, match="chunks: must be 1 for 1f1b, in which a rank has one stage, got 2"):
        program_of(replace(interleaved(), schedule="1f1b"), batches=1)
