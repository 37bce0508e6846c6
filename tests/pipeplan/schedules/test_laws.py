"""What the papers prove of the schedules, read off the streams."""

import json
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeplan.costs.memory import chunked_pipeline, held_by
from pipeplan.documents.plan import Worker
from pipeplan.documents.stage_costs import StageCosts, unit_costs
from pipeplan.errors import InvalidInputError
from pipeplan.programs.check import check
from pipeplan.programs.footprint import footprints
from pipeplan.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    SendActivation,
    Update,
    is_compute,
)
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.program import Program, Stream
from pipeplan.programs.text import format_instruction, parse_stream
from pipeplan.programs.two_bp import with_half_way_weight_gradients, with_weight_gradients, without_weight_gradients
from pipeplan.schedules.registry import build, schedule_named
from pipeplan.simulation.play import simulate
from pipeplan.simulation.split_backward import split_backward
from tests.pipeplan.builders import equal_thirds
from tests.schedules import CHUNKED, DATA_PARALLEL, SCHEDULES, STASHING, V_SHAPED, chunks_of, microbatches_of

GOLDEN = Path(__file__).parents[2] / "golden"


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def straight(schedule: str, ranks: int, microbatches: int, batches: int = 1) -> Program:
    """One pipeline, a stage a rank, or two in a V."""
    chunks = 2 if schedule in V_SHAPED else 1
    replicas = (1,) * (ranks * chunks)
    return build(schedule, Pipeline(replicas=replicas, microbatches=microbatches, batches=batches, chunks=chunks))


def bubble(program: Program) -> float:
    return simulate(program, [equal_thirds()] * program.pipeline.depth).bubble_fraction


@pytest.mark.parametrize("row", golden("two_bp_table_1.json")["rows"], ids=lambda r: f"{r['schedule']}-{r['stages']}")
def test_bubbles_with_and_without_2bp_are_those_of_its_table_1(row: dict[str, Any]) -> None:
    program = straight(row["schedule"], row["stages"], row["microbatches"])
    split = split_backward(program, [equal_thirds()] * row["stages"])
    check(split)
    assert bubble(program) == pytest.approx(float(Fraction(*row["fused"])), abs=1e-12)
    assert bubble(split) == pytest.approx(float(Fraction(*row["split"])), abs=1e-12)


@pytest.mark.parametrize(
    "row",
    golden("zero_bubble_table_1.json")["rows"],
    ids=lambda r: f"{r['stages']}-{r['microbatches']}-{'-'.join(map(str, r['seconds']))}",
)
def test_zb_h1s_bubble_and_memory_are_those_of_its_table_1(row: dict[str, Any]) -> None:
    stages, microbatches, (f, b, w) = row["stages"], row["microbatches"], row["seconds"]
    costs = [unit_costs(forward_s=f, backward_input_s=b, backward_weight_s=w)] * stages
    zero, one = (straight(schedule, stages, microbatches) for schedule in ("zb-h1", "1f1b"))
    work_s = microbatches * (f + b + w)
    assert simulate(zero, costs).makespan_s - work_s == row["bubble_zb_h1_s"]
    assert simulate(one, costs).makespan_s - work_s == row["bubble_1f1b_s"]
    assert [most_kept(stream) for stream in zero.streams] == [row["activations"]] * stages
    assert most_kept(one.streams[0]) == row["activations"]


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 2, 2), (2, 2, 8), (4, 2, 4), (4, 3, 8), (8, 4, 16)])
@pytest.mark.parametrize(("forward_s", "backward_s"), [(1.0, 2.0), (1.0, 1.0), (1.0, 3.0)])
def test_interleaved_1f1bs_bubble_is_that_of_one_rank_less_over_microbatches_and_chunks(
    ranks: int, chunks: int, microbatches: int, forward_s: float, backward_s: float
) -> None:
    """Narayanan et al. (2021), section 2.2.2: (p - 1)/(m v) of the ideal time, where 1F1B's is (p - 1)/m."""
    whole = unit_costs(forward_s=forward_s, backward_input_s=backward_s, backward_weight_s=0.0)
    part = unit_costs(forward_s=forward_s / chunks, backward_input_s=backward_s / chunks, backward_weight_s=0.0)
    program = interleaved(ranks, chunks, microbatches)
    check(program)
    ideal_s = microbatches * (forward_s + backward_s)
    timeline = simulate(program, [part] * ranks * chunks)
    assert timeline.makespan_s / ideal_s - 1 == pytest.approx((ranks - 1) / (microbatches * chunks), abs=1e-12)
    plain = simulate(straight("1f1b", ranks, microbatches), [whole] * ranks)
    assert plain.makespan_s / ideal_s - 1 == pytest.approx((ranks - 1) / microbatches, abs=1e-12)


