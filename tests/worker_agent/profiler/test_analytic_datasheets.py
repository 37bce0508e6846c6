"""Datasheets: what they must hold, those that have names, and the times that follow from them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pipeplan.documents.devices import KNOWN_TYPES
from pipeplan.errors import InvalidInputError
from worker_agent.profiler.analytic import update_s_per_byte, version_s_per_byte
from worker_agent.profiler.datasheets import DATASHEETS, Datasheet, find_datasheet
from worker_agent.profiler.kernels import duration_s
from worker_agent.profiler.operations import DeviceOperation

SHEET = Datasheet(
    name="slow",
    memory_bytes=1000,
    flops_per_s={"float32": 100.0},
    memory_bandwidth_bytes_per_s=10.0,
    compute_efficiency=0.5,
    memory_efficiency=0.2,
    launch_s=0.25,
)
DOCUMENT: dict[str, Any] = {
    "name": "slow",
    "memory_bytes": 1000,
    "flops_per_s": {"float32": 100.0},
    "memory_bandwidth_bytes_per_s": 10.0,
}


def operation(*, flops: int, moved_bytes: int, dtype: str = "float32") -> DeviceOperation:
    return DeviceOperation(name="mm", flops=flops, dtype=dtype, moved_bytes=moved_bytes)


def test_an_operation_takes_the_longer_of_its_arithmetic_and_its_traffic() -> None:
    #   50 flop/s and 2 bytes/s are reached:  100 flop take 2 s, 2 bytes 1 s
    assert duration_s([operation(flops=100, moved_bytes=2)], SHEET) == 2.0
    assert duration_s([operation(flops=100, moved_bytes=6)], SHEET) == 3.0
    assert duration_s([operation(flops=100, moved_bytes=2), operation(flops=0, moved_bytes=2)], SHEET) == 3.0


def test_a_gpu_waits_for_its_host_and_a_cpu_is_its_own() -> None:
    quick = [operation(flops=5, moved_bytes=0)] * 4  # 0.1 s each, launched in 0.25 s each
    assert duration_s(quick, SHEET) == 1.0
    assert duration_s(quick, dataclasses.replace(SHEET, kind="cpu")) == pytest.approx(1.4)
    assert duration_s([], SHEET) == 0.0


def test_arithmetic_in_a_dtype_without_a_speed_is_refused_and_traffic_is_not() -> None:
    assert duration_s([operation(flops=0, moved_bytes=2, dtype="int64")], SHEET) == 1.0
    with pytest.raises(
        InvalidInputError, match="flops_per_s: must hold bfloat16, in which a part of the model computes"
    ):
        duration_s([operation(flops=1, moved_bytes=0, dtype="bfloat16")], SHEET)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "passes"),
    [
        ("sgd", "float32", 3),  # gradient in, weight in and out
        ("momentum", "float32", 5),
        ("adam", "float32", 7),
        ("adamw", "float64", 7),
        ("sgd", "bfloat16", 6),  # in halves of 4 bytes: gradient 1, float32 copy 2 + 2, weight 1
        ("adam", "float16", 14),
    ],
)
def test_an_update_moves_gradients_weights_and_states(optimizer: str, dtype: str, passes: int) -> None:
    assert update_s_per_byte(optimizer, dtype, SHEET) == passes / 2.0


def test_a_version_is_read_and_written() -> None:
    assert version_s_per_byte(SHEET) == 1.0


@pytest.mark.parametrize("name", sorted(DATASHEETS))
def test_datasheets_with_names_hold_what_their_kind_has(name: str) -> None:
    sheet = find_datasheet(name)
    assert sheet.kind == "gpu" and sheet.device().usable_bytes > 10 * 2**30
    assert sheet.flops_per_s["float16"] >= sheet.flops_per_s["float32"] > 1e12
    assert sheet.link_bandwidth_bytes_per_s is not None
    assert sheet.link_bandwidth_bytes_per_s < sheet.memory_bandwidth_bytes_per_s


def test_a_file_is_read_with_documented_defaults(tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(DOCUMENT))
    found = find_datasheet(str(path))
    assert (found.compute_efficiency, found.memory_efficiency, found.launch_s) == (0.78, 0.85, 5e-5)
    assert (found.kernel_s, found.multiprocessors) == (0.0, None)
    assert (found.kind, found.context_bytes, found.link_bandwidth_bytes_per_s) == ("gpu", 0, None)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"flops_per_s": {"int8": 1e12}}, "flops_per_s"),
        ({"flops_per_s": {}}, "flops_per_s"),
        ({"flops_per_s": {"float32": 0}}, "flops_per_s.float32"),
        ({"flops_per_s": {"float32": "fast"}}, "flops_per_s.float32"),
        ({"flops_per_s": 312e12}, "flops_per_s"),
        ({"memory_bandwidth_bytes_per_s": 0}, "memory_bandwidth_bytes_per_s"),
        ({"memory_bandwidth_bytes_per_s": -1.0}, "memory_bandwidth_bytes_per_s"),
        ({"memory_bandwidth_bytes_per_s": float("nan")}, "memory_bandwidth_bytes_per_s"),
        ({"memory_bandwidth_bytes_per_s": float("inf")}, "memory_bandwidth_bytes_per_s"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"memory_bytes": 2.5}, "memory_bytes"),
        ({"compute_efficiency": 0}, "compute_efficiency"),
        ({"compute_efficiency": 1.2}, "compute_efficiency"),
        ({"memory_efficiency": -0.1}, "memory_efficiency"),
        ({"launch_s": -1e-6}, "launch_s"),
        ({"launch_s": float("nan")}, "launch_s"),
        ({"attention_efficiency": 1.5}, "attention_efficiency"),
        ({"kernel_s": -1e-6}, "kernel_s"),
        ({"multiprocessors": 0}, "multiprocessors"),
        ({"kind": "tpu"}, "kind"),
        ({"name": " "}, "name"),
        ({"context_bytes": 1000}, "context_bytes"),
        ({"allocator_reserve": 1.0}, "allocator_reserve"),
        ({"link_bandwidth_bytes_per_s": 0}, "link_bandwidth_bytes_per_s"),
        ({"memory_bandwith": 1}, "memory_bandwith"),
    ],
)
def test_a_wrong_file_is_refused_by_the_field(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(DOCUMENT | change))
    with pytest.raises(InvalidInputError) as caught:
        find_datasheet(str(path))
    assert caught.value.field == f"{path}: {field}"


def test_neither_a_name_nor_a_file_is_refused_with_the_names() -> None:
    with pytest.raises(InvalidInputError, match="analytic: must be a datasheet's file, or one of a100-40gb, a100-80gb"):
        find_datasheet("a100")
    with pytest.raises(InvalidInputError, match=r"\(near: h100-pcie, h100-sxm\), got 'H100'"):
        find_datasheet("H100")


def test_the_datasheets_are_the_types_that_planners_know_by_name() -> None:
    assert {key: sheet.device() for key, sheet in DATASHEETS.items()} == {
        key: known.device for key, known in KNOWN_TYPES.items()
    }
