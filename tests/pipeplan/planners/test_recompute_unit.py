"""The unit of recomputation: what planners count is what streams hold, and what fits by block alone is planned so."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeplan.costs.memory import passed_inputs
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Answer, Infeasible, Plan, Stage
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.programs.instructions import Backward, Recompute, RecvGradient
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.text import format_instruction
from pipeplan.schedules.registry import build, schedule_named
from pipeplan.simulation.predict import predict
from pipeplan.simulation.split_backward import split_backward
from tests.pipeplan.builders import Cell, cells, cluster, profile
from tests.pipeplan.planners.on_paper import on_paper
from tests.properties import examples
from tests.schedules import INTERLEAVED

LAYERS = [Cell(output_bytes=1, activation_bytes=20) for _ in range(8)]
"""A chain of equal blocks, each of which keeps twenty times its input."""

PLANNED = ("naive", "data-parallel", "data-parallel-asp", "gpipe", "1f1b", "pipedream-2bw")


def answer_for(
    planner: str, blocks: list[Cell], devices: int, *, batch_size: int = 4, memory_bytes: int = 10**6, **options: Any
) -> Answer:
    problem = PlanningProblem(
        profile=profile(blocks),
        cluster=cluster((devices, 1.0), memory_bytes=memory_bytes),
        batch_size=batch_size,
        options=Options(**options),
    )
    return solve(planner, problem)


def kept_bytes(plan: Plan, stage: int) -> int:
    """What a planner counts that a play counts too: neither buffers nor transients."""
    memory = plan.stages[stage].memory
    assert memory is not None
    return memory.total - memory.buffers - memory.transient


@examples(150)
@given(
    blocks=st.lists(cells(), min_size=1, max_size=6),
    schedule=st.sampled_from(PLANNED),
    planner=st.sampled_from(["pipedream-2bw", "exact"]),
    stages=st.integers(1, 3),
    microbatches=st.integers(1, 6),
    optimizer=st.sampled_from(["sgd", "adam"]),
)
def test_what_planners_count_by_block_is_what_the_streams_hold(
    blocks: list[Cell], schedule: str, planner: str, stages: int, microbatches: int, optimizer: str
) -> None:
    stages = 1 if schedule_named(schedule).single_stage else min(stages, len(blocks))
    assume(planner != "exact" or schedule in ("gpipe", "1f1b", "pipedream-2bw"))
    assume(schedule != "pipedream-2bw" or microbatches >= stages)
    try:
        plan = answer_for(
            planner,
            blocks,
            stages,
            batch_size=microbatches,
            schedule=schedule,
            stages=stages,
            microbatch_size=1,
            recompute=True,
            recompute_unit="block",
            optimizer=optimizer,
            semantics="paper",
        )
    except InvalidInputError as error:
        assume("time" not in str(error))
        raise
    assert isinstance(plan, Plan)
    assert [stage.recomputes for stage in plan.stages] == ["by block"] * stages
    batches = 2 * stages + 3 if schedule in ("pipedream-2bw", "data-parallel-asp") else 2
    lanes = predict(plan, batches=batches).lanes
    assert [lane.peak_memory_bytes for lane in lanes] == [kept_bytes(plan, stage) for stage in range(stages)]
    at = profile(blocks).at(1)
    for stage in plan.stages:
        own = at[stage.start : stage.stop]
        memory = stage.memory
        assert memory is not None
        held = plan.optimal_in_flight if stage.start == 0 else None
        every_input = sum(b.input_bytes for b in own) - sum(b.passed_bytes for b in own[:-1])
        largest = max(b.again_bytes for b in own)
        assert held is None or memory.activations == held * every_input + largest


@examples(60)
@given(
    blocks=st.lists(cells(), min_size=4, max_size=7),
    ranks=st.integers(1, 2),
    rounds=st.integers(1, 3),
    optimizer=st.sampled_from(["sgd", "adam"]),
)
def test_the_same_holds_where_ranks_hold_several_stages(
    blocks: list[Cell], ranks: int, rounds: int, optimizer: str
) -> None:
    assume(schedule_named(INTERLEAVED).takes(ranks=ranks, chunks=2, microbatches=ranks * rounds))
    plan = answer_for(
        "exact",
        blocks,
        ranks,
        batch_size=ranks * rounds,
        schedule=INTERLEAVED,
        stages=ranks,
        chunks=2,
        microbatch_size=1,
        recompute=True,
        recompute_unit="block",
        optimizer=optimizer,
        semantics="paper",
    )
    assert isinstance(plan, Plan)
    assert {stage.recomputes for stage in plan.stages} == {"by block"}
    lanes = predict(plan, batches=2).lanes
    counted = [kept_bytes(plan, rank) + kept_bytes(plan, rank + ranks) for rank in range(ranks)]
    gradients = [sum(plan.costs[stage].own_gradient_bytes for stage in (rank, rank + ranks)) for rank in range(ranks)]
    for lane, most_bytes, own_bytes in zip(lanes, counted, gradients, strict=True):
        assert most_bytes - own_bytes <= lane.peak_memory_bytes <= most_bytes  # not all gradients may be there


def test_what_runs_again_has_its_input_and_a_kept_output_once() -> None:
    # Of 9 bytes 4 are the input, where that is known, and 3 the output, where the block keeps it.
    first = Cell(output_bytes=4)
    for shared, kept, expected in ((None, 0, 3 + 9), (0, 0, 3 + 5), (0, 3, 3 + 2), (None, 3, 3 + 6)):
        cell = Cell(output_bytes=3, activation_bytes=9, shared_bytes=shared, kept_output_bytes=kept)
        block = profile([first, cell]).at(1)[1]
        assert block.again_bytes == expected


def test_what_a_block_passes_on_is_there_once() -> None:
    # Four blocks read 4 bytes, of which they pass on 3 each; what they make is 1 of their output, and 5 of their graph.
    block = Cell(output_bytes=4, activation_bytes=9, shared_bytes=0, passed_bytes=3)
    cells = [Cell(output_bytes=4), block, block, block, block]
    at = profile(cells).at(1)
    assert passed_inputs(at) == [0, 0, 3, 3, 3]
    assert [each.again_bytes for each in at[1:]] == [1 + 5] * 4
    for planner in ("pipedream-2bw", "exact"):
        plan = answer_for(planner, cells, 1, stages=1, schedule="1f1b", recompute=True, recompute_unit="block")
        assert isinstance(plan, Plan)
        assert plan.stages[0].memory_bytes == 4 + 3 * (4 - 3) + 6


def test_per_layer_checkpoints_make_one_device_fit() -> None:
    # Eight inputs (the first of no bytes), one block's 20 bytes and its output; as a whole, 8 x 20.
    asked: dict[str, Any] = {"memory_bytes": 28, "microbatch_size": 1}
    for planner in ("pipedream-2bw", "exact", "auto"):
        plan = answer_for(planner, LAYERS, 1, **asked)
        assert isinstance(plan, Plan), planner
        assert [(stage.recomputes, stage.memory_bytes) for stage in plan.stages] == [("by block", 28)]
        assert plan.simulated is not None
        assert plan.simulated.peak_memory_bytes == (28,)
        if planner != "auto":
            whole = answer_for(planner, LAYERS, 1, **asked, recompute_unit="stage")
            assert isinstance(whole, Infeasible)
    assert isinstance(answer_for("pipedream-2bw", LAYERS, 1, memory_bytes=27, microbatch_size=1), Infeasible)


def test_per_layer_checkpoints_make_ranks_of_several_stages_fit() -> None:
    asked: dict[str, Any] = {"schedule": INTERLEAVED, "stages": 2, "chunks": 2, "microbatch_size": 1}
    least = answer_for("exact", LAYERS, 2, **asked, recompute=True, recompute_unit="block")
    assert isinstance(least, Plan)
    held = [least.stages[rank].memory_bytes + least.stages[rank + 2].memory_bytes for rank in (0, 1)]
    for planner in ("exact", "auto"):
        found = answer_for(planner, LAYERS, 2, **asked, memory_bytes=max(held))
        assert isinstance(found, Plan)
        assert found.recomputes_by_block
        assert isinstance(
            answer_for(planner, LAYERS, 2, **asked, memory_bytes=max(held), recompute_unit="stage"), Infeasible
        )


def test_a_unit_may_be_asked_for_where_ranks_of_several_stages_do_not_recompute() -> None:
    """Once every stage had the unit that was asked for, which a stage without recomputation refused."""
    asked: dict[str, Any] = {"schedule": INTERLEAVED, "stages": 2, "chunks": 2, "microbatch_size": 1}
    for planner in ("exact", "auto"):
        free, by_block = (answer_for(planner, LAYERS, 2, **asked, recompute_unit=unit) for unit in (None, "block"))
        assert isinstance(free, Plan) and isinstance(by_block, Plan)
        assert [stage.recomputes for stage in by_block.stages] == ["no"] * 4
        assert by_block.stages == free.stages


def test_a_stage_recomputes_as_a_whole_where_that_fits() -> None:
    """Its forward runs again while the gradient is on its way: a play is never slower than by block."""
    rates = {}
    for unit in (None, "stage", "block"):
        plan = answer_for("gpipe", LAYERS, 4, stages=4, microbatch_size=1, recompute_unit=unit)
        assert isinstance(plan, Plan)
        assert plan.throughput_samples_per_s is not None
        rates[unit] = plan.throughput_samples_per_s
        assert plan.recomputes == ("by block" if unit == "block" else "yes")
    assert rates[None] == rates["stage"] > rates["block"]


def test_of_two_units_that_do_not_fit_the_miss_is_that_of_the_smaller() -> None:
    answer = answer_for("pipedream-2bw", LAYERS, 1, memory_bytes=20, microbatch_size=1)
    assert isinstance(answer, Infeasible)
    assert answer.reasons[0].missing_bytes == 8


def test_a_blocks_forward_runs_again_when_the_gradient_is_there() -> None:
    """A stage's forward of 2 s runs again before it: the last gradient comes back 2 s earlier a stage."""
    streams = {}
    for unit in ("stage", "block"):
        pipeline = Pipeline(replicas=(1, 1), microbatches=2, recompute=(True, True), recompute_units=(unit, unit))
        instructions = build("1f1b", pipeline).streams[0].instructions
        streams[unit] = [one for one in instructions if isinstance(one, RecvGradient | Recompute | Backward)]
    texts = {unit: " ".join(map(format_instruction, stream)) for unit, stream in streams.items()}
    assert texts == {"stage": "R1 <B1:1 B1 R2 <B2:1 B2", "block": "<B1:1 B1 <B2:1 B2"}


