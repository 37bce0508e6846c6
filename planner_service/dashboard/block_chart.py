"""Block chart: a stacked bar a block, of what it takes. Pure geometry; the template writes the SVG."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner_service.dashboard.axes import Tick, memory_ticks, ticks
from planner_service.dashboard.formats import seconds, size

HEIGHT = 220.0
LEFT, RIGHT, TOP, BOTTOM = 84.0, 1150.0, 12.0, 190.0
MOST_BARS = 240
GAP = 0.15
"""The part of a bar's place that stays empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """What is drawn for one block: its name, and the parts of its bar by kind, from the bottom up."""

    name: str
    parts: tuple[tuple[str, float], ...]
    spread: float = 0.0

    @property
    def total(self) -> float:
        """The bar's height."""
        return sum(value for _, value in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a bar."""

    kind: str
    y: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar: a block, or the sum of several neighbours where there are too many for one each.

    `whisker` is the spread around the top: its middle, low and high.
    """

    x: float
    width: float
    title: str
    parts: tuple[Part, ...]
    whisker: tuple[float, float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChart:
    """The bars, the axes, and how many blocks stand behind a bar."""

    bars: tuple[Bar, ...]
    values: tuple[Tick, ...]
    blocks: tuple[Tick, ...]
    blocks_a_bar: int


def time_chart(columns: Sequence[Column]) -> BlockChart | None:
    """The chart of seconds; None where all is 0."""

    def axis(most_s: float) -> tuple[Tick, ...]:
        return ticks(0.0, most_s, start=BOTTOM, end=TOP, most=4, label=seconds)

    return _chart(columns, seconds, axis)


def memory_chart(columns: Sequence[Column]) -> BlockChart | None:
    """The chart of bytes; None where all is 0."""

    def axis(most_bytes: float) -> tuple[Tick, ...]:
        return memory_ticks(most_bytes, start=BOTTOM, end=TOP, most=4)

    return _chart(columns, size, axis)


def _chart(
    columns: Sequence[Column], label: Callable[[float], str], axis: Callable[[float], tuple[Tick, ...]]
) -> BlockChart | None:
    blocks_a_bar = max(1, -(-len(columns) // MOST_BARS))
    starts = range(0, len(columns), blocks_a_bar)
    drawn = [_together(columns[start : start + blocks_a_bar], start) for start in starts]
    most = max((column.total + column.spread / 2 for column in drawn), default=0.0)
    if not most > 0:
        return None
    return BlockChart(
        bars=tuple(_bar(column, index, len(drawn), most, label) for index, column in enumerate(drawn)),
        values=axis(most),
        blocks=_block_ticks(len(columns)),
        blocks_a_bar=blocks_a_bar,
    )


def _together(columns: Sequence[Column], start: int) -> Column:
    if len(columns) == 1:
        return Column(name=f"{start}: {columns[0].name}", parts=columns[0].parts, spread=columns[0].spread)
    names = [kind for kind, _ in columns[0].parts]
    sums = (sum(column.parts[index][1] for column in columns) for index in range(len(names)))
    return Column(name=f"{start} to {start + len(columns) - 1}", parts=tuple(zip(names, sums, strict=True)))


def _bar(column: Column, index: int, bars: int, most: float, label: Callable[[float], str]) -> Bar:
    place = (RIGHT - LEFT) / bars
    scale = (BOTTOM - TOP) / most
    x, width = LEFT + place * (index + GAP / 2), place * (1 - GAP)
    y = BOTTOM
    parts = []
    for kind, value in column.parts:
        y -= value * scale
        parts.append(Part(kind=kind, y=y, height=value * scale))
    half = column.spread * scale / 2
    words = ", ".join(f"{kind.replace('-', ' ')} {label(value)}" for kind, value in column.parts)
    return Bar(
        x=x,
        width=width,
        title=f"{column.name}: {words}" + (f", spread {label(column.spread)}" if column.spread else ""),
        parts=tuple(parts),
        whisker=(x + width / 2, min(y + half, BOTTOM), y - half) if half > 0.5 else None,
    )


def _block_ticks(blocks: int) -> tuple[Tick, ...]:
    """Numbers under the middles of bars."""
    place = (RIGHT - LEFT) / blocks
    last = max(blocks - 1, 1)
    end = LEFT + place * (last + 0.5)
    return ticks(0.0, last, start=LEFT + place / 2, end=end, most=min(12, last), label=lambda block: f"{block:g}")