def test_interleaved_1f1bs_streams_are_those_of_its_order() -> None:
    """Narayanan et al. (2021), figure 4, with 2 ranks: two microbatches through a chunk, then two through the next."""
    compute = [
        [i for i in stream.instructions if isinstance(i, Forward | Backward | Update)]
        for stream in interleaved(2, 2, 4).streams
    ]
    assert compute == [
        list(parse_stream("F1 F2 F1.1 F2.1 F3 B1.1 F4 B2.1 F3.1 B1 F4.1 B2 B3.1 B4.1 B3 B4 U1 U1.1")),
        list(parse_stream("F1 F2 F1.1 B1.1 F2.1 B2.1 F3 B1 F4 B2 F3.1 B3.1 F4.1 B4.1 B3 B4 U1 U1.1")),
    ]


@pytest.mark.parametrize("width", [1, 2])
def test_an_interleaved_ranks_stages_keep_the_laws_each_by_itself(width: int) -> None:
    program = interleaved(2, 3, 4, width=width, batches=3, checkpoint_every=2)
    check(program)
    parts = [part for stream in program.streams for part in program.stage_streams(stream)]
    assert sorted((part.stage, part.replica) for part in parts) == [(s, r) for s in range(6) for r in range(width)]
    for stream in program.streams:
        assert [part.stage % 2 for part in program.stage_streams(stream)] == [stream.stage] * 3
    sent = {(part.stage, i.peer) for part in parts for i in part.instructions if isinstance(i, SendActivation)}
    assert {(stage, program.streams[peer].stage) for stage, peer in sent} == {(s, (s + 1) % 2) for s in range(5)}


def test_an_interleaved_ranks_memory_is_that_of_all_its_stages() -> None:
    costs = [
        StageCosts(
            microbatch_size=1,
            forward_s=1.0,
            backward_s=2.0,
            backward_input_s=1.0,
            backward_weight_s=1.0,
            version_bytes=1000 * 10**stage,
            activation_bytes=10**stage,
        )
        for stage in range(4)
    ]
    program = interleaved(2, 2, 2)
    lane = simulate(program, costs).lanes[0]
    held = dict(zip(lane.instructions, (count - 1000 - 100_000 for count in lane.memory_bytes), strict=True))
    assert [held[one] for one in parse_stream("F1 F2 F1.1 F2.1 B1.1 B2.1 B1 B2")] == [
        1, 2, 102, 202, 102, 2, 1, 0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "replicas", "chunks", "microbatches", "law"),
    [
        ("1f1b-interleaved", (1,) * 4, 2, 3, "microbatches: must be a multiple of the ranks in a pipeline .2."),
        ("1f1b-interleaved", (1,) * 4, 4, 4, "chunks: must leave at least 2 ranks to the 4 stages"),
        ("1f1b-interleaved", (1,) * 4, 3, 4, "chunks: must divide the 4 stages"),
        ("1f1b", (1,) * 4, 2, 4, "chunks: must be 1 for 1f1b"),
        ("zb-v", (1,) * 4, 1, 4, "chunks: must be 2 for zb-v"),
        ("zb-v", (1,) * 4, 4, 4, "chunks: must be 2 for zb-v"),
        ("dual-pipe-v", (1,) * 4, 2, 3, "microbatches: must be at least the number of stages .4. for dual-pipe-v"),
    ],
)
def test_chunks_that_a_schedule_cannot_take_are_refused(
    schedule: str, replicas: tuple[int, ...], chunks: int, microbatches: int, law: str
) -> None:
    with pytest.raises(ValueError, match=law):
        build(schedule, Pipeline(replicas=replicas, microbatches=microbatches, chunks=chunks))


def interleaved(
    ranks: int, chunks: int, microbatches: int, *, width: int = 1, batches: int = 1, checkpoint_every: int = 0
) -> Program:
    """So many chunks on each rank."""
    pipeline = Pipeline(replicas=(width,) * (ranks * chunks), microbatches=microbatches, batches=batches, chunks=chunks)
    return build("1f1b-interleaved", pipeline, checkpoint_every=checkpoint_every)