def test_the_last_backwards_wait_for_the_recomputation_of_every_stage() -> None:
    # Stages of F = 1 s and B = 2 s, one microbatch: 3 F there, and back 3 B, with F again before each.
    plan = answer_for("pipedream-2bw", [Cell()] * 3, 3, batch_size=1, schedule="1f1b", stages=3)
    assert isinstance(plan, Plan)
    for unit, seconds in (("stage", 3 + 1 + 3 * 2), ("block", 3 + 3 * (1 + 2))):
        stages = tuple(replace(stage, recompute=True, recompute_unit=unit) for stage in plan.stages)
        costs = tuple(replace(own, recompute_s=own.forward_s) for own in plan.costs)
        assert predict(replace(plan, stages=stages, costs=costs), batches=1).makespan_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recompute_unit": "layer"},
            "recompute_unit: must be one of stage, block, modules, attention, operation, got 'layer'",
        ),
        ({"recompute_unit": "block", "memory": "paper"}, "recompute_unit: must be stage with memory paper"),
        ({"recompute_unit": "block", "recompute": False}, "recompute_unit: is of recomputation, which is off"),
        (
            {"recompute_unit": "block", "split_backward": True},
            "recompute_unit: must be stage where the backward is split",
        ),
        ({"recompute_unit": "block", "schedule": "zb-h1"}, "recompute_unit: must be stage where the backward is split"),
    ],
)
def test_a_unit_that_the_other_options_leave_no_use_for_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Options(**options)


