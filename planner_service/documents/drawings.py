"""Drawings: the block charts of a profile and the levels of a cluster. Pure geometry; the templates write the SVG.

A block chart has a stacked bar for each block: its times, or its memory. A cluster's drawing has a row for each level,
from the outermost one down; the first unit of each is opened in the row below.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.profile import Profile
from pipeplan.errors import require
from pipeplan.formats import bandwidth, count, seconds, size
from planner_service.platform.axes import StackedPart, Tick, memory_ticks, ticks

HEIGHT = 220.0
LEFT, RIGHT, TOP, BOTTOM = 84.0, 1150.0, 12.0, 190.0
MOST_BARS = 240
GAP = 0.15
"""The share of a bar's width that stays empty."""

CLUSTER_WIDTH = 1160.0
CLUSTER_LEFT = 300.0
ROW_HEIGHT = 74.0
MOST_BOXES = 16
LETTER_WIDTH = 7.0
MOST_LEVELS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockColumn:
    """The drawing of one block: its name, and the parts of its bar by kind, from the bottom up."""

    name: str
    parts: tuple[tuple[str, float], ...]
    spread: float = 0.0

    @property
    def total(self) -> float:
        return sum(value for _, value in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBar:
    """A bar: a block, or the sum of several neighbours where there are too many for one each.

    `whisker` is the spread around the top: its middle, low and high.
    """

    x: float
    width: float
    title: str
    parts: tuple[StackedPart, ...]
    whisker: tuple[float, float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChart:
    """The bars, the axes, and how many blocks each bar represents."""

    bars: tuple[BlockBar, ...]
    values: tuple[Tick, ...]
    blocks: tuple[Tick, ...]
    blocks_a_bar: int


def size_of(profile: Profile, wanted: str) -> int:
    """The requested microbatch size, or else the largest. Raises InvalidInputError for one that was not measured."""
    sizes = sorted(measurement.microbatch_size for measurement in profile.blocks[0].measurements)
    rule = f"must be one that was measured: {', '.join(map(str, sizes))}"
    require(wanted in ("", *map(str, sizes)), "microbatch_size", rule, wanted)
    return int(wanted) if wanted else sizes[-1]


def time_columns(profile: Profile, microbatch_size: int) -> list[BlockColumn]:
    """The seconds of every block's forward and backward."""
    measured = [(block.name, block.at(microbatch_size)) for block in profile.blocks]
    return [
        BlockColumn(
            name=name,
            parts=(("forward", at.forward_s), ("backward", at.backward_s)),
            spread=(at.forward_spread_s or 0.0) + (at.backward_spread_s or 0.0),
        )
        for name, at in measured
    ]


def memory_columns(profile: Profile, microbatch_size: int) -> list[BlockColumn]:
    """The bytes of every block's weights, activations and workspace."""
    measured = [(block, block.at(microbatch_size)) for block in profile.blocks]
    return [
        BlockColumn(
            name=block.name,
            parts=(
                ("weights", float(block.weight_bytes)),
                ("activations", float(at.activation_bytes)),
                ("transient", float(at.workspace_bytes)),
            ),
        )
        for block, at in measured
    ]


def time_chart(columns: Sequence[BlockColumn]) -> BlockChart | None:
    """The chart of seconds; None where all is 0."""
    return _chart(columns, seconds, partial(ticks, 0.0, label=seconds))


def memory_chart(columns: Sequence[BlockColumn]) -> BlockChart | None:
    """The chart of bytes; None where all is 0."""
    return _chart(columns, size, memory_ticks)


def _chart(
    columns: Sequence[BlockColumn], label: Callable[[float], str], axis: Callable[..., tuple[Tick, ...]]
) -> BlockChart | None:
    blocks_a_bar = max(1, -(-len(columns) // MOST_BARS))
    drawn = [_together(columns[start : start + blocks_a_bar], start) for start in range(0, len(columns), blocks_a_bar)]
    most = max((column.total + column.spread / 2 for column in drawn), default=0.0)
    if not most > 0:
        return None

    # The numbers of blocks are centred under their bars.
    place = (RIGHT - LEFT) / len(columns)
    last = max(len(columns) - 1, 1)
    end = LEFT + place * (last + 0.5)
    blocks = ticks(0.0, last, start=LEFT + place / 2, end=end, most=min(12, last), label=lambda block: f"{block:g}")
    return BlockChart(
        bars=tuple(_bar(column, index, len(drawn), most, label) for index, column in enumerate(drawn)),
        values=axis(most, start=BOTTOM, end=TOP, most=4),
        blocks=blocks,
        blocks_a_bar=blocks_a_bar,
    )


def _together(columns: Sequence[BlockColumn], start: int) -> BlockColumn:
    """The sum of neighbouring blocks; one block alone keeps its spread."""
    if len(columns) == 1:
        return BlockColumn(name=f"{start}: {columns[0].name}", parts=columns[0].parts, spread=columns[0].spread)
    names = [kind for kind, _ in columns[0].parts]
    sums = (sum(column.parts[index][1] for column in columns) for index in range(len(names)))
    return BlockColumn(name=f"{start} to {start + len(columns) - 1}", parts=tuple(zip(names, sums, strict=True)))


def _bar(column: BlockColumn, index: int, bars: int, most: float, label: Callable[[float], str]) -> BlockBar:
    """Bar `index` of `bars` bars, in a chart whose highest bar has `most`."""
    place = (RIGHT - LEFT) / bars
    scale = (BOTTOM - TOP) / most
    x, width = LEFT + place * (index + GAP / 2), place * (1 - GAP)
    y = BOTTOM
    parts = []
    for kind, value in column.parts:
        y -= value * scale
        parts.append(StackedPart(kind=kind, y=y, height=value * scale))
    half = column.spread * scale / 2
    words = ", ".join(f"{kind.replace('-', ' ')} {label(value)}" for kind, value in column.parts)
    return BlockBar(
        x=x,
        width=width,
        title=f"{column.name}: {words}" + (f", spread {label(column.spread)}" if column.spread else ""),
        parts=tuple(parts),
        whisker=(x + width / 2, min(y + half, BOTTOM), y - half) if half > 0.5 else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One unit of a level; `opened` is the one whose inside is the row below."""

    x: float
    width: float
    text: str
    opened: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelRow:
    """The units that a level joins, and its links. The last box counts the units that are not drawn."""

    y: float
    name: str
    links: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDrawing:
    """The rows from the outermost level to the devices."""

    height: float
    rows: tuple[LevelRow, ...]
    hidden_levels: int


def cluster_drawing(cluster: Cluster) -> ClusterDrawing:
    """The drawing, with the innermost level last. Beyond MOST_LEVELS the outermost levels are left out."""
    shown = cluster.levels[:MOST_LEVELS]
    units = [1]
    for level in shown:
        units.append(units[-1] * level.size)
    rows = tuple(
        _row(cluster, level, units[index], position, innermost=index == 0)
        for position, (index, level) in enumerate(reversed(list(enumerate(shown))))
    )
    return ClusterDrawing(height=len(rows) * ROW_HEIGHT + 8, rows=rows, hidden_levels=len(cluster.levels) - len(shown))


def _row(cluster: Cluster, level: Level, devices: int, position: int, *, innermost: bool) -> LevelRow:
    """The row of a level whose units have `devices` devices each."""
    drawn = min(level.size, MOST_BOXES)
    place = (CLUSTER_WIDTH - CLUSTER_LEFT) / drawn
    texts = [_device_name(cluster, index) if innermost else f"{count(devices)} devices" for index in range(drawn)]
    if level.size > drawn:
        texts[-1] = f"+{count(level.size - drawn + 1)}"
    boxes = tuple(
        Box(
            x=CLUSTER_LEFT + index * place + 3,
            width=place - 6,
            # The text, its first word, or nothing, depending on the box's width.
            text=next((each for each in (text, text.split(" ")[0]) if LETTER_WIDTH * len(each) + 6 <= place), ""),
            opened=index == 0 and not innermost,
        )
        for index, text in enumerate(texts)
    )
    what = "devices" if innermost else f"units of {count(devices)} devices"
    latency = f", {seconds(level.latency_s)}" if level.latency_s else ""
    return LevelRow(
        y=8 + position * ROW_HEIGHT,
        name=f"{count(level.size)} {what}",
        links=f"{bandwidth(level.bandwidth_bytes_per_s)}{latency}",
        boxes=boxes,
    )


def _device_name(cluster: Cluster, rank: int) -> str:
    """The name of the device at a rank; groups take ranks in their order."""
    if not cluster.groups:
        return cluster.device.name
    counted = 0
    for group in cluster.groups:
        counted += group.count
        if rank < counted:
            return group.device.name
    return cluster.device.name
