"""Drawings of a plan. All of this is pure geometry; the templates write the SVG.

memory_bar     a worker's memory, as one bar of parts
stage_drawing  the model's blocks in a row, cut into stages
draw           a timeline as rows of bars, a row a rank
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from pipeplan.documents.plan import Plan, Stage
from pipeplan.documents.stage_memory import StageMemory
from pipeplan.formats import seconds, size
from pipeplan.programs.instructions import Instruction, StartReduce, microbatches_of
from pipeplan.programs.text import format_instruction
from pipeplan.programs.timeline import Lane, Timeline, TimelineEvent
from planner_service.platform.axes import Tick, time_ticks

WIDTH = 1160.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """One item of the memory."""

    x: float
    width: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBar:
    """The memory items of a stage's worker, on the scale of the longest bar."""

    stage: int
    shares: tuple[MemoryShare, ...]
    total_bytes: int


def fullest(plan: Plan) -> int:
    """The stage with the largest memory a worker; of several, the first."""
    return max(range(plan.depth), key=lambda index: (plan.stages[index].memory_bytes, -index))


def memory_bar(plan: Plan, most_bytes: float) -> MemoryBar:
    """The bar of the plan's fullest stage, on a scale that ends at `most_bytes`."""
    index = fullest(plan)
    stage = plan.stages[index]
    x, shares = 0.0, []
    for kind, held_bytes in items(stage):
        width = WIDTH * held_bytes / most_bytes if most_bytes > 0 else 0.0
        shares.append(MemoryShare(x=x, width=width, kind=kind, title=f"{kind.replace('-', ' ')}: {size(held_bytes)}"))
        x += width
    return MemoryBar(stage=index, shares=tuple(shares), total_bytes=stage.memory_bytes)


def items(stage: Stage) -> list[tuple[str, int]]:
    """The items of the memory that are not 0; a single item if the planner did not split it."""
    if stage.memory is None:
        return [("all-of-it", stage.memory_bytes)]
    held = [(item.name.replace("_", "-"), getattr(stage.memory, item.name)) for item in fields(StageMemory)]
    return [(name, held_bytes) for name, held_bytes in held if held_bytes]


LETTER_WIDTH = 7.0
MAX_DRAWN = 400
"""With more stages, each would be narrower than three points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One stage; `slowest` marks the one that sets the pace, `share` is its time divided by the scale's end."""

    x: float
    width: float
    title: str
    blocks: str
    replicas: str
    slowest: bool
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDrawing:
    """The stages from the input on, as wide as they have blocks."""

    pieces: tuple[Piece, ...]


def stage_drawing(
    plan: Plan, times_s: Sequence[float] | None = None, full_s: float | None = None
) -> StageDrawing | None:
    """The drawing; None if there are too many stages.

    Stages are compared by `times_s`, on a scale that ends at `full_s`: by default by the planner's time a microbatch,
    up to the slowest.
    """
    if plan.depth > MAX_DRAWN:
        return None
    blocks = plan.stages[-1].stop
    compared_s = [stage.time_s for stage in plan.stages] if times_s is None else times_s
    slowest_s = max(compared_s)
    end_s = slowest_s if full_s is None else full_s
    pieces = []
    for index, stage in enumerate(plan.stages):
        x, end = WIDTH * stage.start / blocks, WIDTH * stage.stop / blocks
        shown = f"{stage.start}" if stage.stop == stage.start + 1 else f"{stage.start}–{stage.stop - 1}"
        replicas = f"{stage.replicas} replicas" if stage.replicas > 1 else "1 replica"
        by_block = f" {stage.recomputes}" if stage.recompute_unit == "block" else ""
        recompute = f", recomputing{by_block}" if stage.recompute else ""
        device = f" on {stage.device}" if stage.device else ""
        title = (
            f"Stage {index}: blocks {shown}, {replicas}{device}{recompute}, "
            f"{seconds(stage.time_s)} a microbatch, {size(stage.memory_bytes)} a worker"
        )
        pieces.append(
            Piece(
                x=x,
                width=end - x,
                title=title,
                blocks=_fitting(shown, end - x),
                replicas=_fitting(f"× {stage.replicas}" if stage.replicas > 1 else "", end - x),
                slowest=compared_s[index] == slowest_s > 0,
                share=compared_s[index] / end_s if end_s > 0 else 0.0,
            )
        )
    return StageDrawing(pieces=tuple(pieces))


def _fitting(text: str, width: float) -> str:
    return text if LETTER_WIDTH * len(text) + 4 <= width else ""


LABEL_WIDTH = 92.0
ROW_HEIGHT = 28.0
AXIS_HEIGHT = 26.0
MAX_ROWS = 32
NARROWEST_TEXT = 9.0
BAR_LETTER_WIDTH = 6.5
JOINED_GAP = 0.6
"""Slivers of one kind with a smaller gap are drawn as one bar: thousands of them would look the same."""