def test_zb_h1s_streams_are_1f1b_with_weight_gradients_that_wait() -> None:
    compute = [
        [i for i in stream.instructions if isinstance(i, Forward | BackwardInput | BackwardWeight | Update)]
        for stream in straight("zb-h1", 3, 4).streams
    ]
    assert compute == [
        list(parse_stream("F1 F2 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4 U1")),
        list(parse_stream("F1 F2 I1 F3 I2 W1 F4 I3 W2 I4 W3 W4 U1")),
        list(parse_stream("F1 I1 F2 I2 F3 I3 W1 F4 I4 W2 W3 W4 U1")),
    ]


def test_zb_vs_streams_are_those_of_its_picture() -> None:
    compute = [
        [i for i in stream.instructions if isinstance(i, Forward | BackwardInput | BackwardWeight | Update)]
        for stream in straight("zb-v", 2, 3).streams
    ]
    assert compute == [
        list(parse_stream("F1 F2 F3 F1.1 I1.1 W1.1 F2.1 I2.1 W2.1 I1 W1 F3.1 I3.1 W3.1 I2 W2 I3 W3 U1 U1.1")),
        list(parse_stream("F1 F1.1 F2 F2.1 I1.1 W1.1 F3 I1 W1 F3.1 I2.1 W2.1 I2 I3.1 I3 W2 W3.1 W3 U1 U1.1")),
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_zb_vs_ranks_never_idle_once_they_have_begun(ranks: int, more: int) -> None:
    """Zero Bubble (2024), section 6: no bubble where F = B = W, and on each rank as much memory as on 1F1B's first."""
    microbatches = 2 * ranks - 1 + more
    program = straight("zb-v", ranks, microbatches)
    timeline = simulate(program, [equal_thirds()] * 2 * ranks)
    assert timeline.makespan_s == 6 * microbatches + ranks - 1
    for lane in timeline.lanes:
        events = [event for event in lane.events() if is_compute(event.instruction)]
        assert events[0].start_s == lane.rank
        assert all(earlier.end_s == later.start_s for earlier, later in pairwise(events))
    assert [most_kept(stream) for stream in program.streams] == [2 * ranks] * ranks
    assert 2 * most_kept(straight("1f1b", ranks, microbatches).streams[0]) == 2 * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("a_rank", [1, 2, 5])
def test_v_half_has_half_of_1f1bs_bubble_in_half_of_its_memory(ranks: int, a_rank: int) -> None:
    """Controllable Memory (2024): a bubble of about p/2m where F = B = W, activations of (p + 2) // 2 microbatches."""
    microbatches = a_rank * ranks
    program, plain = straight("v-half", ranks, microbatches), straight("1f1b", ranks, microbatches)
    whole = unit_costs(forward_s=2.0, backward_input_s=2.0, backward_weight_s=2.0)
    bubble_s = simulate(program, [equal_thirds()] * 2 * ranks).makespan_s - 6 * microbatches
    plain_s = simulate(plain, [whole] * ranks).makespan_s - 6 * microbatches
    assert bubble_s == plain_s / 2 - (1 if ranks % 2 and ranks > 1 else 0)
    assert max(most_kept(stream) for stream in program.streams) == 2 * ((ranks + 2) // 2)
    assert most_kept(plain.streams[0]) == ranks


def test_v_halfs_streams_are_its_blocks_with_weight_gradients_between() -> None:
    compute = [
        [i for i in stream.instructions if isinstance(i, Forward | BackwardInput | BackwardWeight | Update)]
        for stream in straight("v-half", 3, 3).streams
    ]
    assert compute == [
        list(parse_stream("F1 F2 F1.1 I1.1 F3 W1.1 F2.1 I2.1 W2.1 I1 W1 F3.1 I3.1 I2 W3.1 W2 I3 W3 U1 U1.1")),
        list(parse_stream("F1 F1.1 F2 I1.1 F2.1 W1.1 F3 I1 I2.1 W1 F3.1 W2.1 I2 I3.1 W2 W3.1 I3 W3 U1 U1.1")),
        list(parse_stream("F1 F1.1 F2 F2.1 I1.1 I1 W1.1 F3 W1 F3.1 I2.1 I2 W2.1 W2 I3.1 I3 W3.1 W3 U1 U1.1")),
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 9])
@pytest.mark.parametrize("seconds", [(1, 1, 1), (2, 2, 1), (3, 2, 1), (2, 3, 2)])
def test_dual_pipe_vs_bubble_and_memory_are_within_those_of_its_table(
    ranks: int, more: int, seconds: tuple[int, int, int]
) -> None:
    """DualPipe of 2p stages: (p - 1)(F&B + B - 3W), F&B here one after the other; activations of 2p + 1 stages."""
    microbatches, (f, i, w) = 2 * ranks + more, seconds
    program = straight("dual-pipe-v", ranks, microbatches)
    costs = [unit_costs(forward_s=f, backward_input_s=i, backward_weight_s=w)] * 2 * ranks
    bubble_s = simulate(program, costs).makespan_s - 2 * microbatches * (f + i + w)
    assert bubble_s <= (ranks - 1) * (f + 2 * (i + w) - 3 * w)
    if f == i == w:
        assert bubble_s == ranks - 1
    assert [most_kept(stream) for stream in program.streams] == [2 * ranks + 1] * ranks


def test_dual_pipe_vs_streams_are_those_of_its_picture() -> None:
    compute = [
        [i for i in stream.instructions if isinstance(i, Forward | BackwardInput | BackwardWeight | Update)]
        for stream in straight("dual-pipe-v", 2, 4).streams
    ]
    first = "F1 F2 F3 F1.1 I1.1 W1.1 F2.1 F4 I2.1 W2.1 F3.1 I1 W1 I3.1 W3.1 F4.1 I2 W2 I4.1 W4.1 I3 W3 I4 W4 U1 U1.1"
    last = "F1 F1.1 F2 F2.1 F3 I1.1 W1.1 F3.1 I1 W1 F4 I2.1 W2.1 F4.1 I2 W2 I3.1 W3.1 I3 W3 I4.1 I4 W4.1 W4 U1 U1.1"
    assert compute == [list(parse_stream(first)), list(parse_stream(last))]


@given(st.sampled_from(sorted(V_SHAPED)), st.integers(1, 9), st.integers(1, 40))
def test_schedules_in_a_v_keep_their_laws_with_any_ranks_and_microbatches(
    schedule: str, ranks: int, microbatches: int
) -> None:
    """None holds more on a rank than 1F1B on its first, but for one microbatch; none is slower where F = B = W."""
    microbatches = microbatches_of(schedule, microbatches, depth=2 * ranks)
    program = straight(schedule, ranks, microbatches, batches=2)
    check(program)
    whole = unit_costs(forward_s=2.0, backward_input_s=2.0, backward_weight_s=2.0)
    plain = straight("1f1b", ranks, microbatches, batches=2)
    own_s, plain_s = (
        simulate(each, [costs] * each.pipeline.depth).makespan_s
        for each, costs in ((program, equal_thirds()), (plain, whole))
    )
    assert own_s <= plain_s
    assert max(most_kept(stream) for stream in program.streams) <= 2 * ranks + (schedule == "dual-pipe-v")
    for stream in program.streams:
        stages = [part.stage for part in program.stage_streams(stream)]
        assert stages == [stream.stage, 2 * ranks - 1 - stream.stage]


def test_between_the_two_stages_of_a_rank_nothing_is_sent() -> None:
    """Of p ranks the last one has the stages p - 1 and p, and the first one the first stage and the last."""
    for ranks in (1, 2, 3):
        program = straight("zb-v", ranks, 4)
        sent = {(i.chunk, i.peer) for s in program.streams for i in s.instructions if isinstance(i, SendActivation)}
        assert sent == {(0, rank) for rank in range(1, ranks)} | {(1, rank) for rank in range(ranks - 1)}


@pytest.mark.parametrize("row", golden("gpipe_bubble.json")["rows"], ids=lambda r: f"M={r['microbatches']}")
def test_gpipes_bubble_is_that_of_its_section_2_3(row: dict[str, Any]) -> None:
    program = straight("gpipe", golden("gpipe_bubble.json")["cells"], row["microbatches"])
    assert bubble(program) == pytest.approx(float(Fraction(*row["bubble"])), abs=1e-12)


def test_2bws_timeline_is_that_of_its_figure_2() -> None:
    figure = golden("two_bw_figure_2.json")
    program = straight("pipedream-2bw", figure["workers"], figure["microbatches"], batches=3)
    timeline = simulate(program, [equal_thirds()] * figure["workers"])
    starts = {format_instruction(e.instruction): e.start_s for e in timeline.lanes[2].events()}
    assert starts["F7"] + 1 == figure["forward_of_input_7_on_worker_3_at"]
    for stream in program.streams:
        computed = [i for i in stream.instructions if isinstance(i, Forward | Backward)]
        first_on_1 = next(i for i in computed if i.version == 1)
        last_on_0 = [i for i in computed if i.version == 0][-1]
        assert first_on_1 == Forward(figure["first_input_on_version_1"], 1)
        assert last_on_0 == Backward(figure["last_input_on_version_0"], 0)
        held = footprints(stream.instructions, recompute=False)
        assert max(h.versions for h in held) == figure["versions_at_most"]


@pytest.mark.parametrize(("depth", "microbatches"), [(1, 1), (2, 2), (3, 5), (4, 4), (4, 8)])
def test_2bw_computes_microbatch_k_on_version_floor_k_minus_1_over_m_minus_1(depth: int, microbatches: int) -> None:
    for stream in straight("pipedream-2bw", depth, microbatches, batches=5).streams:
        for i in stream.instructions:
            if isinstance(i, Forward | Backward):
                assert i.version == max((i.microbatch - 1) // microbatches - 1, 0)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_pipedream_computes_n_minus_s_updates_behind_on_stage_s(stages: int) -> None:
    """w(t+1) = w(t) - lr grad f(w1(t-n+1), ..., wn(t)): minibatch t (from 1) on stage s runs on t - 1 - (n - s)."""
    for s, stream in enumerate(straight("pipedream", stages, 1, batches=12).streams, start=1):
        for i in stream.instructions:
            if isinstance(i, Forward | Backward):
                assert i.version == max(i.microbatch - 1 - (stages - s), 0)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_vertical_sync_computes_n_updates_behind_on_every_stage(stages: int) -> None:
    """w(t+1) = w(t) - lr grad f(w1(t-n+1), ..., wn(t-n+1)): minibatch t (from 1) runs on t - n everywhere."""
    for stream in straight("pipedream-vertical-sync", stages, 1, batches=12).streams:
        for i in stream.instructions:
            if isinstance(i, Forward | Backward):
                assert i.version == max(i.microbatch - stages, 0)


@pytest.mark.parametrize("replicas", [(1,), (4, 1), (2, 1, 1), (7, 1), (9, 5, 1, 1), (1, 2), (2, 3), (3, 2), (6, 4)])
def test_vertical_sync_holds_no_more_versions_than_it_promises_and_needs_them_all(replicas: tuple[int, ...]) -> None:
    pipeline = Pipeline(replicas=replicas, microbatches=1, batches=6 * len(replicas))
    most = [0] * len(replicas)
    for stream in build("pipedream-vertical-sync", pipeline).streams:
        newest = 0
        for i in stream.instructions:
            if isinstance(i, Update):
                newest = i.version
            elif isinstance(i, Forward | Backward):
                most[stream.stage] = max(most[stream.stage], newest - i.version)
    stages = range(len(replicas))
    assert most == [schedule_named("pipedream-vertical-sync").versions_behind(pipeline, stage) for stage in stages]


@pytest.mark.parametrize("replicas", [(2, 1, 1), (7, 1), (9, 5, 1, 1), (1, 2), (3, 2)])
def test_vertical_sync_never_uses_a_minibatch_that_the_input_stage_has_not_seen(replicas: tuple[int, ...]) -> None:
    held: dict[int, dict[int, int]] = {}
    for stream in build("pipedream-vertical-sync", Pipeline(replicas=replicas, microbatches=1, batches=8)).streams:
        for i in stream.instructions:
            if isinstance(i, Forward):
                held.setdefault(stream.stage, {})[i.microbatch] = i.version * replicas[stream.stage]
    for stage, minibatches in held.items():
        for k, count in minibatches.items():
            assert 0 <= held[0][k] - count < replicas[stage]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "pipedream-2bw", "pipedream-vertical-sync"])
