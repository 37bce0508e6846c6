"""A long run's streams, made of a short one's, are instruction by instruction those that are made at once."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.plan import Plan
from pipeplan.programs.check import check
from pipeplan.programs.communicate import AmongStages
from pipeplan.programs.footprint import footprints, last_uses
from pipeplan.programs.instructions import Checkpoint, Instruction
from pipeplan.programs.pipeline import pipeline_of
from pipeplan.programs.program import Program, brief, short_batches
from pipeplan.programs.repeating import counted, retirements
from pipeplan.simulation.predict import long_program_of, program_of
from tests.properties import examples
from tests.schedules import ASP, FULL, FUSED, SCHEDULES, STASHING, V_SHAPED, chunks_of, microbatches_of
from tests.worker_agent.runtime.plans import make_plan

FLAT = {"data-parallel", "data-parallel-asp"}
"""Of one stage."""


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any schedule with any shape that it takes."""
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    depth = 1 if schedule in FLAT else draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 3)) if schedule == "1f1b-interleaved" and depth > 1 else 1
    chunks = 2 if schedule in V_SHAPED else chunks
    microbatches = draw(st.integers(1, 2 if schedule in STASHING else 6))
    if schedule in FULL:
        microbatches += depth * chunks
    if schedule == "1f1b-interleaved":
        microbatches = depth * min(microbatches, 2)
    equal = draw(st.integers(1, 3))
    unequal = tuple(draw(st.integers(1, 3)) for _ in range(depth))
    split = schedule in FUSED and draw(st.booleans())
    return make_plan(
        schedule,
        tuple(range(depth * chunks + 1)),
        replicas=unequal if schedule in STASHING else equal,
        microbatches=microbatches,
        recompute=draw(st.booleans()),
        split_backward=split,
        half_way=split and draw(st.booleans()),
        chunks=chunks,
    )


def exchanges(plan: Plan) -> AmongStages:
    """All that the schedule allows."""
    if plan.schedule in (*STASHING, ASP):
        return AmongStages()
    return AmongStages(tied=((0, plan.depth - 1),) if plan.depth > 1 else (), norm=True)


@given(
    plan=plans(), more=st.integers(1, 9), first_batch=st.integers(0, 20), every=st.integers(0, 5), meet=st.booleans()
)
@examples(100)
def test_a_repeated_program_is_the_whole_one(plan: Plan, more: int, first_batch: int, every: int, meet: bool) -> None:
    batches = short_batches(pipeline_of(plan, batches=1)) + more
    among_stages = exchanges(plan) if meet else AmongStages()
    whole, long = (
        make(plan, batches=batches, first_batch=first_batch, checkpoint_every=every, among_stages=among_stages)
        for make in (program_of, long_program_of)
    )
    assert long.pipeline == whole.pipeline
    for one, other in zip(long.streams, whole.streams, strict=True):
        assert tuple(one.instructions) == other.instructions
        assert len(one.instructions) == len(other.instructions)
        assert all(one.instructions[i] == other.instructions[i] for i in range(-3, len(other.instructions), 5))
        for own, others in zip(long.stage_streams(one), whole.stage_streams(other), strict=True):
            assert (own.stage, tuple(own.instructions)) == (others.stage, others.instructions)
            assert list(retirements(own.instructions)) == retired(others.instructions)
            assert sum(times for _, times in counted(own.instructions)) == without_checkpoints(others.instructions)


def retired(instructions: Sequence[Instruction]) -> list[tuple[int, ...]]:
    """By instruction, the versions whose last use it is: from all of the stream at once."""
    last = last_uses(instructions)
    return [tuple(sorted(v for v, at in last.items() if at == index)) for index in range(len(instructions))]


def without_checkpoints(instructions: Sequence[Instruction]) -> int:
    return sum(1 for i in instructions if not isinstance(i, Checkpoint))


@given(plan=plans())
@examples(60)
def test_what_holds_of_the_brief_program_holds_of_the_long_one(plan: Plan) -> None:
    """It keeps the laws, and no stage ever has more in flight."""
    batches = short_batches(pipeline_of(plan, batches=1)) + 5
    whole, long = program_of(plan, batches=batches), long_program_of(plan, batches=batches)
    short = brief(long)
    check(short)
    check(whole)
    assert most_held(short) == most_held(whole)
    assert brief(whole) is whole


def most_held(program: Program) -> list[tuple[int, ...]]:
    held: list[tuple[int, ...]] = []
    for stream in program.streams:
        recompute = program.pipeline.recomputes(stream.stage)
        after = [h for s in program.stage_streams(stream) for h in footprints(s.instructions, recompute=recompute)]
        held.append(
            (max(h.in_flight for h in after), max(h.versions for h in after), max(h.activations for h in after))
        )
    return held


@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - FLAT))
def test_a_run_without_end_is_made_at_once_and_known_at_any_place(schedule: str) -> None:
    """10^15 batches; neighbours of a place far away follow each other as they do early on."""
    chunks = chunks_of(schedule)
    plan = make_plan(
        schedule,
        tuple(range(4 * chunks + 1)),
        microbatches=microbatches_of(schedule, 4, depth=4 * chunks),
        chunks=chunks,
    )
    program = long_program_of(plan, batches=10**15, checkpoint_every=7)
    for stream in program.streams:
        instructions = stream.instructions
        assert len(instructions) > 10**15
        assert instructions[-1] == replace_version(instructions[-1], 10**15)
        period = len(instructions) // 10**15 * 7
        here = instructions[10**12 : 10**12 + 3 * period]
        kinds = [type(i) for i in here]
        assert all(type(i) in kinds for i in instructions[len(instructions) // 2 : len(instructions) // 2 + period])
        numbers = [i.version for i in here if isinstance(i, Checkpoint) and i.chunk == 0]
        assert all(later - earlier == 7 for earlier, later in pairwise(numbers))
        assert numbers


def replace_version(instruction: Instruction, version: int) -> Instruction:
    assert isinstance(instruction, Checkpoint)
    return replace(instruction, version=version)


def test_unequal_replicas_repeat_with_the_batch_that_all_share() -> None:
    """7-1 (2018, table 1): a batch is seven minibatches."""
    plan = make_plan("pipedream", (0, 1, 2), replicas=(7, 1), microbatches=1)
    assert lcm(*plan.replicas) == 7
    whole, long = program_of(plan, batches=40), long_program_of(plan, batches=40)
    assert [tuple(s.instructions) for s in long.streams] == [s.instructions for s in whole.streams]
