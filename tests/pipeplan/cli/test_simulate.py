"""`pipeplan simulate`: unit-cost pipelines."""

import json
from pathlib import Path

import pytest

from pipeplan.documents.files import parse
from pipeplan.programs.text import parse_stream
from pipeplan.programs.timeline_document import TimelineDocument
from tests.pipeplan.cli.commands import Ended, pipeplan


def simulate(schedule: str, *arguments: str, stages: int = 2, microbatches: int = 2) -> Ended:
    return pipeplan(
        "simulate", "--schedule", schedule, "--stages", str(stages), "--microbatches", str(microbatches), *arguments
    )


def test_json_holds_bubble_streams_timeline_and_peaks() -> None:
    ended = simulate("1f1b", "--forward", "1", "--backward-input", "1", "--backward-weight", "1", "--json")
    assert (ended.status, ended.err) == (0, "")
    document = ended.document
    assert document["bubble_fraction"] == pytest.approx(1 / 3)
    assert document["makespan_s"] == 9.0
    assert document["streams"] == [
        "F1 >F1:1 F2 >F2:1 <B1:1 B1 <B2:1 B2 U1",
        "<F1:0 F1 B1 >B1:0 <F2:0 F2 B2 >B2:0 U1",
    ]
    assert (document["in_flight"], document["weight_versions"]) == ([2, 1], [1, 1])
    timeline = parse(TimelineDocument, document["timeline"]).timeline()
    assert [lane.instructions for lane in timeline.lanes] == [parse_stream(text) for text in document["streams"]]


def test_pipedream_updates_after_every_minibatch_of_every_batch() -> None:
    document = simulate("pipedream", "--batches", "3", "--json", stages=4, microbatches=4).document
    assert (document["microbatches"], document["batches"]) == (4, 3)
    assert all(stream.count("U") == 12 for stream in document["streams"])
    assert document["weight_versions"] == [4, 3, 2, 1]
    assert document["in_flight"] == [4, 3, 2, 1]


def test_vertical_sync_holds_a_version_for_every_stage() -> None:
    document = simulate("pipedream-vertical-sync", "--batches", "3", "--json", stages=4, microbatches=4).document
    assert document["weight_versions"] == [4, 4, 4, 4]
    assert document["in_flight"] == [4, 3, 2, 1]


def test_two_bp_fills_the_gaps_and_draws_them() -> None:
    ended = simulate("1f1b", "--two-bp", stages=2, microbatches=2)
    assert ended.out.splitlines() == [
        "stage 0  F1 F2    I1 W1 I2 W2",
        "stage 1     F1 I1 F2 I2 W1,2-",
        "bubble 14.29 %, makespan 7 s",
    ]


def test_interleaved_chunks_are_drawn_a_row_a_rank() -> None:
    ended = simulate("1f1b-interleaved", "--chunks", "2", "--backward-weight", "0", stages=2, microbatches=2)
    assert ended.out.splitlines() == [
        "stage 0  F1-- F2-- F1.1 F2.1      B1.1      B2.1 B1-- B2--",
        "stage 1       F1-- F2-- F1.1 B1.1 F2.1 B2.1 B1-- B2--",
        "bubble 20.00 %, makespan 5 s",
    ]
    document = simulate("1f1b-interleaved", "--json", stages=2, microbatches=2).document
    assert (document["stages"], document["chunks"]) == (2, 2)
    assert document["streams"][1].endswith("U1 U1.1")


def test_zb_h1_is_drawn_with_the_weight_gradients_that_wait() -> None:
    ended = simulate("zb-h1", stages=2, microbatches=3)
    assert ended.out.splitlines() == [
        "stage 0  F1 F2    I1 W1 F3 I2 W2 I3 W3",
        "stage 1     F1 I1 F2 I2 W1 F3 I3 W2 W3",
        "bubble 10.00 %, makespan 10 s",
    ]


