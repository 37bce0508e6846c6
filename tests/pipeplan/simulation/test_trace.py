"""The Chrome trace keeps the Trace Event Format, and what Perfetto needs to draw all of it."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any, get_args

import pytest

from pipeplan.documents.files import dump
from pipeplan.programs.instructions import Transfer
from pipeplan.programs.text import format_instruction, parse_instruction
from pipeplan.programs.timeline import Lane, Timeline
from pipeplan.programs.timeline_document import timeline_document
from pipeplan.simulation.predict import predict, predict_ends
from pipeplan.simulation.trace import FIRST_TRACK, MOST_BYTES, chrome_trace
from tests.schedules import SCHEDULES, chunks_of, microbatches_of
from tests.worker_agent.runtime.plans import make_plan
from worker_agent.runtime.job import RunJob

Event = dict[str, Any]
REQUIRED = {
    "X": {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"},
    "s": {"name", "cat", "ph", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "ph", "id", "pid", "tid", "ts", "bp"},
    "C": {"name", "ph", "pid", "tid", "ts", "args"},
}
NAMED = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def events_of(*timelines: Timeline) -> list[Event]:
    """The events of a trace that reads back and keeps the format."""
    document = json.loads(chrome_trace({str(number): timeline for number, timeline in enumerate(timelines)}))
    events: list[Event] = document["traceEvents"]
    for event in events:
        if event["ph"] == "M":
            assert set(event["args"]) == {NAMED[event["name"]]}
        else:
            assert set(event) == REQUIRED[event["ph"]]
            assert event["ts"] >= 0
            assert round(event["ts"] * 1000) == pytest.approx(event["ts"] * 1000, abs=1e-3)  # whole nanoseconds
    return events


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def slices(events: Iterable[Event]) -> dict[tuple[int, int], list[Event]]:
    """By process and track, in the order of the file."""
    found: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def enclosing(tracks: dict[tuple[int, int], list[Event]], event: Event) -> Event:
    """The one slice of the event's track that the event is within."""
    at = ns(event["ts"])
    within = [s for s in tracks[event["pid"], event["tid"]] if ns(s["ts"]) <= at < ns(s["ts"]) + ns(s["dur"])]
    assert len(within) == 1
    return within[0]


def transfer(event: Event) -> tuple[str, str, str, int]:
    """Direction, kind, microbatch and peer of a transfer's text, which may name the rank's chunk as well."""
    found = re.fullmatch(r"([<>])([FB])(\d+)(?:\.\d+)?:(\d+)", event["name"])
    assert found is not None
    return found[1], found[2], found[3], int(found[4])


