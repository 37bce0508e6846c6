"""The page of a run: two timelines on one scale."""

from hypothesis import given
from hypothesis import strategies as st

from pipeplan.programs.instructions import Forward, Instruction, Update
from pipeplan.programs.timeline import Lane, Timeline
from planner_service.plans.drawings import LABEL_WIDTH, WIDTH, draw
from planner_service.runs.page import windows_of


def _timeline(batches: int, microbatches: int, step_s: float) -> Timeline:
    """One rank, whose every forward takes `step_s` and whose updates take nothing."""
    instructions: list[Instruction] = []
    ends_s = [0.0]
    for batch in range(batches):
        for k in range(microbatches):
            instructions.append(Forward(batch * microbatches + k + 1, 0))
            ends_s.append(ends_s[-1] + step_s)
        instructions.append(Update(batch + 1))
        ends_s.append(ends_s[-1])
    lane = Lane(
        rank=0,
        stage=0,
        replica=0,
        instructions=tuple(instructions),
        start_s=tuple(ends_s[:-1]),
        end_s=tuple(ends_s[1:]),
        memory_bytes=(0,) * len(instructions),
    )
    return Timeline(lanes=(lane,), batch_size=microbatches, batches=batches)


@given(st.integers(1, 6), st.integers(1, 40), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_a_second_is_as_wide_in_both_drawings(batches: int, microbatches: int, one_s: float, other_s: float) -> None:
    timelines = {
        "predicted": _timeline(batches, microbatches, one_s),
        "measured": _timeline(batches, microbatches, other_s),
    }
    windows = windows_of(timelines)
    assert windows["predicted"].span_s == windows["measured"].span_s > 0
    for (name, timeline), step_s in zip(timelines.items(), (one_s, other_s), strict=True):
        bars = draw(timeline, windows[name], title=name).rows[0].bars
        a_second = (WIDTH - LABEL_WIDTH) / windows[name].span_s
        whole = min(max((bar.width for bar in bars if "…" not in bar.title), default=0.0), WIDTH)
        assert whole <= step_s * a_second * (1 + 1e-6)
        # The end of what happened is shown.
        assert windows[name].shows(list(timeline.lanes[0].events())[-2])
