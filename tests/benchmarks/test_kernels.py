"""The comparison with measured kernels: its files, its errors, and what it fits."""

import csv
import gzip
import json
import sys
from pathlib import Path

import pytest

from benchmarks.kernels import main, read_attention, read_collectives, read_products
from pipeplan.documents.devices import KNOWN_TYPES

PRODUCTS = [
    {"system": "h100_sxm", "gemm_dtype": dtype, "m": m, "n": 4096, "k": k}
    for dtype in ("bfloat16", "fp8")
    for m in (512, 2048, 8192)
    for k in (1024, 8192)
]
ATTENTION = [
    {"system": "h100_sxm", "batch_size": 2, "isl": length, "num_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    for length in (1024, 4096, 16384)
]
COLLECTIVES = [
    {"system": "h100_sxm", "nccl": nccl, "op_name": name, "nccl_dtype": "half", "num_gpus": units, "elements": elements}
    for nccl in ("2.9.1", "2.10.3")
    for name in ("all_gather", "reduce_scatter", "all_reduce", "alltoall")
    for units in (2, 8)
    for elements in (2**18, 2**22, 2**26)
]


def written(folder: Path, *, slower: float) -> Path:
    """The three files, with the estimates' own times multiplied."""
    estimated = {"gemm": PRODUCTS, "attention": ATTENTION, "collectives": COLLECTIVES}
    for name, rows in estimated.items():
        write(folder / f"{name}.csv.gz", [{**row, "ms": 1.0} for row in rows])
    for name, read in (("gemm", read_products), ("attention", read_attention), ("collectives", read_collectives)):
        rows = estimated[name]
        groups = read([{key: str(value) for key, value in row.items()} | {"ms": "1"} for row in rows])
        seconds = iter([float(each) for group in groups for each in group.seconds(group.stored or {})])
        if name == "collectives":  # those of an older release are left out; kinds come in the order of the rows
            rows = [row for row in rows if row["nccl"] == "2.10.3"]
        write(folder / f"{name}.csv.gz", [{**row, "ms": 1e3 * slower * next(seconds)} for row in rows])
    return folder


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def compared(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str
) -> list[dict[str, object]]:
    monkeypatch.setattr(sys, "argv", ["kernels", str(folder), "--json", *more])
    assert main() == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_kernels_that_take_as_long_as_estimated_have_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared(written(tmp_path, slower=1.0), monkeypatch, capsys)
    kernels = [each["kernels"] for each in found]
    assert kernels == ["bfloat16", "fp8", "attention", "gather", "all_reduce", "all_to_all"]
    assert all(each["mean_error"] == pytest.approx(0, abs=1e-9) for each in found)


def test_a_fit_finds_slower_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in compared(written(tmp_path, slower=1.25), monkeypatch, capsys, "--fit"):
        before, after = each["mean_error"], each["fitted_mean_error"]
        assert isinstance(before, float) and isinstance(after, float)
        assert before == pytest.approx(0.2) and after < 0.05, each["kernels"]


def test_the_newest_release_of_nccl_counts() -> None:
    rows = [{key: str(value) for key, value in row.items()} | {"ms": "1"} for row in COLLECTIVES]
    assert sum(len(each.group.sizes) for each in read_collectives(rows)) == len(COLLECTIVES) // 2
    assert KNOWN_TYPES["h100-sxm"].collectives is not None


def test_a_folder_without_the_files_ends_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels", str(tmp_path)])
    assert main() == 2
    assert capsys.readouterr().err == f"error: folder: must hold gemm.csv.gz, got {str(tmp_path)!r}\n"
