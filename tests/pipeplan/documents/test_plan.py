"""What a plan cannot be, its price, and its id."""

import json
from dataclasses import replace
from typing import Any

import pytest

from pipeplan.documents.files import DEGREES, PRICE, dump, parse_plan, plan_document
from pipeplan.documents.identity import canonical_json, content_id, text_id
from pipeplan.documents.plan import Alternative, ClosedForm, Plan, Simulated, Stage, Worker
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


def gpipe_by_hand() -> Plan:
    costs = unit_costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    return Plan(
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
        closed_form=ClosedForm(time_per_microbatch_s=4.0, throughput_samples_per_s=0.5, bubble_fraction=0.25),
        optimal_in_flight=2,
        configurations_considered=1,
    )


def as_in_0_1_0(plan: Plan) -> dict[str, Any]:
    """The plan's document as release 0.1.0 wrote it: the figures were the closed form's, an alternative had one."""
    document: dict[str, Any] = json.loads(dump(plan_document(plan)))
    form = document.pop("closed_form")
    for later in (*DEGREES, "sequence_parallel", "engine", "sharding", "offload"):
        del document[later]
    for other in document["alternatives"]:
        closed_form = other.pop("closed_form_samples_per_s", None)
        if other["throughput_samples_per_s"] is None:
            other["throughput_samples_per_s"] = closed_form
    return document | {name: form[name] for name in PRICE}


def test_a_plan_has_the_id_and_is_read_from_the_document_of_earlier_releases() -> None:
    """Stored plans keep their ids: these were computed by the release before plans had warnings."""
    plan = gpipe_by_hand()
    assert content_id(plan) == "73c230e4167e4dc9fc2d302a5141a9cc"
    assert content_id(as_in_0_1_0(plan)) == "1bbf555965506be7d4a9abdd12885268"
    assert parse_plan(as_in_0_1_0(plan)) == plan
    warned = replace(plan, warnings=("look here",))
    assert content_id(warned) != content_id(plan)
    assert plan_document(warned)["warnings"] == ("look here",)
    assert parse_plan(dump(plan_document(warned))) == warned
    assert parse_plan(dump(plan_document(plan))) == plan


def played(plan: Plan, *, throughput_samples_per_s: float) -> Plan:
    """The plan with what its streams gave."""
    simulated = Simulated(
        batches=4,
        throughput_samples_per_s=throughput_samples_per_s,
        bubble_fraction=0.4,
        busy_fraction=(0.6, 0.6),
        peak_memory_bytes=(1, 1),
    )
    return replace(plan, simulated=simulated)


def test_the_price_of_a_plan_is_what_its_streams_give() -> None:
    plan = played(gpipe_by_hand(), throughput_samples_per_s=0.25)
    assert (plan.throughput_samples_per_s, plan.bubble_fraction) == (0.25, 0.4)
    assert plan.time_per_microbatch_s == 8.0  # the closed form's 4 s at 0.5 samples/s are 2 samples
    document = plan_document(plan)
    assert [document[name] for name in PRICE] == [8.0, 0.25, 0.4]
    assert document["closed_form"] == {
        "cost_model": "by hand",
        "time_per_microbatch_s": 4.0,
        "throughput_samples_per_s": 0.5,
        "bubble_fraction": 0.25,
    }
    assert parse_plan(dump(document)) == plan


def test_a_plan_whose_streams_were_not_played_has_no_price() -> None:
    plan = gpipe_by_hand()
    assert [plan_document(plan)[name] for name in PRICE] == [None, None, None]
    still = played(plan, throughput_samples_per_s=0.0)
    assert (still.throughput_samples_per_s, still.time_per_microbatch_s) == (0.0, None)


def test_a_price_in_a_document_is_read_off_its_streams_whatever_the_document_says() -> None:
    plan = played(gpipe_by_hand(), throughput_samples_per_s=0.25)
    document = plan_document(plan) | dict.fromkeys(PRICE, 99.0)
    assert parse_plan(dump(document)) == plan


@pytest.mark.parametrize(("planner", "played_rate", "closed_form_rate"), [("gpipe", None, 0.3), ("auto", 0.3, None)])
def test_an_alternatives_rate_of_an_earlier_release_keeps_the_id_and_gets_its_name(
    planner: str, played_rate: float | None, closed_form_rate: float | None
) -> None:
    """Only `auto` had played its alternatives."""
    other = Alternative(
        schedule="1f1b",
        depth=2,
        width=1,
        microbatch_size=2,
        microbatches=4,
        recompute=False,
        throughput_samples_per_s=played_rate,
        closed_form_samples_per_s=closed_form_rate,
        memory_bytes=1,
        reason="slower: 0.3 samples/s",
    )
    plan = replace(gpipe_by_hand(), planner=planner, alternatives=(other,))
    stored = as_in_0_1_0(plan)
    assert stored["alternatives"][0]["throughput_samples_per_s"] == 0.3
    assert parse_plan(stored) == plan
    assert content_id(plan) == stored["id"]
    hashed = {name: value for name, value in stored.items() if name not in ("id", "feasible", "depth", "width")}
    assert text_id(canonical_json(hashed)) == stored["id"]


def test_an_id_tells_a_rate_with_both_figures_from_one_with_either() -> None:
    one = Alternative(
        schedule="1f1b",
        depth=2,
        width=1,
        microbatch_size=2,
        microbatches=4,
        recompute=False,
        throughput_samples_per_s=0.3,
        memory_bytes=1,
        reason="slower",
    )
    assert content_id(one) != content_id(replace(one, closed_form_samples_per_s=0.4))
    assert content_id(one) == content_id(replace(one, throughput_samples_per_s=None, closed_form_samples_per_s=0.3))


def test_an_earlier_releases_document_that_lacks_a_figure_is_refused_by_name() -> None:
    document = as_in_0_1_0(gpipe_by_hand())
    del document["bubble_fraction"]
    with pytest.raises(InvalidInputError, match=r"closed_form.bubble_fraction: is required"):
        parse_plan(document)


def test_a_schedule_whose_ranks_have_one_stage_is_refused_for_a_plan_with_several() -> None:
    with pytest.raises(InvalidInputError, match="chunks: must be 1 for 1f1b, in which a rank has one stage, got 2"):
        program_of(replace(interleaved(), schedule="1f1b"), batches=1)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"stages": ' + "[" * 100_000, "{", '{"a": %s}' % ("9" * 5000)])
def test_a_text_that_is_no_plan_is_refused_however_deep(content: str) -> None:
    """A deeply nested file ended `pipeplan check` and `pipeplan-agent run` in a traceback."""
    with pytest.raises(InvalidInputError, match="plan: must be a JSON document"):
        parse_plan(content)
