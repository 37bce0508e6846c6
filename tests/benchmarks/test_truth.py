"""The comparison with measured iterations: its files, its predictions, its errors and its fit."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.truth.__main__ import main
from benchmarks.truth.constants import GPUS, Constants, EngineConstants, stored
from benchmarks.truth.counted import count_rows
from benchmarks.truth.fit import fit, places
from benchmarks.truth.floor import Floors
from benchmarks.truth.planned import Planned, PlayedRow, taken, usable_bytes
from benchmarks.truth.report import document, predictions, regrets
from benchmarks.truth.rows import COLUMNS, Row, read_rows
from benchmarks.truth.traced import pass_s
from pipeplan.errors import InvalidInputError
from worker_agent.profiler.datasheets import DATASHEETS

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
    return [plays[taken(row, plays)] for row, plays in zip(rows, planned.plays(stored()[0]), strict=True)]


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
    for group in ("gpus", "engines"):
        most = 6 if group == "gpus" else 3
        assert all(len(each) <= most for each in found["constants"][group].values())


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


def test_layers_that_vtrain_timed_were_run_once_and_had_a_vocabulary_of_their_own() -> None:
    row = replace(SMALL, source="vtrain-single-node", recompute="full", tensor_parallel=2, data_parallel=4)
    full_s, none_s, iteration_s = seconds(row, replace(row, recompute="none"), replace(row, source="vtrain-multi-node"))
    assert full_s == none_s != iteration_s
    counted = count_rows([row])
    ((embedding, layer, head),) = counted.values()
    share = 50257 // 2
    assert embedding.parameters == (share + row.sequence_length) * row.hidden
    assert head.parameters == share * row.hidden + 2 * row.hidden and head.tied_parameters == 0
    assert not any(op.dtype == "float32" and op.moved_bytes > share for op in head.forward.operations)
    assert not any(end.forward.collectives or end.backward.collectives for end in (embedding, head))
    assert not any(op.name == "add_" for op in layer.backward.operations)


def test_a_stage_that_vtrain_timed_waits_while_it_sends() -> None:
    #   p ranks of equal layers: m + p - 1 times F + B; a middle rank sends 2 b s h numbers of 16 bits there and back
    row = replace(SMALL, source="vtrain-single-node", layers=64, pipeline_parallel=4, data_parallel=2, vocab=64)
    few, many, single, several = seconds(
        replace(row, batch=16),
        replace(row, batch=16 * 9),
        replace(row, batch=16, pipeline_parallel=1, data_parallel=8),
        replace(row, batch=16 * 9, pipeline_parallel=1, data_parallel=8),
    )
    assert row.microbatch == 2
    message_s = 2 * 2 * 2 * row.sequence_length * row.hidden / (800 * 2**30 / 8 / 4)
    microbatches = 16 * 8 / 2 / row.microbatch
    layers_s = (several - single) / (microbatches / 4) / 4
    assert (many - few) / microbatches == pytest.approx(layers_s + 2 * message_s, rel=0.05)


def test_a_pass_in_a_trace_is_that_of_the_slower_of_host_and_device() -> None:
    row = replace(SMALL, source="vtrain-single-node", tensor_parallel=2, data_parallel=4)
    ((_, layer, _),) = count_rows([row]).values()
    engine, trace = EngineConstants(host_s=1e-4, gap_s=1e-6, unshared_s=4e-6), row.program.trace
    assert trace is not None
    operations, exchanged_s = len(layer.forward.operations), 2 * trace.exchange_s
    assert pass_s(layer.forward, 0.0, 2, engine, trace) == pytest.approx(operations * 1e-4 + exchanged_s)
    assert pass_s(layer.forward, 1.0, 2, engine, trace) == pytest.approx(1 + operations * 3e-6 + exchanged_s)
    assert pass_s(layer.forward, 1.0, 1, engine, trace) == pytest.approx(1 + operations * 1e-6 + exchanged_s)


def test_a_second_forward_would_need_all_of_an_a100_at_once() -> None:
    """Layers 2,048 wide with 4 more sequences of 1,024 tokens take 7.53 ms more in vTrain's rows of one node."""
    #   (T(20 layers, 8 sequences) - T(12) - T(20, 4) + T(12, 4)) / 8 layers, of tensor = pipeline = 1
    more_s = ((0.826262 - 0.553300) - (0.456596 - 0.304100)) / 2 / 8
    row = replace(
        SMALL, source="vtrain-single-node", hidden=2048, heads=16, kv_heads=16, ffn=8192, sequence_length=1024
    )
    eight, four = (next(iter(count_rows([replace(row, microbatch=b)]).values()))[1] for b in (8, 4))

    def least_s(times: int) -> float:
        """At an A100's peaks: 312 Tflop/s and 2,039 GB/s."""
        each = [
            sign * count * (op.flops / 312e12 if op.flops else op.moved_bytes / 2039e9)
            for layer, sign in ((eight, 1), (four, -1))
            for one_pass, count in ((layer.forward, times), (layer.backward, 1))
            for op in one_pass.operations
        ]
        return sum(each)

    assert 0.97 < least_s(2) / more_s < 1
    assert 0.7 < least_s(1) / more_s < 0.75


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
    found = predictions(rows, *stored())
    by_prediction = min(found, key=lambda each: each.predicted_s)
    assert regrets(found) == [by_prediction.row.measured / 1.0 - 1]
    assert regrets(found[:1]) == []


