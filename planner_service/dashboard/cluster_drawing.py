"""Cluster drawing: levels from the outside in, the first unit of each opened below. Pure geometry."""

from dataclasses import dataclass

from pipeplan.documents.cluster import Cluster, Level
from planner_service.dashboard.formats import bandwidth, count, seconds

WIDTH = 1160.0
LEFT = 300.0
ROW_HEIGHT = 74.0
MOST_BOXES = 16
LETTER_WIDTH = 7.0
MOST_LEVELS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One unit of a level; `opened` is the one whose inside is the row below."""

    x: float
    width: float
    text: str
    opened: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelRow:
    """The units that a level joins, and its links. Units beyond the drawn ones are counted in the last box."""

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
    """The drawing. The innermost levels come last; of very many levels the outermost are left out."""
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
    drawn = min(level.size, MOST_BOXES)
    place = (WIDTH - LEFT) / drawn
    texts = [_device_name(cluster, index) if innermost else f"{count(devices)} devices" for index in range(drawn)]
    if level.size > drawn:
        texts[-1] = f"+{count(level.size - drawn + 1)}"
    boxes = tuple(
        Box(
            x=LEFT + index * place + 3,
            width=place - 6,
            text=_fitting(text, place),
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
    if not cluster.groups:
        return cluster.device.name
    counted = 0
    for group in cluster.groups:
        counted += group.count
        if rank < counted:
            return group.device.name
    return cluster.device.name


def _fitting(text: str, width: float) -> str:
    """The text, or its first word, or nothing: what has room."""
    return next((each for each in (text, text.split(" ")[0]) if LETTER_WIDTH * len(each) + 6 <= width), "")