def test_two_stages_in_a_v_are_drawn_a_row_a_rank() -> None:
    ended = simulate("zb-v", stages=2, microbatches=3)
    assert ended.out.splitlines() == [
        "stage 0  F1-- F2-- F3-- F1.1 I1.1 W1.1 F2.1 I2.1 W2.1 I1-- W1-- F3.1 I3.1 W3.1 I2-- W2-- I3-- W3--",
        "stage 1       F1-- F1.1 F2-- F2.1 I1.1 W1.1 F3-- I1-- W1-- F3.1 I2.1 W2.1 I2-- I3.1 I3-- W2-- W3.1 W3--",
        "bubble 5.26 %, makespan 9.5 s",
    ]
    for schedule in ("zb-v", "v-half", "dual-pipe-v"):
        document = simulate(schedule, "--json", stages=3, microbatches=8).document
        assert (document["stages"], document["chunks"], document["schedule"]) == (3, 2, schedule)


def test_two_microbatches_wait_for_one_round_trip_over_the_link() -> None:
    """Two turns of stage 0 take 8 s: its own 6 s, and a second for the link in each direction."""
    ended = simulate("1f1b", "--transfer", "1", stages=2, microbatches=5)
    assert ended.out.splitlines() == [
        "stage 0  F1 F2             B1--- F3 B2--- F4       B3--- F5 B4---          B5---",
        "stage 1        F1 B1--- F2 B2---       F3 B3--- F4 B4---       F5 B5---",
        "bubble 37.50 %, makespan 24 s",
    ]


def test_two_bps_memory_saving_variant_is_drawn() -> None:
    ended = simulate("1f1b", "--two-bp-half-way", stages=2, microbatches=4)
    assert ended.out.splitlines() == [
        "stage 0  F1 F2    I1 F3 I2 W1,2- F4 I3 W3 I4 W4",
        "stage 1     F1 I1 F2 I2 W1,2- F3 I3 F4 I4 W3,4-",
        "bubble 7.69 %, makespan 13 s",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schedule", "pipedream", "--two-bp"), "--schedule: must have a flush"),
        (("--schedule", "pipedream-2bw", "--two-bp"), "--schedule: must have a flush"),
        (("--schedule", "1f1b", "--chunks", "2"), "--chunks: is an option of 1f1b-interleaved, got 2"),
        (("--schedule", "1f1b-interleaved", "--chunks", "0"), "--chunks: must be a whole number of at least 1, got 0"),
        (("--schedule", "zb-v", "--chunks", "3"), "--chunks: must be 2 for zb-v, whose ranks hold two stages in a V"),
        (("--schedule", "zigzag"), "--schedule: must be one of naive, gpipe, 1f1b, pipedream, pipedream-2bw"),
        (("--schedule", "1f1b", "--forward", "-1"), "--forward: must be a finite number of at least 0, got -1.0"),
        (("--schedule", "1f1b", "--forward", "nan"), "--forward: must be a finite number of at least 0, got nan"),
        (("--schedule", "1f1b", "--forward", "1e308"), "--forward: must be at most 1e+24, got 1e+308"),
        (("--schedule", "1f1b", "--batches", "0"), "--batches: must be a whole number of at least 1, got 0"),
        (("--schedule", "1f1b", "--batches", "100000000"), "must make at most"),
    ],
)
def test_wrong_input_exits_2_with_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    ended = pipeplan("simulate", "--stages", "4", "--microbatches", "4", *arguments)
    assert (ended.status, ended.out) == (2, "")
    assert message in ended.err


def test_fewer_microbatches_than_stages_are_refused_for_2bw() -> None:
    ended = simulate("pipedream-2bw", stages=4, microbatches=2)
    assert ended.status == 2
    assert "--microbatches: must be at least the number of stages (4) for pipedream-2bw, got 2" in ended.err


def test_a_trace_is_written_beside_the_answer(tmp_path: Path) -> None:
    document = simulate("1f1b", "--trace", str(tmp_path / "trace.json"), "--json").document
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert names == [text for stream in document["streams"] for text in stream.split()]