@pytest.mark.parametrize(("layers_s", "equal"), [
    #  by microbatch size; by the constants the host determines all three
    ((3e-3, 3e-3, 3e-3), True),
    ((2e-3, 3e-3, 4e-3), False),
])  # fmt: skip
def test_layers_that_never_take_less_for_more_work_have_no_floor(
    layers_s: tuple[float, float, float], equal: bool
) -> None:
    floors = Floors(traced_rows(dict(zip((1, 2, 4), layers_s, strict=True))), stored()[0]).found()
    assert floors["monotone"].mean_error == pytest.approx(0, abs=1e-3)
    assert floors["monotone"].mean_regret == pytest.approx(0, abs=1e-3)
    assert (floors["equal launches"].mean_error < 1e-3) == equal


def test_layers_that_take_less_for_more_work_have_a_floor() -> None:
    #   1 sequence 3 ms, 2 sequences 2 ms: a third of the layers' share is wrong, or half of it
    one, two = traced_rows({1: 3e-3}), traced_rows({2: 2e-3})
    third, half = (sum(1 - 0.01 / row.seconds for row in rows) * part for rows, part in ((one, 1 / 3), (two, 1 / 2)))
    found = Floors(one + two, stored()[0]).found()
    assert found["monotone"].mean_error == pytest.approx(min(third, half) / len(one + two), rel=0.01)


def traced_rows(layers_s: dict[int, float]) -> list[Row]:
    """Iterations of two depths and two batches, of 10 ms and of the layers' seconds by microbatch size."""
    base = replace(SMALL, source="vtrain-single-node", vocab=64)
    return [
        replace(base, microbatch=size, layers=layers, batch=batch, measured=0.01 + layers * batch / 8 / size * each_s)
        for size, each_s in layers_s.items()
        for layers in (4, 8)
        for batch in (64, 128)
    ]


def test_stored_constants_cover_every_gpu_and_every_engine() -> None:
    constants, without = stored()
    assert set(constants.gpus) == {gpu.constants for gpu in GPUS.values()}
    assert set(constants.engines) == {"megatron", "deepspeed", "fsdp", "vtrain-layers"}
    assert all(Constants.read(each.document()) == each for each in (constants, *without.values()))


@pytest.mark.campaign
def test_a_fit_finds_the_constants_that_made_the_rows() -> None:
    start, _ = stored()
    a100 = replace(start.gpus["a100"], compute_efficiency=0.5, memory_efficiency=0.4)
    true = replace(start, gpus={**start.gpus, "a100": a100})
    rows = [
        replace(SMALL, hidden=hidden, ffn=4 * hidden, layers=layers, batch=8 * size, microbatch=size)
        for hidden, layers, size in ((1024, 8, 8), (2048, 4, 8), (4096, 2, 4), (8192, 2, 4))
    ]
    counted = count_rows(rows)
    choices = [[(row.microbatch or 1, 1)] for row in rows]
    made = [each.seconds for plays in Planned(counted, rows).plays(true, choices) for each in plays.values()]
    rows = [replace(row, measured=each_s) for row, each_s in zip(rows, made, strict=True)]
    before = document(predictions(rows, start, {}), start)["sources"]
    found = fit(counted, rows, start, rounds=12)
    assert isinstance(before, list) and before[0]["mean_error"] > 0.1 > 5 * max(abs(found.differences))
    assert len(list(places(found.constants))) == len(list(places(start)))


@pytest.mark.parametrize(("sheet", "gpu"), [("a100-80gb", "a100"), ("a100-40gb", "a100"), ("h100-sxm", "h100")])
def test_datasheets_hold_what_was_fitted(sheet: str, gpu: str) -> None:
    found, fitted = DATASHEETS[sheet], stored()[0].gpus[gpu]
    for field in ("compute_efficiency", "memory_efficiency", "attention_efficiency", "kernel_s"):
        assert getattr(found, field) == pytest.approx(getattr(fitted, field), rel=0.03)
