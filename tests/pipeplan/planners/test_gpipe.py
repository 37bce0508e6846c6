"""GPipe's planner: the partition of least variance, among all there are."""

from collections.abc import Sequence
from fractions import Fraction
from statistics import pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import Options, PlanningProblem
from tests.pipeplan.builders import PLENTY, Cell, again_bytes, cells, cluster, inputs_kept, kept_bytes, profile
from tests.pipeplan.planners.every_partition import compositions
from tests.pipeplan.planners.on_paper import on_paper
from tests.properties import examples

RECOMPUTE = st.sampled_from([None, True, False])
"""None is the paper's: with recomputation."""


def answer_for(
    blocks: Sequence[Cell],
    devices: int,
    *,
    batch_size: int = 4,
    memory_bytes: int = PLENTY,
    sizes: Sequence[int] = (1,),
    options: Options | None = None,
) -> Plan | Infeasible:
    problem = PlanningProblem(
        profile=profile(blocks, sizes=sizes),
        cluster=cluster((devices, 1.0), memory_bytes=memory_bytes),
        batch_size=batch_size,
        options=options or Options(),
    )
    return on_paper("gpipe", problem)


def cell_costs(blocks: Sequence[Cell], sizes: Sequence[int]) -> list[Fraction]:
    costs = [Fraction(block.forward_s + block.backward_s) for block in blocks]
    stops = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [sum(costs[stop - size : stop], Fraction()) for stop, size in zip(stops, sizes, strict=True)]


@examples(100)
@given(st.lists(cells(), min_size=1, max_size=8), st.integers(1, 8), RECOMPUTE)
def test_no_partition_into_as_many_cells_has_less_variance(
    blocks: list[Cell], devices: int, recompute: bool | None
) -> None:
    plan = answer_for(blocks, devices, options=Options(recompute=recompute))
    assert isinstance(plan, Plan)
    assert plan.depth == min(len(blocks), devices)
    chosen = [stage.stop - stage.start for stage in plan.stages]
    least = min(pvariance(cell_costs(blocks, sizes)) for sizes in compositions(len(blocks), plan.depth))
    assert pvariance(cell_costs(blocks, chosen)) == least


@examples(60)
@given(st.lists(cells(), min_size=2, max_size=6), st.integers(1, 40), RECOMPUTE)
def test_a_partition_that_fits_is_found_wherever_there_is_one(
    blocks: list[Cell], memory_bytes: int, recompute: bool | None
) -> None:
    answer = answer_for(blocks, 2, memory_bytes=memory_bytes, options=Options(recompute=recompute))
    ways = ("yes", "by block") if recompute is not False else ("no",)
    every = []
    for stop in range(1, len(blocks)):
        first, second = blocks[:stop], blocks[stop:]
        crossing, kept = first[-1].output_bytes, {"no": 4 * first[-1].kept_output_bytes}
        every.append(
            (
                {way: held_bytes(first, 0, way) + 7 * crossing - kept.get(way, 0) for way in ways},
                {way: held_bytes(second, crossing, way) for way in ways},
            )
        )
    worst = [max(min(held.values()) for held in stages) for stages in every]
    if isinstance(answer, Infeasible):
        assert answer.reasons[0].missing_bytes == min(worst) - memory_bytes
    else:
        held_by_stage = every[answer.stages[0].stop - 1]
        assert [stage.memory_bytes for stage in answer.stages] == [
            held[stage.recomputes] for held, stage in zip(held_by_stage, answer.stages, strict=True)
        ]
        assert max(stage.memory_bytes for stage in answer.stages) <= memory_bytes


def held_bytes(stage: Sequence[Cell], inputs: int, recomputes: str) -> int:
    """|W| and its gradients, what four microbatches keep, and the largest transient.

    Without recomputation all four are kept only before the first gradients, which replace one's activations.

    They keep their inputs and one of them its activations, or without recomputation all their activations. By block
    they keep the inputs of all blocks, and one of them what the largest has made when it has run again. In buffers:
    four microbatches sent, two received ahead, and on the stage before a gradient in use. Without recomputation those
    sent take only what is not kept; two more inputs are there when gradients have replaced activations.
    """
    activations = kept_bytes(stage)
    reads = [inputs, *(cell.output_bytes for cell in stage[:-1])]
    again = max(again_bytes(cell, read) for cell, read in zip(stage, reads, strict=True))
    kept = {
        "no": 4 * activations,
        "yes": activations + 4 * inputs,
        "by block": again + 4 * inputs_kept(stage, inputs),
    }[recomputes]
    weights = sum(cell.weight_bytes for cell in stage)
    late = sum(max(cell.weight_bytes - (cell.activation_bytes - (cell.shared_bytes or 0)), 0) for cell in stage)
    return (
        weights
        + (late if recomputes == "no" else weights)
        + kept
        + (4 + 2 + (2 if recomputes == "no" else 0)) * inputs
        + max(cell.workspace_bytes for cell in stage)
    )


def test_four_cells_pay_for_filling_and_recomputing() -> None:
    # F + B + recomputed F = 4 s a cell; m = 8 microbatches on K = 4 cells: 4 s * (8 + 4 - 1) / 8.
    plan = answer_for([Cell()] * 4, 4, batch_size=8)
    assert isinstance(plan, Plan)
    assert plan.closed_form.time_per_microbatch_s == 5.5
    assert plan.closed_form.bubble_fraction == 3 / 11
    assert plan.recompute
    assert plan.schedule == "gpipe"


def test_without_recomputation_four_cells_pay_only_for_filling() -> None:
    # F + B = 3 s a cell; all eight microbatches keep their 2 bytes, and with recomputation one.
    blocks, asked = [Cell(activation_bytes=2)] * 4, Options(recompute=False)
    plan = answer_for(blocks, 4, batch_size=8, memory_bytes=16, options=asked)
    assert isinstance(plan, Plan)
    assert plan.time_per_microbatch_s == 3 * 11 / 8
    assert not plan.recompute
    assert [stage.memory_bytes for stage in plan.stages] == [16] * 4
    too_tight = answer_for(blocks, 4, batch_size=8, memory_bytes=15, options=asked)
    assert isinstance(too_tight, Infeasible)
    assert too_tight.reasons[0].missing_bytes == 1
    assert isinstance(answer_for(blocks, 4, batch_size=8, memory_bytes=15), Plan)


def test_the_fastest_of_the_measured_sizes_is_taken_and_the_others_named() -> None:
    # Sizes take time in proportion, so the smallest has the smallest bubble.
    plan = answer_for([Cell()] * 2, 2, batch_size=8, sizes=(1, 2, 4))
    assert isinstance(plan, Plan)
    assert plan.microbatch_size == 1
    assert [a.microbatch_size for a in plan.alternatives] == [2, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(stages=3), r"stages: must not exceed the number of blocks \(2\), got 3"),
        (Options(stages=2), r"stages: must not exceed the number of devices \(1\), got 2"),
        (Options(synchronisation="all-reduce"), "synchronisation: is not an option of the planner gpipe"),
        (Options(schedule="1f1b"), "schedule: must be one of gpipe for the planner gpipe, got '1f1b'"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(options: Options, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        answer_for([Cell()] * 2, 1, options=options)
