"""What is wrong with a document is found without a list of everything that is wrong with it."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError

from pipeplan.documents.cluster import MAX_DEVICES, Cluster
from pipeplan.documents.files import parse, parse_sent, read
from pipeplan.documents.profile import Profile
from pipeplan.documents.validators import MISTAKEN_KEYS, validator_of
from pipeplan.errors import InvalidInputError
from pipeplan.protocol.jobs import Completion, LeaseRequest, ProfileTask
from pipeplan.protocol.plans import PlanRequest
from planner_service.overview.openapi import BODIES
from tests.pipeplan.documents.test_documents_in import MEASUREMENT, cluster_document, profile_document

MANY = 20_000
LEVEL: dict[str, Any] = {"size": 1, "bandwidth_bytes_per_s": 1.0}
REQUEST: dict[str, Any] = {"profile_id": "a", "cluster_id": "b", "planner": "gpipe", "batch_size": 1}
TASK: dict[str, Any] = {"model": "m", "microbatch_sizes": [1]}
RUN = {"token": "t", "result": {"kind": "run", "report": {}, "timeline": {"lanes": [0] * MANY}}}


def _refused(kind: type[Any], document: Any) -> InvalidInputError:
    with pytest.raises(InvalidInputError) as caught:
        parse_sent(kind, json.dumps(document).encode())
    return caught.value


@pytest.mark.parametrize(
    ("kind", "document", "field"),
    [
        (Cluster, cluster_document() | {"levels": [0] * MANY}, "levels.0"),
        (Cluster, cluster_document() | {"levels": [{}] * MANY}, "levels.0.size"),
        (Cluster, cluster_document() | {"levels": [LEVEL] * MANY + [0] * MANY}, f"levels.{MANY}"),
        (Cluster, cluster_document() | {"groups": [[]] * MANY}, "groups.0"),
        (Profile, profile_document() | {"blocks": ["x"] * MANY}, "blocks.0"),
        (Profile, profile_document() | {"edges": [[0]] * MANY}, "edges.0.1"),
        (Profile, profile_document(forward_s="1") | {"edges": [0] * MANY}, "blocks.0.measurements.0.forward_s"),
        (PlanRequest, REQUEST | {"other_profile_ids": [0] * MANY}, "other_profile_ids.0"),
        (PlanRequest, REQUEST | {"options": {"forced_cuts": ["1"] * MANY}}, "options.forced_cuts.0"),
        (LeaseRequest, {"agent": "a", "kinds": ["plan"] * MANY}, "kinds.0"),
        (ProfileTask, TASK | {"agents": [0] * 1000}, "agents.0"),
        (Completion, RUN, "result.run.report.schedule"),
    ],
)
def test_a_list_of_wrong_items_is_one_finding(kind: type[Any], document: Any, field: str) -> None:
    refused = _refused(kind, document)
    assert refused.field == field
    cause = refused.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() < 20
    assert len(str(refused)) < 1000


@pytest.mark.parametrize("path", sorted(BODIES))
def test_an_object_of_far_too_many_keys_is_refused_before_each_of_them_is(path: str) -> None:
    kind: Any = BODIES[path]
    most = validator_of(kind).most_keys
    assert most is not None
    refused = _refused(kind, {f"key {number}": 0 for number in range(most + 1)})
    assert (refused.field, refused.value) == ("document", most + 1)
    assert refused.rule == f"must not hold an object with more than {most} keys"
    assert not isinstance(refused.__cause__, ValidationError)


def test_a_missing_key_is_found_without_another_copy_of_the_document() -> None:
    """Pydantic's own finding holds the object that lacks the key, as Python objects, once for each key."""
    refused = _refused(Profile, {"blocks": [[]] * MANY})
    assert (refused.field, refused.rule, refused.value) == ("model", "is required (and 3 more)", None)
    cause = refused.__cause__
    assert isinstance(cause, ValidationError)
    assert not any(isinstance(finding["input"], dict) for finding in cause.errors())


