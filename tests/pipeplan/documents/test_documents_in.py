"""What is wrong with a profile or a cluster is named by field, rule and value."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import dump, parse, read
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import Options

MEASUREMENT = {
    "microbatch_size": 1,
    "forward_s": 0.1,
    "backward_s": 0.2,
    "input_bytes": 1,
    "output_bytes": 2,
    "activation_bytes": 3,
}


def profile_document(**measured: Any) -> dict[str, Any]:
    return {
        "model": {"name": "m"},
        "device": {"name": "d", "memory_bytes": 10},
        "dtype": "float32",
        "blocks": [{"name": "a", "weight_bytes": 4, "measurements": [MEASUREMENT | measured]}],
    }


def cluster_document(**level: Any) -> dict[str, Any]:
    return {
        "device": {"name": "d", "memory_bytes": 10},
        "levels": [{"size": 2, "bandwidth_bytes_per_s": 1.0} | level],
    }


def test_the_least_documents_are_accepted_and_parse_back() -> None:
    profile = parse(Profile, json.dumps(profile_document()))
    assert parse(Profile, dump(profile)) == profile
    cluster = parse(Cluster, json.dumps(cluster_document(latency_s=0.1)))
    assert parse(Cluster, dump(cluster)) == cluster
    assert cluster.devices == 2


@pytest.mark.parametrize(
    ("measured", "field", "value"),
    [
        ({"forward_ms": 3}, "blocks.0.measurements.0.forward_ms", "3"),
        ({"forward_s": float("nan")}, "blocks.0.measurements.0.forward_s", "nan"),
        ({"backward_s": float("inf")}, "blocks.0.measurements.0.backward_s", "inf"),
        ({"forward_s": -0.5}, "blocks.0.measurements.0.forward_s", "-0.5"),
        ({"microbatch_size": 0}, "blocks.0.measurements.0.microbatch_size", "0"),
        ({"output_bytes": -1}, "blocks.0.measurements.0.output_bytes", "-1"),
        ({"output_bytes": 1.5}, "blocks.0.measurements.0.output_bytes", "1.5"),
        ({"output_bytes": 10**25}, "blocks.0.measurements.0.output_bytes", "1" + 25 * "0"),
        ({"forward_s": 1e308}, "blocks.0.measurements.0.forward_s", "1e+308"),
        ({"forward_s": "16"}, "blocks.0.measurements.0.forward_s", "'16'"),
        ({"forward_s": True}, "blocks.0.measurements.0.forward_s", "True"),
        ({"microbatch_size": "1"}, "blocks.0.measurements.0.microbatch_size", "'1'"),
        ({"microbatch_size": True}, "blocks.0.measurements.0.microbatch_size", "True"),
        ({"microbatch_size": 2**63}, "blocks.0.measurements.0.microbatch_size", str(2**63)),
        ({"backward_input_s": 0.1}, "blocks.0.measurements.0.backward_input_s", "0.1"),
    ],
)
def test_a_bad_measurement_is_named(measured: dict[str, Any], field: str, value: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse(Profile, profile_document(**measured))
    assert caught.value.field == field
    assert str(caught.value).endswith(f"got {value}")


@pytest.mark.parametrize(
    ("level", "field"),
    [
        ({"size": 0}, "levels.0.size"),
        ({"size": "2"}, "levels.0.size"),
        ({"bandwidth_bytes_per_s": 0}, "levels.0.bandwidth_bytes_per_s"),
        ({"bandwidth_bytes_per_s": 5e-324}, "levels.0.bandwidth_bytes_per_s"),
        ({"bandwidth_bytes_per_s": float("nan")}, "levels.0.bandwidth_bytes_per_s"),
        ({"latency_s": -1}, "levels.0.latency_s"),
        ({"latency_ms": 1}, "levels.0.latency_ms"),
        ({"size": 10**7}, "levels"),
    ],
)
def test_a_bad_level_is_named(level: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse(Cluster, cluster_document(**level))
    assert caught.value.field == field


def test_a_whole_number_may_be_written_as_either_of_jsons_numbers() -> None:
    profile = parse(Profile, json.dumps(profile_document(microbatch_size=1.0, output_bytes=2.0, forward_s=3)))
    measured = profile.blocks[0].measurements[0]
    assert (measured.microbatch_size, measured.output_bytes, measured.forward_s) == (1, 2, 3.0)
    assert isinstance(measured.output_bytes, int)


def test_a_block_without_a_name_is_refused() -> None:
    document = profile_document()
    document["blocks"][0]["name"] = " "
    with pytest.raises(InvalidInputError, match=r"blocks\.0\.name: must not be empty, got ' '"):
        parse(Profile, document)


def test_a_text_is_no_truth_value() -> None:
    with pytest.raises(InvalidInputError, match=r"recompute: .*, got 'yes'"):
        parse(Options, {"recompute": "yes"})


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(cluster_document()), encoding="utf-8-sig")
    assert read(Cluster, path).devices == 2


def test_blocks_measured_at_different_sizes_are_refused() -> None:
    document = profile_document()
    document["blocks"].append({"name": "b", "weight_bytes": 0, "measurements": [MEASUREMENT | {"microbatch_size": 2}]})
    with pytest.raises(InvalidInputError, match=r"blocks\.1\.measurements: must measure the same .*\[1\], got \[2\]"):
        parse(Profile, document)


def test_a_key_that_a_file_holds_twice_is_refused(tmp_path: Path) -> None:
    """The last one would win without a word."""
    path = tmp_path / "cluster.json"
    text = json.dumps(cluster_document())
    path.write_text(text.replace('"size": 2', '"size": 2, "size": 3'), encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"cluster\.json: document: must not hold a key twice, got 'size'"):
        read(Cluster, path)
