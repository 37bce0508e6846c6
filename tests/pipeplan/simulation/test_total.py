"""What a price is made of: the play of streams that leave out their transfers is that of the whole streams."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.stage_costs import StageCosts
from pipeplan.documents.tied import TiedStages
from pipeplan.programs.communicate import AmongStages, exchange_among_stages
from pipeplan.programs.overlap import overlap_exchanges
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.program import Program, stages_in_a_row
from pipeplan.programs.timeline import Timeline, batch_ends_s
from pipeplan.schedules.registry import build
from pipeplan.simulation.play import simulate
from pipeplan.simulation.total import Total, total
from tests.pipeplan.simulation.test_simulate import COSTS
from tests.properties import examples
from tests.schedules import ASP, DATA_PARALLEL, INTERLEAVED, SCHEDULES, STASHING, V_SHAPED

BY_BLOCK = ("naive", "gpipe", "1f1b", "pipedream", "pipedream-2bw")


def in_sum(timeline: Timeline) -> Total:
    return Total(
        batch_ends_s=tuple(batch_ends_s(timeline)),
        span_s=timeline.makespan_s,
        busy_s=tuple(lane.busy_s for lane in timeline.lanes),
        peak_bytes=tuple(lane.peak_memory_bytes for lane in timeline.lanes),
        events_s=np.zeros((timeline.batches, 0)),
    )


@st.composite
def pipelines(draw: st.DrawFn, schedule: str) -> Pipeline:
    """Equal replicas, or other ones on every stage where the schedule allows that; some stages recompute."""
    depth = 1 if schedule in DATA_PARALLEL else draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 2)) if schedule == INTERLEAVED and depth in (2, 4) else 1
    chunks = 2 if schedule in V_SHAPED else chunks
    depth *= chunks
    unequal = schedule in STASHING and draw(st.booleans())
    replicas = draw(st.lists(st.integers(1, 3), min_size=depth, max_size=depth)) if unequal else []
    microbatches = 1 if schedule in STASHING else draw(st.integers(depth, depth + 3))
    units = ("stage", "block") if schedule in BY_BLOCK else ("stage",)
    return Pipeline(
        replicas=tuple(replicas) or (draw(st.integers(1, 3)),) * depth,
        microbatches=depth if schedule == INTERLEAVED else microbatches,
        batches=draw(st.integers(1, 3)),
        recompute=tuple(draw(st.lists(st.booleans(), min_size=depth, max_size=depth))),
        recompute_units=(draw(st.sampled_from(units)),) * depth,
        chunks=chunks,
    )


def with_bytes(costs: list[StageCosts], draw: st.DataObject) -> list[StageCosts]:
    """The same, with bytes that tell the kinds of what is held apart."""
    names = ("activation_bytes", "input_bytes", "version_bytes", "fixed_bytes", "gradient_bytes")
    few = st.integers(0, 100)
    return [
        StageCosts(**{each: getattr(own, each) for each in own.__slots__} | {name: draw.draw(few) for name in names})
        for own in costs
    ]


@examples(300)
@given(data=st.data(), schedule=st.sampled_from(sorted(SCHEDULES)))
def test_implied_transfers_give_what_the_whole_streams_give(data: st.DataObject, schedule: str) -> None:
    """To the last bit: the same engine plays the same rows."""
    pipeline = data.draw(pipelines(schedule))
    placement = stages_in_a_row(pipeline.replicas[: pipeline.span]) if data.draw(st.booleans()) else ()
    costs = with_bytes(data.draw(st.lists(COSTS, min_size=pipeline.depth, max_size=pipeline.depth)), data)
    overlaps = data.draw(st.booleans())

    meets = schedule not in (*STASHING, ASP) and data.draw(st.booleans())
    ends = (0, pipeline.depth - 1)
    among = AmongStages(tied=(ends,) if pipeline.depth > 1 else (), norm=True) if meets else AmongStages()

    def program(*, implied: bool) -> Program:
        made = exchange_among_stages(build(schedule, pipeline, placement, implied=implied), among)
        made = replace(made, tied=tuple(TiedStages(stages=each, seconds=0.375) for each in among.tied))
        return overlap_exchanges(made) if overlaps else made

    whole = simulate(program(implied=False), costs)
    assert total(program(implied=True), costs, implied=True) == in_sum(whole)
    assert total(program(implied=False), costs) == in_sum(whole)


@examples(100)
@given(data=st.data(), schedule=st.sampled_from(["1f1b", "pipedream", "gpipe"]), depth=st.integers(3, 5))
def test_brief_transfers_arrive_as_those_do_that_the_network_carries(
    data: st.DataObject, schedule: str, depth: int
) -> None:
    """Where transfers are listed, no compute is part of a send: all of them are events, and share ports."""
    compute_s, sent_s = st.sampled_from([0.25, 0.5, 1.0, 2.0]), st.sampled_from([0.25, 0.5, 1.0])
    costs = [
        StageCosts(
            microbatch_size=1,
            forward_s=data.draw(compute_s),
            backward_s=data.draw(compute_s),
            backward_input_s=1.0,
            backward_weight_s=1.0,
            activation_transfer_s=data.draw(sent_s),
            gradient_transfer_s=data.draw(sent_s),
            activation_port_devices=1,
            gradient_port_devices=1,
        )
        for _ in range(depth)
    ]
    microbatches, batches = (1, 8) if schedule == "pipedream" else (depth + 1, 2)
    pipeline = Pipeline(replicas=(1,) * depth, microbatches=microbatches, batches=batches)
    whole = simulate(build(schedule, pipeline), costs)
    assert total(build(schedule, pipeline, implied=True), costs, implied=True) == in_sum(whole)


def test_peaks_that_no_64_bits_hold_are_exact() -> None:
    """Arrays would overflow: such peaks are counted without them."""
    stage = StageCosts(
        microbatch_size=1,
        forward_s=1.0,
        backward_s=2.0,
        backward_input_s=1.0,
        backward_weight_s=1.0,
        activation_bytes=2**62 + 1,
    )
    program = build("gpipe", Pipeline(replicas=(1,), microbatches=5), implied=True)
    assert total(program, [stage], implied=True).peak_bytes == (5 * (2**62 + 1),)