def test_an_object_within_a_list_may_not_have_far_too_many_keys_either() -> None:
    level = LEVEL | {f"key {number}": 0 for number in range(100)}
    assert "must not hold an object with more than" in _refused(Cluster, cluster_document() | {"levels": [level]}).rule


def test_a_few_unknown_keys_are_named_and_counted() -> None:
    refused = _refused(Cluster, cluster_document() | {f"key{number}": 0 for number in range(MISTAKEN_KEYS // 2)})
    assert (refused.field, refused.rule) == ("key0", f"is not a known key (and {MISTAKEN_KEYS // 2 - 1} more)")


def test_a_text_is_no_number_after_a_count_that_is_written_as_an_amount() -> None:
    """Lists end at their first finding: that a first count was written as 4.0 must not let "4" pass for one."""
    measurements = [MEASUREMENT | {"microbatch_size": 4.0}, MEASUREMENT | {"microbatch_size": "4"}]
    document = profile_document()
    document["blocks"][0]["measurements"] = measurements
    assert _refused(Profile, document).field == "blocks.0.measurements.1.microbatch_size"


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (1.5, "must be a valid integer, got a number with a fractional part"),
        (float("inf"), "must be a finite number"),
        ("4", "must be a valid integer"),
        (True, "must be a valid integer"),
        (None, "must be a valid integer"),
        (0, "must be greater than or equal to 1"),
        (0.0, "must be greater than or equal to 1"),
    ],
)
def test_a_value_that_is_no_count_is_refused_with_the_reason(value: object, rule: str) -> None:
    refused = _refused(PlanRequest, REQUEST | {"batch_size": value})
    assert (refused.field, refused.rule) == ("batch_size", rule)


@pytest.mark.parametrize(
    "document",
    [
        {"x" * 100_000: 0},
        {"levels": ["x" * 100_000]},
        {"levels": {"x": [[0] * 100_000]}},
        {"device": [{"y": "x" * 100_000}], "levels": []},
    ],
)
def test_an_error_is_short_whatever_it_shows(document: Any) -> None:
    refused = _refused(Cluster, document)
    assert len(refused.field) + len(refused.rule) + len(repr(refused.value)) < 1500


def test_the_tag_of_no_task_is_not_repeated_whole() -> None:
    task = cast(type[Any], BODIES["/v1/jobs"])
    assert len(_refused(task, {"kind": "x" * 100_000}).rule) < 500


def test_levels_of_enormous_sizes_are_not_multiplied_out() -> None:
    """Their product has millions of digits, takes minutes, and could not be shown."""
    refused = _refused(Cluster, cluster_document() | {"levels": [LEVEL | {"size": 2**62}] * MANY})
    assert (refused.field, refused.rule) == ("levels", f"must make at most {MAX_DEVICES} devices together")
    assert len(str(refused)) < 200


def test_a_file_of_wrong_items_is_refused_at_the_first(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(cluster_document() | {"levels": [0] * MANY}), encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"levels\.0: must be an object, got 0"):
        read(Cluster, path)


def test_documents_of_our_own_may_have_keys_of_their_own_choice() -> None:
    assert parse(dict[str, int], json.dumps({str(number): number for number in range(1000)}))["999"] == 999


def test_a_list_of_wrong_items_is_not_too_short_as_well() -> None:
    """The sentence ended with "(and 1 more)", for the list that was empty without them."""
    document = {"model": "preset:mlp", "microbatch_sizes": [0]}
    with pytest.raises(InvalidInputError) as caught:
        parse(ProfileTask, document)
    assert str(caught.value) == "microbatch_sizes.0: must be greater than or equal to 1, got 0"
    with pytest.raises(InvalidInputError, match="microbatch_sizes: Tuple should have at least 1 item"):
        parse(ProfileTask, document | {"microbatch_sizes": []})


def test_a_null_character_is_found_behind_any_number_of_backslashes() -> None:
    for backslashes, refused in ((100_001, True), (100_000, False)):
        content = b'{"a": "' + b"\\" * backslashes + b'u0000"}'
        with pytest.raises(InvalidInputError) as caught:
            parse_sent(Cluster, content)
        assert ("null character" in caught.value.rule) is refused
