"""The comparison with measured iterations: its files, its predictions, its figures."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.truth.__main__ import main
from benchmarks.truth.files import read_rows
from benchmarks.truth.models import MODELS, spec_of
from benchmarks.truth.predictions import Prediction, predictions
from benchmarks.truth.report import figures, regrets
from benchmarks.truth.rows import Row
from pipeplan.errors import InvalidInputError, PipeplanError

SMALL = {
    "source": "mine",
    "gpu": "a100-80gb",
    "model": "llama-small",
    "gpus": 8,
    "nodes_of": 8,
    "hidden": 256,
    "layers": 4,
    "heads": 8,
    "kv_heads": 8,
    "ffn": 1024,
    "vocab": 1024,
    "sequence_length": 128,
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "virtual_stages": 1,
    "data_parallel": 8,
    "context_parallel": 1,
    "sharding": "none",
    "sequence_parallel": 0,
    "recompute": "none",
    "precision": "bf16",
    "microbatch": 2,
    "batch": 64,
    "measured": 0.05,
    "unit": "s/iteration",
    "memory_gib": "",
}
SWEEP = {key: value for key, value in SMALL.items() if key not in ("measured", "unit", "sequence_parallel")} | {
    "gpu": "h100",
    "microbatches": 4,
    "tokens_s_gpu": 1,
    "seconds": 0.1,
    "status": "ok",
    "twin_ratio": "1.1",
}
BRIDGE = {
    "release": "26.04",
    "model": "LLAMA3_8B",
    "system": "DGX-GB200",
    "gpus": 8,
    "precision": "MXFP8",
    "batch": 128,
    "microbatch": 1,
    "sequence_length": 8192,
    "fsdp": "0",
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "context_parallel": 1,
    "virtual_stages": "n/a",
    "expert_parallel": "n/a",
    "tokens_s_gpu": 20000,
}
MLPERF = {
    "benchmark": "llama31_405b",
    "gpu": "NVIDIA H100-SXM5-80GB",
    "gpus": 512,
    "gpus_per_node": 8,
    "sequence_length": 8192,
    "tensor_parallel": 8,
    "pipeline_parallel": 8,
    "virtual_stages": 8,
    "context_parallel": 2,
    "data_parallel": 4,
    "microbatch": 1,
    "batch": 1152,
    "precision": "fp8",
    "seconds_per_step": 55.1,
}


def written(path: Path, *rows: dict[str, object]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def rows_of(tmp_path: Path, *changes: dict[str, object], of: dict[str, object] = SMALL) -> list[Row]:
    return read_rows(written(tmp_path / "rows.csv", *(of | each for each in changes)))


def predicted(rows: list[Row]) -> list[Prediction]:
    found = dict(predictions(rows))
    assert all(isinstance(found[row], Prediction) for row in rows), found
    return [found[row] for row in rows]  # type: ignore[misc]


def test_a_row_becomes_a_question_with_its_degrees(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, {"tensor_parallel": 2, "data_parallel": 4, "recompute": "full", "sharding": "zero-1"})
    asked = row.options
    assert (asked.engine, asked.tensor, asked.stages, asked.data, asked.sharding) == ("megatron", 2, 1, 4, "optimizer")
    assert (asked.recompute, asked.recompute_unit, asked.offload) == (True, "block", "none")
    wide: dict[str, object] = {"gpus": 32, "data_parallel": 32}
    (sharded, hybrid) = rows_of(tmp_path, wide | {"sharding": "fsdp"}, wide | {"sharding": "hsdp"})
    assert (sharded.options.replicate, hybrid.options.replicate) == (1, 4) and hybrid.options.sharding == "weights"
    (open_row,) = rows_of(tmp_path, {"recompute": "", "microbatch": ""})
    assert open_row.options.recompute is None and open_row.options.microbatch_size is None


def test_each_form_of_file_is_read(tmp_path: Path) -> None:
    (sweep, dirty) = rows_of(tmp_path, {}, {"twin_ratio": "3.0"}, of=SWEEP)
    assert (sweep.clean, dirty.clean, sweep.seconds) == (True, False, 0.1)
    assert sweep.cluster.device.name == "H100-SXM5-80GB"
    (bridge,) = rows_of(tmp_path, {}, of=BRIDGE)
    assert (bridge.precision, bridge.cluster.devices, bridge.spec) == ("mxfp8", 8, MODELS["llama38b"])
    assert bridge.seconds == 128 * 8192 / (20000 * 8)
    (sharded,) = rows_of(tmp_path, {"fsdp": 8}, of=BRIDGE)
    assert (sharded.program.engine, sharded.options.sharding) == ("fsdp", "weights")
    rows = rows_of(tmp_path, {}, {"benchmark": "llama2_70b_lora"}, of=MLPERF)
    assert [row.options.data for row in rows] == [4]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"gpus": "7", "tensor_parallel": 2}, "rows.csv:2 gpus: must be a multiple of the degrees 2 x 1 x 1"),
        ({"hidden": "wide"}, "rows.csv:2 hidden: must be a whole number of at least 1"),
        ({"gpu": "tpu"}, "rows.csv:2 gpu: must begin with one of a100-40gb"),
        ({"unit": "miles"}, "rows.csv:2 unit: must be one of s/iteration"),
        ({"sharding": "zero-9"}, "rows.csv:2 sharding: must be one of none"),
        ({"measured": "nan"}, "rows.csv:2 measured: must be a number above 0"),
    ],
)
def test_a_wrong_row_gets_one_error(tmp_path: Path, changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        rows_of(tmp_path, changes)
    assert str(caught.value).startswith(sentence)


def test_a_file_of_no_form_ends_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    monkeypatch.setattr(sys, "argv", ["truth", str(path), "--json"])
    assert main() == 2
    assert capsys.readouterr().err.startswith("error: other.csv: must have the columns of one form")


def test_json_has_every_row_and_why_one_has_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[dict[str, object]] = [{}, {"microbatch": 4}, {"tensor_parallel": 8, "data_parallel": 1, "heads": 4}]
    path = written(tmp_path / "rows.csv", *(SMALL | each for each in changes))
    monkeypatch.setattr(sys, "argv", ["truth", str(path), "--json"])
    assert main() == 0
    found = json.loads(capsys.readouterr().out)
    (source,) = found["source and GPU"].values()
    assert (source["rows"], source["no_answer"], source["clean"], source["memory_mean_error"]) == (3, 1, 2, None)
    assert "heads" in found["rows"][2]["error"] and all(row["fits"] for row in found["rows"][:2])


def test_more_work_takes_longer(tmp_path: Path) -> None:
    changes: list[dict[str, object]] = [{}, {"layers": 8}, {"hidden": 1024, "ffn": 4096}, {"batch": 128}]
    base, *more = (each.seconds for each in predicted(rows_of(tmp_path, *changes, {"recompute": "full"})))
    assert min(more) > base


def test_a_row_that_holds_more_than_its_device_does_not_fit_but_has_seconds(tmp_path: Path) -> None:
    sizes: dict[str, object] = {"layers": 24, "hidden": 8192, "heads": 64, "kv_heads": 64, "ffn": 32768}
    (found,) = predicted(rows_of(tmp_path, sizes | {"sequence_length": 2048}))
    assert not found.fits and found.seconds > 0


def test_figures_are_of_clean_rows_and_regret_is_what_the_predicted_best_loses(tmp_path: Path) -> None:
    found = predicted(rows_of(tmp_path, {"measured": 1.0}, {"microbatch": 8, "measured": 1.5}))
    best = min(found, key=lambda each: each.seconds)
    assert regrets(found) == [(best.row.seconds or 0) - 1]
    assert regrets(found[:1]) == []
    dirty = replace(found[0], row=replace(found[0].row, clean=False))
    known = figures([(each.row, each) for each in (dirty, found[1])])
    assert (known["clean"], known["mean_error"]) == (1, abs(found[1].error or 0))


def test_a_model_whose_sizes_are_not_known_has_no_answer(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, {"model": "Nobody_9B"}, of=BRIDGE)
    ((_, found),) = predictions([row])
    assert spec_of("Nobody_9B") == "" and isinstance(found, PipeplanError)