def require_drawable(events: list[Event]) -> int:
    """Slices follow each other, each arrow goes from a send to its receive and forward in time; their number."""
    tracks = slices(events)
    for (process, number), track in tracks.items():
        assert number not in (0, process)  # Perfetto would draw both on one line, and drop what overlaps there
        end = 0
        for its in track:
            assert ns(its["ts"]) >= end
            assert ns(its["dur"]) >= 1
            end = ns(its["ts"]) + ns(its["dur"])
    ends: dict[int, dict[str, Event]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in ends[event["id"]]
            ends[event["id"]][event["ph"]] = event
    for arrow in ends.values():
        start, finish = arrow["s"], arrow["f"]
        assert start["ts"] < finish["ts"]
        assert (start["name"], start["cat"], start["pid"]) == (finish["name"], finish["cat"], finish["pid"])
        sent, received = enclosing(tracks, start), enclosing(tracks, finish)
        assert transfer(sent) == (">", *transfer(received)[1:3], finish["tid"] - FIRST_TRACK)
        assert transfer(received) == ("<", *transfer(sent)[1:3], start["tid"] - FIRST_TRACK)
    counters: dict[tuple[int, str], int] = {}
    for event in events:
        if event["ph"] == "C":
            key = event["pid"], event["name"]
            assert list(event["args"]) == ["bytes"]
            assert type(event["args"]["bytes"]) is int
            assert ns(event["ts"]) > counters.get(key, -1)
            counters[key] = ns(event["ts"])
    return len(ends)


def timeline_of(schedule: str, *, batches: int = 3, **options: Any) -> Timeline:
    chunks = chunks_of(schedule)
    depth = 1 if schedule.startswith("data-parallel") else 4
    microbatches = microbatches_of(schedule, 4, depth=depth * chunks)
    plan = make_plan(schedule, tuple(range(depth * chunks + 1)), microbatches=microbatches, chunks=chunks, **options)
    return predict(plan, batches=batches)


def transfers(timeline: Timeline, side: str) -> int:
    return sum(format_instruction(one).startswith(side) for lane in timeline.lanes for one in lane.instructions)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_send_has_an_arrow_to_its_receive(schedule: str) -> None:
    timeline = timeline_of(schedule)
    events = events_of(timeline, timeline)
    assert require_drawable(events) == 2 * transfers(timeline, ">") == 2 * transfers(timeline, "<")
    for number, lane in enumerate(timeline.lanes):
        names = [s["name"] for s in slices(events)[1, FIRST_TRACK + number]]
        assert names == [format_instruction(one) for one in lane.instructions]
        held = [
            e["args"]["bytes"]
            for e in events
            if e["ph"] == "C" and (e["pid"], e["tid"]) == (1, FIRST_TRACK + lane.rank)
        ]
        assert held == [size for size, _ in groupby(lane.memory_bytes)]  # a counter keeps its value until it changes


def test_unequal_replicas_have_their_arrows() -> None:
    plan = make_plan("pipedream", (0, 1, 2, 4), replicas=(3, 2, 1), microbatches=1)
    timeline = predict(plan, batches=2)
    assert require_drawable(events_of(timeline)) == transfers(timeline, ">") == 2 * 2 * 2 * 6


def test_arrows_are_drawn_where_nothing_costs_anything() -> None:
    """Chains of instructions without width at one instant: each is a nanosecond, and no arrow goes back in time."""
    plan = make_plan("1f1b", (0, 1, 2, 3, 4))
    free = tuple(
        replace(c, forward_s=0.0, backward_s=1.0, backward_input_s=0.0, backward_weight_s=1.0) for c in plan.costs
    )
    timeline = predict(replace(plan, costs=free), batches=2)
    assert require_drawable(events_of(timeline)) == transfers(timeline, ">")
    for lane, track in zip(timeline.lanes, slices(events_of(timeline)).values(), strict=True):
        moved = [abs(ns(s["ts"]) - at_s * 1e9) for s, at_s in zip(track, lane.start_s, strict=True)]
        assert max(moved) < 1000  # nanoseconds, of seconds


def test_processes_stand_in_the_order_in_which_they_are_given_and_tracks_in_that_of_ranks() -> None:
    timeline = timeline_of("1f1b")
    events = [e for e in events_of(timeline, timeline) if e["ph"] == "M"]
    assert [(e["args"]["name"], e["pid"]) for e in events if e["name"] == "process_name"] == [("0", 1), ("1", 2)]
    assert [e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"] == [1, 2]
    assert next(e["args"]["name"] for e in events if e["name"] == "thread_name") == "rank 0 (stage 0, replica 0)"
    assert [e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"] == [0, 1, 2, 3] * 2


def lane(rank: int, *events: tuple[str, float, float]) -> Lane:
    texts, starts, ends = zip(*events, strict=True)
    return Lane(
        rank=rank,
        stage=rank,
        replica=0,
        instructions=tuple(map(parse_instruction, texts)),
        start_s=starts,
        end_s=ends,
        memory_bytes=(0,) * len(texts),
    )


def test_clocks_that_differ_between_nodes_give_no_receive_that_ends_before_it_begins() -> None:
    early = Timeline(
        lanes=(lane(0, (">F1:1", 5.0, 6.0)), lane(1, ("<F1:0", 1.0, 2.0), ("F1", 2.0, 9.0))), batch_size=1, batches=1
    )
    assert require_drawable(events_of(early)) == 1


def test_what_a_window_cuts_off_has_no_arrow() -> None:
    cut = Timeline(
        lanes=(lane(0, ("<B1:1", 0.0, 1.0), (">F2:1", 1.0, 2.0)), lane(1, ("<F2:0", 0.0, 2.0), (">B2:0", 3.0, 3.0))),
        batch_size=1,
        batches=1,
    )
    assert require_drawable(events_of(cut)) == 1


def test_lanes_that_wait_for_each_other_are_drawn_without_those_arrows() -> None:
    """No run is like that; a timeline that somebody posts may be."""
    knot = Timeline(
        lanes=(
            lane(0, ("<B1:1", 0.0, 1.0), (">F1:1", 1.0, 2.0)),
            lane(1, ("<F1:0", 0.0, 2.0), (">B1:0", 2.0, 3.0)),
        ),
        batch_size=1,
        batches=1,
    )
    events = events_of(knot)
    assert require_drawable(events) == 0
    assert sum(e["ph"] == "X" for e in events) == 4


def test_both_ends_of_a_long_run_are_drawn_as_in_the_whole_one() -> None:
    """What is predicted of them is instruction by instruction, and second by second, what is predicted of all."""
    plan = make_plan("pipedream-2bw", (0, 1, 2, 3, 4))
    whole = predict(plan, batches=60)
    ends, summary = predict_ends(plan, batches=60, window=6)
    for part, all_ in zip(ends.lanes, whole.lanes, strict=True):
        some = len(part.instructions) - sum(1 for at_s in part.start_s if at_s > all_.end_s[-1] / 2)
        rest = len(part.instructions) - some
        assert part.instructions == all_.instructions[:some] + all_.instructions[-rest:]
        assert part.start_s == pytest.approx(all_.start_s[:some] + all_.start_s[-rest:])
        assert part.memory_bytes == all_.memory_bytes[:some] + all_.memory_bytes[-rest:]
    assert summary.makespan_s == pytest.approx(whole.makespan_s)
    assert summary.bubble_fraction == pytest.approx(whole.bubble_fraction)
    assert require_drawable(events_of(ends)) > 0


def test_no_kind_of_transfer_is_without_arrows() -> None:
    assert {kind.__name__ for kind in get_args(Transfer)} == {
        "SendActivation", "RecvActivation", "SendGradient", "RecvGradient",
    }  # fmt: skip


@pytest.mark.each_case
@pytest.mark.parametrize("most_bytes", [8_000, 50_000, 200_000, 10_000_000])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "pipedream", "zb-v"])
def test_a_bounded_trace_holds_the_start_and_the_end_and_says_what_is_left_out(schedule: str, most_bytes: int) -> None:
    timeline = timeline_of(schedule, batches=20)
    text = chrome_trace({"measured": timeline, "predicted": timeline}, most_bytes=most_bytes, notes={"recorded": "all"})
    assert len(text) <= most_bytes
    document = json.loads(text)
    require_drawable(document["traceEvents"])
    assert document["otherData"]["recorded"] == "all"
    count = sum(len(lane.instructions) for lane in timeline.lanes)
    drawn = slices(document["traceEvents"])
    kept = sum(len(drawn[1, FIRST_TRACK + number]) for number in range(len(timeline.lanes)))
    note = f"{count - kept:,} of {count:,} instructions, in the middle"
    whole = chrome_trace({"measured": timeline, "predicted": timeline}, notes={"recorded": "all"})
    assert (text == whole) == (kept == count) == (len(whole) <= most_bytes)
    assert document["otherData"].get("left out, measured") == (note if kept < count else None)
    for number, lane in enumerate(timeline.lanes):
        texts = list(map(format_instruction, lane.instructions))
        names = [event["name"] for event in drawn[1, FIRST_TRACK + number]]
        first = next((n for n, (one, other) in enumerate(zip(names, texts, strict=False)) if one != other), len(names))
        assert names == texts[:first] + texts[len(texts) - len(names) + first :]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_a_run_records_by_itself_is_within_the_bound(schedule: str) -> None:
    """A run of 5,000 steps wrote a trace of 99 MB, and a minute of it was its end."""
    plan = make_plan(schedule, (0, 1, 2, 3, 4), microbatches=8)
    job = RunJob(plan=plan, model="m:f", data="m:f", steps=5000, seed=0, learning_rate=0.1, out="out", device="cpu")
    window = job.window(job.program())
    assert window is not None
    ends, _ = predict_ends(plan, batches=5000, window=window)
    assert 8_000 * 2 < sum(len(lane.instructions) for lane in ends.lanes) <= 20_000
    bounded = chrome_trace({"measured": ends, "predicted": ends}, most_bytes=MOST_BYTES)
    assert MOST_BYTES / 2 < len(bounded) <= MOST_BYTES
    assert len(dump(timeline_document(ends))) < MOST_BYTES / 2