@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_in_flight_microbatches_never_exceed_the_distance_to_the_end(schedule: str, stages: int) -> None:
    microbatches = 1 if schedule in STASHING else stages
    for stream in straight(schedule, stages, microbatches, batches=2 * stages).streams:
        in_flight = [h.in_flight for h in footprints(stream.instructions, recompute=False)]
        assert max(in_flight) == stages - stream.stage
        assert in_flight[-1] == 0


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_live_versions_are_those_that_a_schedule_promises(schedule: str) -> None:
    stages = 1 if schedule in DATA_PARALLEL else 4
    microbatches = microbatches_of(schedule, 4, depth=stages * chunks_of(schedule))
    program = straight(schedule, stages, microbatches, batches=8)
    for stream in (part for whole in program.streams for part in program.stage_streams(whole)):
        behind = program.schedule.versions_behind(program.pipeline, stream.stage)
        assert max(h.versions for h in footprints(stream.instructions, recompute=False)) == 1 + behind


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("recompute", [False, True])
def test_every_schedule_passes_the_check_and_plays_to_its_end(schedule: str, width: int, recompute: bool) -> None:
    chunks = chunks_of(schedule)
    stages = 1 if schedule in DATA_PARALLEL else 3 * chunks
    pipeline = Pipeline(
        replicas=(width,) * stages,
        microbatches=max(3, microbatches_of(schedule, 3, depth=stages)),
        batches=3,
        recompute=(recompute,) * stages,
        chunks=chunks,
    )
    program = build(schedule, pipeline, checkpoint_every=2)
    check(program)
    timeline = simulate(program, [equal_thirds()] * stages)
    assert [len(lane.instructions) for lane in timeline.lanes] == [len(s.instructions) for s in program.streams]
    for lane in timeline.lanes:
        assert all(end >= start for start, end in zip(lane.start_s, lane.end_s, strict=True))
        assert all(later >= earlier for earlier, later in pairwise(lane.end_s))