def test_a_planner_that_never_recomputes_refuses_the_unit() -> None:
    with pytest.raises(InvalidInputError, match="recompute_unit: is not an option of the planner pipedream"):
        answer_for("pipedream", LAYERS, 2, recompute_unit="block")


def test_a_graph_is_recomputed_by_stage_alone() -> None:
    graph = replace(profile(LAYERS[:3]), edges=((0, 1), (0, 2), (1, 2)))
    problem = PlanningProblem(
        profile=graph, cluster=cluster((2, 1.0)), batch_size=4, options=Options(recompute=True, recompute_unit="block")
    )
    with pytest.raises(InvalidInputError, match="recompute_unit: must be stage for a model that is a graph"):
        solve("pipedream-2bw", problem)


def test_a_split_backward_is_not_recomputed_by_block() -> None:
    pipeline = Pipeline(replicas=(1, 1), microbatches=2, recompute=(True, True), recompute_units=("block", "stage"))
    with pytest.raises(InvalidInputError, match="recompute_unit: must be stage for zb-h1"):
        build("zb-h1", pipeline)
    plan = answer_for("pipedream-2bw", LAYERS, 2, schedule="1f1b", stages=2, recompute=True, recompute_unit="block")
    assert isinstance(plan, Plan)
    with pytest.raises(InvalidInputError, match=r"recompute_unit: must be stage where the backward is split in two"):
        split_backward(build("1f1b", pipeline), plan.costs)
    with pytest.raises(InvalidInputError, match="split_backward: must be off where a stage recomputes by block"):
        replace(plan, split_backward=True)


def test_what_was_stored_before_there_were_units_keeps_its_id() -> None:
    stage = Stage(start=0, stop=1, recompute=True)
    assert content_id(stage) == content_id(replace(stage, recompute_unit="stage"))
    assert content_id(stage) != content_id(replace(stage, recompute_unit="block"))
    with pytest.raises(InvalidInputError, match="recompute_unit: must be stage on a stage that does not recompute"):
        Stage(start=0, stop=1, recompute_unit="block")


def test_the_units_closed_forms_take_the_same_time() -> None:
    forms = []
    for unit in ("stage", "block"):
        options = Options(schedule="1f1b", stages=4, recompute=True, recompute_unit=unit)
        problem = PlanningProblem(profile=profile(LAYERS), cluster=cluster((4, 1.0)), batch_size=8, options=options)
        plan = on_paper("pipedream-2bw", problem)
        assert isinstance(plan, Plan)
        forms.append(plan.closed_form)
    assert forms[0] == forms[1]
