"""A locked plan: what stays is not reported as changed, and whatever changes is reported by its own name."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.files import plan_document
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Block, Overheads, Profile
from pipeplan.planners.problem import Options
from pipeplan.planners.solve import solve
from pipeplan.questions.locked import Lock, LockedQuestion, LockFinding, Thresholds, ids_of, moved_on, whole
from tests.pipeplan.builders import Cell, cluster, profile

CELLS = [Cell(forward_s=time_s, weight_bytes=8, output_bytes=4) for time_s in (1.0, 1.5, 0.5, 1.0)]
ASKED = LockedQuestion(
    planner="gpipe",
    batch_size=8,
    options=Options(),
    profile=profile(
        [Cell(forward_s=time_s, weight_bytes=8, output_bytes=4) for time_s in (1.0, 1.5, 0.5, 1.0)], sizes=(1, 2)
    ),
    cluster=cluster((2, 1e9)),
)


def locked(asked: LockedQuestion) -> Lock:
    """The lock of the plan that the planner makes."""
    plan = solve(asked.planner, asked.problem)
    assert isinstance(plan, Plan)
    return Lock(alias="a", ids=ids_of(plan, asked), plan=plan, asked=asked, derived=plan_document(plan))


LOCK = locked(ASKED)


def found(now: LockedQuestion, **thresholds: float) -> dict[str, LockFinding]:
    """By what was looked at."""
    return {one.what: one for one in moved_on(LOCK, now, Thresholds(**thresholds))}


def with_blocks(blocks: tuple[Block, ...]) -> LockedQuestion:
    """The question with other blocks."""
    return replace(ASKED, profile=replace(ASKED.profile, blocks=blocks))


def test_a_lock_holds_while_nothing_has_changed() -> None:
    assert all(one.holds for one in found(ASKED).values())
    assert whole(LOCK, plan_document(LOCK.plan)).holds


COUNTED = ("input_bytes", "output_bytes", "activation_bytes")
TIMES = ("forward_s", "backward_s")


@given(block=st.integers(0, 3), size=st.integers(0, 1), field=st.sampled_from(COUNTED + TIMES), more=st.floats(0.06, 3))
def test_every_change_of_a_block_is_reported_by_its_name(block: int, size: int, field: str, more: float) -> None:
    blocks = list(ASKED.profile.blocks)
    measurements = list(blocks[block].measurements)
    before = getattr(measurements[size], field)
    after = before * (1 + more) if field in TIMES else before + 1 + int(more)
    measurements[size] = replace(measurements[size], **{field: after})
    blocks[block] = replace(blocks[block], measurements=tuple(measurements))
    finding = found(with_blocks(tuple(blocks)))["blocks"]
    assert not finding.holds
    (line,) = finding.changes
    assert line.startswith(f"~ {blocks[block].name}: measurements.{size + 1}.{field}: ")


@given(change=st.floats(-0.2, 0.2), tolerance=st.floats(0, 0.2))
def test_times_count_from_the_tolerance_on(change: float, tolerance: float) -> None:
    if abs(abs(change) - tolerance) < 1e-6:
        return

    def slower(one: Measurement) -> Measurement:
        return replace(one, forward_s=one.forward_s * (1 + change))

    blocks = tuple(replace(b, measurements=tuple(map(slower, b.measurements))) for b in ASKED.profile.blocks)
    finding = found(with_blocks(blocks), tolerance=tolerance)["blocks"]
    assert finding.holds == (abs(change) < tolerance)


def test_blocks_that_come_and_go_are_reported_and_equal_neighbours_share_a_line() -> None:
    first, *others = ASKED.profile.blocks
    finding = found(with_blocks((replace(first, name="new"), *others)))["blocks"]
    assert finding.changes == (f"- {first.name}: 8 weight_bytes", "+ new: 8 weight_bytes")
    heavier = tuple(replace(block, weight_bytes=16) for block in ASKED.profile.blocks)
    (line,) = found(with_blocks(heavier))["blocks"].changes
    names = [block.name for block in heavier]
    assert line == f"~ {names[0]} ... {names[-1]} (4 blocks): weight_bytes: 8 -> 16 (+100.0 %)"
    moved = (others[0], first, *others[1:])
    assert "~ order of the blocks" in found(with_blocks(moved))["blocks"].changes


def test_whatever_is_measured_may_differ_by_the_tolerance() -> None:
    """Shares of times and a processor's free memory had no tolerance: a second profile of a model never held."""

    def again(path: str, value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            inner = {field.name: again(f"{path}.{field.name}", getattr(value, field.name)) for field in fields(value)}
            return replace(value, **inner)
        if isinstance(value, tuple):
            return tuple(again(path, each) for each in value)
        memory = path.endswith(("device.memory_bytes", "device.context_bytes"))
        return type(value)(0.9 * value) if isinstance(value, float) or memory else value

    measured = replace(
        ASKED.profile,
        device=replace(ASKED.profile.device, context_bytes=1000),
        overheads=Overheads(forward_without_graph=0.6, update_s_per_byte=1e-9, instruction_s=1e-5, exchange_factor=2.0),
        blocks=tuple(
            replace(
                block,
                measurements=tuple(
                    replace(one, backward_input_s=0.5, backward_weight_s=0.5, deferred_share=0.5)
                    for one in block.measurements
                ),
            )
            for block in ASKED.profile.blocks
        ),
    )
    then = replace(ASKED, profile=measured)
    lock = Lock(alias=None, ids={}, plan=LOCK.plan, asked=then, derived={})
    now = replace(then, profile=again("", measured), cluster=again("", ASKED.cluster))
    for tolerance, holds in ((0.11, True), (0.05, False)):
        findings = {one.what: one for one in moved_on(lock, now, Thresholds(tolerance=tolerance))}
        assert [findings[what].holds for what in ("blocks", "cluster")] == [holds, holds], findings


def test_a_changed_model_is_one_line_for_neighbours_that_changed_alike() -> None:
    """Each block had a line of all its numbers, a thousand characters long."""

    def wider(block: Block, factor: float) -> Block:
        measurements = tuple(
            replace(one, forward_s=one.forward_s * factor, output_bytes=2 * one.output_bytes)
            for one in block.measurements
        )
        return replace(block, weight_bytes=2 * block.weight_bytes, measurements=measurements)

    first, *others = ASKED.profile.blocks
    blocks = (wider(first, 1.5), *(wider(block, 2.0) for block in others))
    (line,) = found(with_blocks(blocks))["blocks"].changes
    counted = "weight_bytes: 8 -> 16 (+100.0 %); output_bytes: +100.0 %"
    assert line == f"~ {first.name} ... {others[-1].name} (4 blocks): {counted}; forward_s: +50.0 % to +100.0 %"


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (replace(ASKED.profile, dtype="float16"), "~ dtype: float32 -> float16"),
        (replace(ASKED.profile, model=replace(ASKED.profile.model, name="other")), "~ model.name: "),
        (replace(ASKED.profile, estimated=True), "~ estimated: False -> True"),
    ],
)
def test_what_else_a_profile_says_is_reported(changed: Profile, line: str) -> None:
    finding = found(replace(ASKED, profile=changed))["blocks"]
    assert any(one.startswith(line) for one in finding.changes)