@pytest.mark.parametrize("schedule", sorted(STASHING))
@pytest.mark.parametrize("replicas", [(2, 1, 1), (7, 1), (9, 5, 1, 1), (1, 2), (2, 3)])
def test_unequal_replicas_pass_the_check_and_never_deadlock(replicas: tuple[int, ...], schedule: str) -> None:
    pipeline = Pipeline(replicas=replicas, microbatches=1, batches=6)
    program = build(schedule, pipeline)
    check(build(schedule, replace(pipeline, first_batch=3), checkpoint_every=1))
    check(program)
    simulate(program, [equal_thirds()] * len(replicas))
    for stream in program.streams:
        forwards = [i for i in stream.instructions if isinstance(i, Forward)]
        assert [i.microbatch % replicas[stream.stage] for i in forwards] == [
            (stream.replica + 1) % replicas[stream.stage]
        ] * len(forwards)
        updates = [i.version for i in stream.instructions if isinstance(i, Update)]
        assert updates == list(range(1, 6 * schedule_named(schedule).updates_a_batch(pipeline, stream.stage) + 1))


def test_2bp_fills_gaps_with_finished_microbatches_and_concatenates_the_rest() -> None:
    split = split_backward(straight("1f1b", 4, 4), [equal_thirds()] * 4)
    compute = [
        [i for i in stream.instructions if isinstance(i, Forward | BackwardInput | BackwardWeight)]
        for stream in split.streams
    ]
    assert compute == [
        list(parse_stream("F1 F2 F3 F4 I1 W1 I2 W2 I3 W3 I4 W4")),
        list(parse_stream("F1 F2 F3 I1 F4 I2 W1 I3 W2 I4 W3,4")),
        list(parse_stream("F1 F2 I1 F3 I2 F4 I3 W1 I4 W2,3,4")),
        list(parse_stream("F1 I1 F2 I2 F3 I3 F4 I4 W1,2,3,4")),
    ]


