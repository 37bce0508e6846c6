"""Schedule drawing: a timeline as rows of bars, a row a rank. Pure geometry; the template writes the SVG."""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.programs.instructions import Instruction, StartReduce, is_compute, microbatches_of
from pipeplan.programs.timeline import Lane, Timeline, TimelineEvent
from planner_service.dashboard.axes import Tick, time_ticks

WIDTH = 1160.0
LABEL_WIDTH = 92.0
ROW_HEIGHT = 28.0
AXIS_HEIGHT = 26.0
MAX_ROWS = 32
READABLE_BARS = 64
NARROWEST_TEXT = 9.0
LETTER_WIDTH = 6.5
JOINED_GAP = 0.6
"""Bars of one kind that are nearer than this are drawn as one: thousands of slivers would look the same."""

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
"""What is told apart, by the instruction's name, in the legend's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One instruction, or several of a kind that are too close to be told apart."""

    x: float
    width: float
    kind: str
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rank."""

    y: float
    label: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """The rows, the time axis, and the kinds that occur."""

    title: str
    height: float
    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    legend: tuple[tuple[str, str], ...]
    hidden_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The time that is shown, [start_s, start_s + span_s)."""

    start_s: float
    span_s: float

    def x(self, moment_s: float) -> float:
        """Where a moment is, kept inside the picture."""
        share = (moment_s - self.start_s) / self.span_s if self.span_s > 0 else 0.0
        return LABEL_WIDTH + min(max(share, 0.0), 1.0) * (WIDTH - LABEL_WIDTH)

    def head(self, span_s: float) -> "Window":
        """Its first part."""
        return Window(start_s=self.start_s, span_s=min(span_s, self.span_s))

    def tail(self, span_s: float) -> "Window":
        """Its last part."""
        shown_s = min(span_s, self.span_s)
        return Window(start_s=self.start_s + self.span_s - shown_s, span_s=shown_s)

    def shows(self, event: TimelineEvent) -> bool:
        """Whether any of the event is inside."""
        return event.end_s > self.start_s and event.start_s < self.start_s + self.span_s


def last_batches(timeline: Timeline, batches: int) -> Window:
    """The window of a timeline's last batches: its steady state. The whole of it where there are no more."""
    start_s = min((lane.start_s[0] for lane in timeline.lanes if lane.start_s), default=0.0)
    shown_s = timeline.makespan_s * min(batches / timeline.batches, 1.0)
    return Window(start_s=start_s + timeline.makespan_s - shown_s, span_s=shown_s)


def readable_s(timeline: Timeline, window: Window) -> float:
    """How many seconds of the window can be shown so that its bars can still be told apart."""
    bars = (
        sum(is_compute(event.instruction) and window.shows(event) for event in lane.events()) for lane in timeline.lanes
    )
    return window.span_s * min(1.0, READABLE_BARS / max(1, *bars))


def draw(timeline: Timeline, window: Window, *, title: str) -> Drawing:
    """The part of the timeline that the window shows."""
    rows = tuple(
        Row(y=AXIS_HEIGHT + i * ROW_HEIGHT, label=_label(timeline, lane), bars=_bars(lane, window))
        for i, lane in enumerate(timeline.lanes[:MAX_ROWS])
    )
    kinds = {bar.kind for row in rows for bar in row.bars}
    return Drawing(
        title=title,
        height=AXIS_HEIGHT + len(rows) * ROW_HEIGHT + 4,
        rows=rows,
        ticks=time_ticks(window.span_s, start=LABEL_WIDTH, end=WIDTH),
        legend=tuple((kind, name) for kind, name in KINDS.items() if kind in kinds),
        hidden_rows=max(len(timeline.lanes) - MAX_ROWS, 0),
    )


def _label(timeline: Timeline, lane: Lane) -> str:
    replicated = any(other.replica for other in timeline.lanes)
    return f"{lane.rank}: stage {lane.stage}" + (f".{lane.replica}" if replicated else "")


def _bars(lane: Lane, window: Window) -> tuple[Bar, ...]:
    bars: list[Bar] = []
    for bar in _single_bars(lane, window):
        if bars and _same_blot(bars[-1], bar):
            first = bars.pop()
            bars.append(
                Bar(
                    x=first.x,
                    width=bar.x + bar.width - first.x,
                    kind=bar.kind,
                    title=f"{first.title.partition(' … ')[0]} … {bar.title}",
                    text="",
                )
            )
        else:
            bars.append(bar)
    return tuple(bars)


def _single_bars(lane: Lane, window: Window) -> Iterator[Bar]:
    for text, event in zip(lane.instructions, lane.events(), strict=True):
        if event.end_s <= event.start_s or not window.shows(event):
            continue
        x, end = window.x(event.start_s), window.x(event.end_s)
        kind = _kind(event.instruction)
        label = "" if kind in ("Send", "Receive") else _numbers(event.instruction)
        fits = end - x >= max(NARROWEST_TEXT, LETTER_WIDTH * len(label) + 2)
        title = f"{text}: {1e3 * (event.end_s - event.start_s):.4g} ms"
        yield Bar(x=x, width=end - x, kind=kind, title=title, text=label if fits else "")


def _same_blot(first: Bar, second: Bar) -> bool:
    slivers = first.width < NARROWEST_TEXT / 3 or second.width < NARROWEST_TEXT / 3
    return slivers and first.kind == second.kind and second.x - (first.x + first.width) < JOINED_GAP


def _kind(instruction: Instruction) -> str:
    name = type(instruction).__name__
    if name in KINDS:
        return name
    if isinstance(instruction, StartReduce):
        return "ReduceGradients"
    return "Send" if name.startswith("Send") else "Receive"


def _numbers(instruction: Instruction) -> str:
    return ",".join(str(k) for k in microbatches_of(instruction))
