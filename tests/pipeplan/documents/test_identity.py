"""Identity: later fields change no id, and no class of a document is without the rule."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from pipeplan.documents.calibration import Calibration
from pipeplan.documents.certificate import Certificate
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse, parse_plan, plan_document
from pipeplan.documents.identity import FIRST_FIELDS, canonical_json, content_id, plain
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Profile
from pipeplan.planners.problem import Options, PlanningProblem
from planner_service.overview.openapi import CLUSTER, PROFILE
from tests.planner_service.answers import halve

PLAN: Any = halve("pipedream-2bw", PlanningProblem(profile=PROFILE, cluster=CLUSTER, batch_size=16))


def classes_of(kind: Any, seen: set[type]) -> Iterator[type]:
    """The dataclasses that a type is made of."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind not in seen:
        seen.add(kind)
        yield kind
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            yield from classes_of(hints[field.name], seen)
    for part in typing.get_args(kind):
        yield from classes_of(part, seen)


def test_every_class_of_a_document_has_its_first_fields_written_down() -> None:
    found = {
        kind.__name__: kind
        for document in (Profile, Cluster, Plan, Calibration, Options)
        for kind in classes_of(document, set())
    }
    assert found.keys() == FIRST_FIELDS.keys()
    for name, kind in found.items():
        assert set(FIRST_FIELDS[name].split()) <= {field.name for field in dataclasses.fields(kind)}


def extended(document: Any, **values: Any) -> Any:
    """The document as a release has it that added a field to its class."""
    kind = type(document)
    later = dataclasses.make_dataclass(
        kind.__name__,
        [("novelty", tuple, dataclasses.field(default_factory=tuple))],
        bases=(kind,),
        frozen=True,
        kw_only=True,
    )
    given = {field.name: getattr(document, field.name) for field in dataclasses.fields(document)}
    return later(**given, **values)


@pytest.mark.parametrize("document", [PROFILE, CLUSTER, PLAN], ids=lambda document: type(document).__name__)
def test_a_later_field_is_in_an_id_only_where_it_says_something(document: Any) -> None:
    assert content_id(extended(document)) == content_id(document)
    assert canonical_json(extended(document)) == canonical_json(document)
    assert content_id(extended(document, novelty=("new",))) != content_id(document)


def test_later_fields_of_a_plan_are_left_out_at_their_defaults() -> None:
    assert isinstance(PLAN, Plan)
    later = {"planner_version", "engine", "form", "sharding", "offload", "choices", "autocast", "tied", "precision"}
    later |= {"basis", "recompute_modules", "replicate", "graphs", "a2a_overlap", "offload_share"}
    assert {field.name for field in dataclasses.fields(PLAN)} - plain(PLAN).keys() == {"warnings", *later}
    warned = plain(dataclasses.replace(PLAN, warnings=("of another type",)))
    assert {field.name for field in dataclasses.fields(PLAN)} - warned.keys() == later
    assert "reduce_inside_s" not in plain(PLAN)["costs"][0]


def test_a_play_that_is_added_changes_no_id_and_one_of_the_plans_own_does() -> None:
    assert isinstance(PLAN, Plan) and PLAN.simulated is not None
    unplayed = dataclasses.replace(PLAN, simulated=None)
    added = dataclasses.replace(PLAN, simulated=dataclasses.replace(PLAN.simulated, added_within=1000))
    assert content_id(added) == content_id(unplayed) != content_id(PLAN)
    document = plan_document(added)
    assert (document["id"], parse_plan(document)) == (content_id(unplayed), added)
    assert document["throughput_samples_per_s"] == PLAN.simulated.throughput_samples_per_s


def test_whole_numbers_in_fields_of_floats_have_the_id_of_the_document_that_is_read_again() -> None:
    """`latency_s=0` in Python was another cluster than the file that was written of it: its plans were not proven."""
    level = dataclasses.replace(CLUSTER.levels[0], bandwidth_bytes_per_s=10**9, latency_s=0)
    cluster = dataclasses.replace(CLUSTER, levels=(level,))
    again = parse(Cluster, canonical_json(cluster))
    assert again == cluster and content_id(again) == content_id(cluster)
    proof = Certificate(method="method", quantity="seconds", value=2, bound=1, claim="claim", witness=(1, 2.5))
    proven = dataclasses.replace(PLAN, certificate=proof)
    again_planned = parse_plan(plan_document(proven))
    assert again_planned == proven and content_id(again_planned) == content_id(proven)