def test_another_cluster_is_reported() -> None:
    devices = found(replace(ASKED, cluster=cluster((4, 1e9))))["cluster"]
    assert devices.changes == ("~ levels.0.size: 2 -> 4 (+100.0 %)",)
    slower = found(replace(ASKED, cluster=cluster((2, 0.97e9))))["cluster"]
    assert slower.holds, "speeds are measured"
    assert not found(replace(ASKED, cluster=cluster((2, 0.97e9))), tolerance=0.01)["cluster"].holds


def test_a_better_plan_is_reported_and_the_locked_one_is_priced_with_todays_costs() -> None:
    faster = replace(ASKED, cluster=cluster((2, 1.04e9)))
    same = found(faster, gain=0.0)["better plan"]
    assert same.holds and "with today's costs" in same.detail
    worse = replace(ASKED, planner="auto")
    better = {one.what: one for one in moved_on(LOCK, worse, Thresholds())}["better plan"]
    assert not better.holds
    assert any(line.startswith("~ samples/s: ") for line in better.changes)
    assert {one.what: one for one in moved_on(LOCK, worse, Thresholds(gain=100.0))}["better plan"].holds


def test_that_no_plan_fits_any_more_is_reported() -> None:
    tiny = found(replace(ASKED, cluster=cluster((2, 1e9), memory_bytes=1)))["better plan"]
    assert (tiny.holds, tiny.detail) == (False, "no plan fits any more")
    assert tiny.changes


def test_documents_that_do_not_go_together_are_reported() -> None:
    h100 = replace(ASKED.cluster, device=replace(ASKED.cluster.device, name="H100-SXM5-80GB"))
    a100 = replace(ASKED.profile, device=replace(ASKED.profile.device, name="A100-SXM4-80GB"))
    finding = found(replace(ASKED, cluster=h100, profile=a100))["better plan"]
    assert not finding.holds
    assert "cannot be asked any more: profile.device.name: " in finding.detail


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("profile", replace(ASKED, profile=replace(ASKED.profile, dtype="float16"))),
        ("cluster", replace(ASKED, cluster=cluster((4, 1e9)))),
    ],
)
def test_other_documents_than_were_hashed_do_not_hold(name: str, other: LockedQuestion) -> None:
    finding = whole(replace(LOCK, asked=other), plan_document(LOCK.plan))
    assert not finding.holds
    assert any(line.startswith(f"~ {name}_id: ") for line in finding.changes)