def test_2bps_memory_saving_variant_is_that_of_its_figure_5() -> None:
    """1F1B-2 on 4 stages: half of p2 half-way, in one block; the rest in the gaps behind and at the end."""
    split = split_backward(straight("1f1b", 4, 8), [equal_thirds()] * 4, half_way=True)
    check(split)
    compute = [
        [i for i in stream.instructions if isinstance(i, Forward | BackwardInput | BackwardWeight)]
        for stream in split.streams
    ]
    assert compute == [
        list(parse_stream("F1 F2 F3 F4 I1 F5 I2 F6 I3 F7 I4 W1,2,3,4 F8 I5 W5 I6 W6 I7 W7 I8 W8")),
        list(parse_stream("F1 F2 F3 I1 F4 I2 F5 I3 F6 I4 W1,2,3,4 F7 I5 F8 I6 W5 I7 W6 I8 W7,8")),
        list(parse_stream("F1 F2 I1 F3 I2 F4 I3 F5 I4 W1,2,3,4 F6 I5 F7 I6 F8 I7 W5 I8 W6,7,8")),
        list(parse_stream("F1 I1 F2 I2 F3 I3 F4 I4 W1,2,3,4 F5 I5 F6 I6 F7 I7 F8 I8 W5,6,7,8")),
    ]
    for stream in split.streams[1:]:  # nobody waits for a gradient until a block is over
        texts = [format_instruction(i) for i in stream.instructions]
        assert texts.index(f">B4:{stream.rank - 1}") < texts.index("W1,2,3,4")