KINDS = {
    "Forward": "Forward",
    "Recompute": "Recompute",
    "Backward": "Backward",
    "BackwardInput": "Backward, input",
    "BackwardWeight": "Backward, weights",
    "ReduceGradients": "Gradient exchange",
    "ReduceTied": "Gradients of shared weights",
    "ReduceNorm": "Gradient norm",
    "Update": "Update",
    "Checkpoint": "Checkpoint",
    "Send": "Send",
    "Receive": "Waiting for data (bubble)",
}
"""The kinds of bars, by the instruction's name, in the legend's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionBar:
    """One instruction, or several of one kind that are too close to be drawn separately."""

    x: float
    width: float
    kind: str
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRow:
    """One rank."""

    y: float
    label: str
    bars: tuple[InstructionBar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """The rows, the time axis, and the kinds that occur."""

    title: str
    height: float
    rows: tuple[ScheduleRow, ...]
    ticks: tuple[Tick, ...]
    legend: tuple[tuple[str, str], ...]
    hidden_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnWindow:
    """The time that is shown, [start_s, start_s + span_s)."""

    start_s: float
    span_s: float

    def x(self, moment_s: float) -> float:
        """The horizontal position of a moment, kept inside the picture."""
        share = (moment_s - self.start_s) / self.span_s if self.span_s > 0 else 0.0
        return LABEL_WIDTH + min(max(share, 0.0), 1.0) * (WIDTH - LABEL_WIDTH)

    def shows(self, event: TimelineEvent) -> bool:
        return event.end_s > self.start_s and event.start_s < self.start_s + self.span_s


def last_batches(timeline: Timeline, batches: int) -> DrawnWindow:
    """The window of a timeline's last batches, its steady state; the whole timeline if it has no more."""
    start_s = min((lane.start_s[0] for lane in timeline.lanes if lane.start_s), default=0.0)
    shown_s = timeline.makespan_s * min(batches / timeline.batches, 1.0)
    return DrawnWindow(start_s=start_s + timeline.makespan_s - shown_s, span_s=shown_s)


def draw(timeline: Timeline, window: DrawnWindow, *, title: str, most_rows: int = MAX_ROWS) -> Drawing:
    """The window's part of the timeline, for at most `most_rows` ranks."""
    replicated = any(lane.replica for lane in timeline.lanes)
    rows = tuple(
        ScheduleRow(
            y=AXIS_HEIGHT + i * ROW_HEIGHT,
            label=f"{lane.rank}: stage {lane.stage}" + (f".{lane.replica}" if replicated else ""),
            bars=_bars(lane, window),
        )
        for i, lane in enumerate(timeline.lanes[:most_rows])
    )
    kinds = {bar.kind for row in rows for bar in row.bars}
    return Drawing(
        title=title,
        height=AXIS_HEIGHT + len(rows) * ROW_HEIGHT + 4,
        rows=rows,
        ticks=time_ticks(window.span_s, start=LABEL_WIDTH, end=WIDTH),
        legend=tuple((kind, name) for kind, name in KINDS.items() if kind in kinds),
        hidden_rows=max(len(timeline.lanes) - most_rows, 0),
    )


def _bars(lane: Lane, window: DrawnWindow) -> tuple[InstructionBar, ...]:
    """The lane's bars. Slivers of one kind that nearly touch become one bar, titled by the first and the last."""
    bars: list[InstructionBar] = []
    for event in lane.events():
        if event.end_s <= event.start_s or not window.shows(event):
            continue
        x, end = window.x(event.start_s), window.x(event.end_s)
        width = end - x
        kind = _kind(event.instruction)
        title = f"{format_instruction(event.instruction)}: {1e3 * (event.end_s - event.start_s):.4g} ms"
        label = "" if kind in ("Send", "Receive") else ",".join(str(k) for k in microbatches_of(event.instruction))
        if width < max(NARROWEST_TEXT, BAR_LETTER_WIDTH * len(label) + 2):
            label = ""

        first = bars[-1] if bars else None
        if (
            first is not None
            and first.kind == kind
            and min(first.width, width) < NARROWEST_TEXT / 3
            and x - (first.x + first.width) < JOINED_GAP
        ):
            bars.pop()
            title = f"{first.title.partition(' … ')[0]} … {title}"
            x, width, label = first.x, x + width - first.x, ""
        bars.append(InstructionBar(x=x, width=width, kind=kind, title=title, text=label))
    return tuple(bars)


def _kind(instruction: Instruction) -> str:
    """The one of `KINDS` as which the instruction is drawn."""
    name = type(instruction).__name__
    if name in KINDS:
        return name
    if isinstance(instruction, StartReduce):
        return "ReduceGradients"
    return "Send" if name.startswith("Send") else "Receive"
