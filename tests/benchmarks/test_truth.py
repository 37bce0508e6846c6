"""The comparison with measured iterations: its files, its predictions, its errors and its fit."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.truth.__main__ import main
from benchmarks.truth.counted import count_rows
from benchmarks.truth.planned import Planned, PlayedRow, taken, usable_bytes
from benchmarks.truth.report import predictions, regrets
from benchmarks.truth.rows import COLUMNS, Row, read_rows
from pipeplan.errors import InvalidInputError

SMALL = Row(
    source="mine",
    gpu="a100-80gb",
    model="gpt-small",
    gpus=8,
    nodes_of=8,
    hidden=256,
    layers=4,
    heads=8,
    kv_heads=8,
    ffn=1024,
    vocab=1024,
    sequence_length=128,
    tensor_parallel=1,
    pipeline_parallel=1,
    data_parallel=8,
    context_parallel=1,
    batch=64,
    virtual_stages=1,
    microbatch=2,
    sharding="none",
    sequence_parallel=False,
    recompute="none",
    precision="fp16-mixed",
    measured=0.05,
    unit="s/iteration",
    memory_gib=None,
)
LLAMA = replace(SMALL, model="llama-small", sharding="fsdp", precision="bf16", kv_heads=2, memory_gib=10.0)


def written(path: Path, rows: list[Row], **changes: str) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in rows:
            fields = {name: getattr(row, name) for name in COLUMNS}
            fields["sequence_parallel"] = int(row.sequence_parallel)
            writer.writerow({**fields, **changes})
    return path


def played(*rows: Row) -> list[PlayedRow]:
    planned = Planned(count_rows(rows), rows)
    return [plays[taken(row, plays)] for row, plays in zip(rows, planned.plays(), strict=True)]


def seconds(*rows: Row) -> list[float]:
    return [each.seconds for each in played(*rows)]


def test_rows_are_read_back_with_empty_columns(tmp_path: Path) -> None:
    rows = [SMALL, replace(LLAMA, microbatch=None, virtual_stages=None)]
    assert read_rows(written(tmp_path / "rows.csv", rows)) == rows


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"gpus": "7"}, "rows.csv:2 gpus: must be the product of the degrees"),
        ({"hidden": "wide"}, "rows.csv:2 hidden: must be a whole number of at least 1"),
        ({"microbatch": "0"}, "rows.csv:2 microbatch: must be a whole number of at least 1"),
        ({"batch": "63"}, "rows.csv:2 batch: must be a multiple of data_parallel"),
        ({"gpu": "tpu"}, "rows.csv:2 gpu: must be one of a100-40gb"),
        ({"unit": "miles"}, "rows.csv:2 unit: must be one of s/iteration"),
        ({"sharding": "zero-9"}, "rows.csv:2 sharding: must be one of none"),
        ({"measured": "nan"}, "rows.csv:2 measured: must be a number above 0"),
    ],
)
def test_a_wrong_row_gets_one_error(tmp_path: Path, changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        read_rows(written(tmp_path / "rows.csv", [SMALL], **changes))
    assert str(caught.value).startswith(sentence)


def test_a_file_without_the_schema_ends_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    monkeypatch.setattr(sys, "argv", ["truth", str(path), "--json"])
    assert main() == 2
    assert capsys.readouterr().err.startswith("error: other.csv: must have the columns source, gpu")


def test_json_has_every_row_and_null_where_there_is_nothing_to_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "rows.csv", [SMALL, replace(SMALL, microbatch=4), replace(LLAMA, source="other")])
    monkeypatch.setattr(sys, "argv", ["truth", str(path), "--json"])
    assert main() == 0
    found = json.loads(capsys.readouterr().out)
    one, other = found["sources"]
    assert (one["source"], one["rows"], one["memory_mean_error"]) == ("mine", 2, None)
    assert one["mean_regret"] is not None and other["mean_regret"] is None and other["memory_mean_error"] > 0
    assert len(found["rows"]) == 3 and all(row["fits"] for row in found["rows"])


def test_more_work_takes_longer() -> None:
    base, deep, wide, long, again = seconds(
        SMALL,
        replace(SMALL, layers=8),
        replace(SMALL, hidden=1024, ffn=4096),
        replace(SMALL, batch=128),
        replace(SMALL, recompute="full"),
    )
    assert min(deep, wide, long, again) > base


def test_a_pipeline_of_one_microbatch_takes_all_its_stages_in_turn() -> None:
    #   p ranks, m microbatches of (F + B): (m + p - 1) (F + B) where all ranks take the same
    row = replace(SMALL, layers=64, pipeline_parallel=4, data_parallel=2)
    few, many = seconds(replace(row, batch=4), replace(row, batch=4 * 9))
    alone, several = seconds(
        replace(row, pipeline_parallel=1, data_parallel=8, batch=16),
        replace(row, pipeline_parallel=1, data_parallel=8, batch=16 * 9),
    )
    step_s = (several - alone) / 8
    assert 0.9 * step_s < few < 1.3 * step_s
    assert (many - few) / 8 == pytest.approx(step_s / 4, rel=0.3)


def test_what_is_not_published_is_the_fastest_choice() -> None:
    row = replace(SMALL, pipeline_parallel=2, data_parallel=4, microbatch=None, virtual_stages=None)
    open_s, *given = seconds(
        row, *(replace(row, microbatch=b, virtual_stages=v) for b in (1, 2, 4, 8, 16) for v in (1, 2))
    )
    assert open_s == min(given)


def test_an_fsdp_pipeline_has_as_many_microbatches_as_ranks_unless_it_says_so() -> None:
    row = replace(LLAMA, pipeline_parallel=4, data_parallel=2, batch=64, microbatch=None)
    assert row.microbatches == (64 // 2 // 4,)
    assert replace(row, microbatch=2).microbatches == (2,)
    assert replace(row, pipeline_parallel=1, data_parallel=8).microbatches == (1, 2, 4, 8)
    assert replace(row, sharding="none").microbatches == (1, 2, 4, 8, 16)


def test_sharded_states_and_recomputation_hold_less() -> None:
    rows = tuple(
        replace(LLAMA, sharding=sharding, recompute=recompute)
        for sharding, recompute in [("zero-2", "none"), ("fsdp", "none"), ("fsdp", "selective"), ("fsdp", "full")]
    )
    held = [each.held_bytes for each in played(*rows)]
    assert held == sorted(held, reverse=True) and len(set(held)) == 4


def test_a_row_that_holds_more_than_its_device_is_not_said_to_fit() -> None:
    row = replace(SMALL, layers=24, hidden=8192, heads=64, kv_heads=64, ffn=32768, vocab=51200, sequence_length=2048)
    assert played(row)[0].held_bytes > usable_bytes(row)


def test_regret_is_what_the_predicted_best_loses() -> None:
    rows = [replace(SMALL, measured=1.0), replace(SMALL, microbatch=8, measured=1.5)]
    found = predictions(rows)
    by_prediction = min(found, key=lambda each: each.predicted_s)
    assert regrets(found) == [by_prediction.row.measured / 1.0 - 1]
    assert regrets(found[:1]) == []