@pytest.mark.parametrize("stages", [2, 4, 8, 16])
def test_2bps_memory_saving_variant_holds_half_of_what_waits_for_p2_and_costs_no_time(stages: int) -> None:
    """2BP (2024), figure 5 and table 1: 1F1B-2 nearer to 1F1B-1's memory, at 1F1B-2's bubble."""
    program, costs = straight("1f1b", stages, 2 * stages), [equal_thirds()] * stages
    fast, saving = (split_backward(program, costs, half_way=half_way) for half_way in (False, True))
    smaller = split_backward(straight("1f1b", stages, stages), costs)
    assert bubble(saving) == bubble(fast)
    for ours, theirs, least in zip(saving.streams, fast.streams, smaller.streams, strict=True):
        assert most_waiting(ours) == stages
        assert most_waiting(theirs) == stages + 1 + ours.rank
        assert most_kept(least) <= most_kept(ours) <= most_kept(theirs)
    assert (most_kept(saving.streams[-1]), most_kept(fast.streams[-1])) == (stages, 2 * stages)


def most_waiting(stream: Stream) -> int:
    """The most microbatches between p1 and p2."""
    return max(h.weight_gradients for h in footprints(stream.instructions, recompute=False))


def most_kept(stream: Stream) -> int:
    """The most microbatches between forward and p2."""
    return max(h.in_flight + h.weight_gradients for h in footprints(stream.instructions, recompute=False))


@given(
    st.sampled_from(["naive", "gpipe", "1f1b"]),
    st.integers(1, 4),
    st.integers(1, 9),
    st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=4, max_size=4),
)
@example("1f1b", 3, 5, [(3, 0, 3), (0, 0, 3), (0, 1, 5), (0, 0, 0)])  # a gap that is shorter in the second batch
def test_half_way_blocks_keep_the_laws_and_fill_gaps_without_any_delay(
    schedule: str, stages: int, microbatches: int, seconds: list[tuple[int, int, int]]
) -> None:
    program = build(schedule, Pipeline(replicas=(1,) * stages, microbatches=microbatches, batches=2))
    costs = [unit_costs(forward_s=f, backward_input_s=i, backward_weight_s=w) for f, i, w in seconds[:stages]]
    split = split_backward(program, costs, half_way=True)
    check(split)
    blocks = with_half_way_weight_gradients(without_weight_gradients(program))
    nothing_idle = [[0.0] * len(stream.instructions) for stream in blocks.streams]
    in_blocks = with_weight_gradients(blocks, nothing_idle, [1.0] * stages)
    assert simulate(split, costs).makespan_s <= simulate(in_blocks, costs).makespan_s
    for stream in in_blocks.streams:
        half = microbatches // 2
        assert most_waiting(stream) == microbatches - half


@pytest.mark.parametrize("schedule", ["naive", "gpipe"])
def test_2bp_concatenates_all_of_p2_after_all_of_p1(schedule: str) -> None:
    split = split_backward(straight(schedule, 2, 3, batches=2), [equal_thirds()] * 2)
    check(split)
    for stream in split.streams:
        weights = [i for i in stream.instructions if isinstance(i, BackwardWeight)]
        assert [sorted(i.microbatches) for i in weights] == [[1, 2, 3], [4, 5, 6]]
        ends = [i for i in stream.instructions if isinstance(i, BackwardWeight | Update)]
        assert [type(i) for i in ends] == [BackwardWeight, Update] * 2


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_2bp_saves_the_same_in_every_batch(batches: int) -> None:
    split = split_backward(straight("1f1b", 4, 8, batches), [equal_thirds()] * 4)
    check(split)
    assert simulate(split, [equal_thirds()] * 4).makespan_s == batches * 27


def test_2bp_reduces_gradients_once_all_of_p2_is_done() -> None:
    program = build("1f1b", Pipeline(replicas=(2, 2), microbatches=2))
    split = split_backward(program, [equal_thirds()] * 2)
    check(split)
    assert [format_instruction(i) for i in split.streams[0].instructions][-3:] == ["W3", "G1", "U1"]


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
def test_2bps_instructions_of_a_batch_do_not_depend_on_the_run_around_it(
    schedule: str,
) -> None:
    costs = [
        replace(equal_thirds(), forward_s=1 + 0.3 * s, backward_weight_s=0.7, update_s=2.0 - s / 2, latency_s=0.1)
        for s in range(4)
    ]

    def third_batch(batches: int, first_batch: int, checkpoint_every: int) -> list[list[str]]:
        pipeline = Pipeline(replicas=(1,) * 4, microbatches=8, batches=batches, first_batch=first_batch)
        split = split_backward(build(schedule, pipeline, checkpoint_every=checkpoint_every), costs)
        check(split)
        texts = [[format_instruction(i) for i in stream.instructions] for stream in split.streams]
        ranges = [(text.index("U2") + 1 if "U2" in text else 0, text.index("U3")) for text in texts]
        plain = [text[start:stop] for text, (start, stop) in zip(texts, ranges, strict=True)]
        return [[t for t in text if not t.startswith("C")] for text in plain]

    assert third_batch(5, 0, 0) == third_batch(1, 2, 1) == third_batch(3, 1, 2)


@pytest.mark.parametrize("recompute", [False, True])
def test_between_p1_and_p2_a_microbatch_is_counted_apart(recompute: bool) -> None:
    stream = parse_stream("F1 F2 R2 I2 R1 I1 W2 W1 U1" if recompute else "F1 F2 I2 I1 W2 W1 U1")
    held = list(footprints(tuple(stream), recompute=recompute))
    assert [h.weight_gradients for h in held if h.weight_gradients or h.activations or h.inputs][-2:] == [2, 1]
    assert [h.in_flight for h in held] == ([1, 2, 2, 1, 1, 0, 0, 0, 0] if recompute else [1, 2, 1, 0, 0, 0, 0])


@pytest.mark.parametrize(
    "schedule", ["pipedream", "pipedream-2bw", "pipedream-vertical-sync", "zb-h1", "1f1b-interleaved"]
)
def test_2bp_is_refused_without_a_flush_and_where_the_backward_is_split_already(schedule: str) -> None:
    with pytest.raises(ValueError, match=f"schedule: must have a flush .*2BP.* got '{schedule}'"):
        split_backward(straight(schedule, 2, 2), [equal_thirds()] * 2)


def test_the_peer_of_a_microbatch_is_the_same_on_the_way_back() -> None:
    pipeline = Pipeline(replicas=(2, 1), microbatches=1, batches=2)
    program = build("pipedream", pipeline, (Worker(stage=0), Worker(stage=1), Worker(stage=0, replica=1)))
    text = " ".join(format_instruction(i) for i in program.streams[1].instructions)
    for k, peer in ((1, 0), (2, 2), (3, 0), (4, 2)):
        assert f"<F{k}:{peer}" in text
        assert f">B{k}:{peer}" in text


@given(st.sampled_from(sorted(CHUNKED)), st.integers(1, 5), st.integers(1, 3), st.integers(1, 14), st.integers(0, 4))
def test_a_schedule_takes_the_batches_that_it_makes_streams_for(
    schedule: str, ranks: int, chunks: int, microbatches: int, rank: int
) -> None:
    laws = schedule_named(schedule)
    chunks = 2 if schedule in V_SHAPED else chunks
    pipeline = chunked_pipeline(laws, ranks=ranks, chunks=chunks, microbatches=microbatches)
    takes = laws.takes(ranks=ranks, chunks=chunks, microbatches=microbatches)
    if takes:
        assert list(laws.compute(pipeline, Worker(stage=min(rank, ranks - 1))))
    else:
        with pytest.raises(InvalidInputError):
            list(laws.compute(pipeline, Worker(stage=0)))


@pytest.mark.parametrize("schedule", sorted(CHUNKED))
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 16), (5, 30)])
def test_what_a_rank_idles_is_what_planners_count(schedule: str, ranks: int, microbatches: int) -> None:
    """A rank takes 6 s for a microbatch; v-half on an odd number of ranks idles a second less."""
    laws = schedule_named(schedule)
    program = build(laws, chunked_pipeline(laws, ranks=ranks, chunks=2, microbatches=microbatches))
    idle_s = simulate(program, [equal_thirds()] * 2 * ranks).makespan_s - 6 * microbatches
    less_s = ranks % 2 if schedule == "v-half" else 0
    assert idle_s + less_s == pytest.approx(6 * laws.idle_steps(ranks=ranks, chunks=2))


@given(st.sampled_from(sorted(CHUNKED)), st.integers(2, 6), st.integers(2, 4), st.integers(8, 20), st.booleans())
def test_a_rank_keeps_no_more_of_a_longer_batch(
    schedule: str, ranks: int, chunks: int, rounds: int, recompute: bool
) -> None:
    laws = schedule_named(schedule)
    chunks = 2 if schedule in V_SHAPED else chunks
    for rank in range(ranks):
        held = held_by(laws, ranks, chunks, rank, rounds * ranks, recompute)
        pipeline = chunked_pipeline(laws, ranks=ranks, chunks=chunks, microbatches=rounds * ranks)
        program = build(laws, replace(pipeline, recompute=(recompute,) * pipeline.depth))
        parts = program.stage_streams(program.streams[rank])
        most = [
            max(each.in_flight + each.weight_gradients for each in footprints(part.instructions, recompute=recompute))
            for part in parts
        ]
        assert held.most == tuple(most)
