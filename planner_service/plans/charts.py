"""Charts of a plan: its devices' memory, and its alternatives. Pure geometry; the templates write the SVG.

memory_chart   the memory of a device of every stage, stacked by item, below the line of its usable memory
front_chart    throughput against memory: the answer, the configurations considered, and the Pareto front
search_map     the best throughput that was found for each pair of values of two degrees

Every chart has `rows`: the table that its CSV file holds, the names of the columns first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from pipeplan.costs.memory import rank_bytes, stages_by_rank
from pipeplan.documents.plan import Alternative, Plan
from pipeplan.errors import require
from pipeplan.formats import four_digits, scheme, several, shape, size, spelled_out
from planner_service.documents.chart_files import Row
from planner_service.plans.drawings import items
from planner_service.platform.axes import FILE, StackedPart, Tick, memory_ticks

BOTTOM = FILE.bottom
GAP = 0.15
FAR = 20
"""A capacity beyond this multiple of the used memory is written, not drawn: it would flatten all bars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryColumn:
    """A device's memory; `capacity_y` is the line of its usable memory, None if that is far above."""

    x: float
    width: float
    label: str
    title: str
    parts: tuple[StackedPart, ...]
    capacity_y: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChart:
    """The columns, by the first stage of their devices, the axis, and the kinds of parts that occur."""

    columns: tuple[MemoryColumn, ...]
    ticks: tuple[Tick, ...]
    kinds: tuple[str, ...]
    capacity: str
    rows: tuple[Row, ...]


def memory_chart(plan: Plan, capacities: Sequence[int]) -> MemoryChart:
    """The chart; `capacities` are the bytes that tensors may take on the devices of every stage."""
    held = []
    for stages in stages_by_rank(plan):
        parts: dict[str, int] = {}
        for kind, part_bytes in (part for stage in stages for part in items(plan.stages[stage])):
            parts[kind] = parts.get(kind, 0) + part_bytes
        held.append((stages, parts, min(capacities[stage] for stage in stages)))
    most_held = max((sum(parts.values()) for _, parts, _ in held), default=0)
    drawn = [capacity for _, _, capacity in held if capacity <= FAR * most_held]
    top_bytes = 1.08 * max([most_held, *drawn, 1])
    place = (FILE.right - FILE.left) / len(held)

    columns = []
    for index, (stages, parts, capacity) in enumerate(held):
        below, stacked = 0, []
        for kind, part_bytes in parts.items():
            y = FILE.y(below + part_bytes, top_bytes)
            stacked.append(StackedPart(kind=kind, y=y, height=FILE.y(below, top_bytes) - y))
            below += part_bytes
        of = f"Stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        by_kind = ", ".join(f"{kind.replace('-', ' ')} {size(part_bytes)}" for kind, part_bytes in parts.items())
        columns.append(
            MemoryColumn(
                x=FILE.left + place * (index + GAP / 2),
                width=place * (1 - GAP),
                label=str(stages[0]) if index % -(-len(held) // 32) == 0 else "",
                title=f"{of}: {size(below)} of {size(capacity)} ({by_kind})",
                parts=tuple(stacked),
                capacity_y=FILE.y(capacity, top_bytes) if capacity <= FAR * most_held else None,
            )
        )
    kinds = tuple(dict.fromkeys(kind for _, parts, _ in held for kind in parts))
    table: list[Row] = [
        (" ".join(map(str, stages)), *(parts.get(kind, 0) for kind in kinds), sum(parts.values()), capacity)
        for stages, parts, capacity in held
    ]
    has = sorted({capacity for _, _, capacity in held})
    return MemoryChart(
        columns=tuple(columns),
        ticks=memory_ticks(top_bytes, start=BOTTOM, end=FILE.top, most=5),
        kinds=kinds,
        capacity=" or ".join(map(size, has)) + (", far above what is held" if not drawn else ""),
        rows=(
            ("stages", *(f"{kind.replace('-', '_')}_bytes" for kind in kinds), "held_bytes", "capacity_bytes"),
            *table,
        ),
    )


_SAME = (
    *("schedule", "depth", "width", "microbatch_size", "microbatches", "recompute", "throughput_samples_per_s", "form"),
    *("sharding", "chunks", "offload", "replicate", "a2a_overlap", "offload_share"),
)
"""The fields that plans and alternatives share by name."""


def considered(plan: Plan) -> tuple[Alternative, ...]:
    """The answer, then every configuration that it was chosen over, each once."""
    answer = Alternative(
        memory_bytes=max(rank_bytes(plan)),
        reason="the answer",
        closed_form_samples_per_s=plan.closed_form.throughput_samples_per_s,
        graphs=bool(plan.graphs),
        **{name: getattr(plan, name) for name in _SAME},
    )
    found = {_shape(each): each for each in reversed((answer, *plan.pareto, *plan.alternatives)) if each.depth}
    return (answer, *(each for key, each in reversed(found.items()) if key != _shape(answer)))


def _shape(each: Alternative) -> Alternative:
    """The key of a configuration: everything but its results."""
    return replace(each, reason="", throughput_samples_per_s=None, memory_bytes=None, closed_form_samples_per_s=None)


PLAYED, CLOSED = "played", "in closed form"


def price_kind(every: Sequence[Alternative]) -> str:
    """Which rates a chart of these compares: closed forms if others than the answer have them and no play, else plays.

    A chart has rates of one kind: a play and a closed form are not comparable.
    """
    answer, *others = every
    if answer.throughput_samples_per_s is None:
        return CLOSED
    no_plays = all(each.throughput_samples_per_s is None for each in others)
    return CLOSED if no_plays and any(each.closed_form_samples_per_s for each in others) else PLAYED


def rate_of(each: Alternative, kind: str) -> float | None:
    """Samples a second; None if it has no rate of this kind."""
    return each.throughput_samples_per_s if kind == PLAYED else each.closed_form_samples_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A configuration. `kind` is `chosen`, `front` or `beaten`."""

    x: float
    y: float
    kind: str
    on_front: bool
    title: str
    label: str
    label_x: float
    label_y: float
    anchor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontChart:
    """The dots, those of the front labelled; the line through the front as SVG has it; and the axes.

    `price` names the kind of rates, `unknown` is the number of configurations without such a rate or memory.
    """

    price: str
    unknown: int
    dots: tuple[Dot, ...]
    points: str
    memory: tuple[Tick, ...]
    rates: tuple[Tick, ...]
    rows: tuple[Row, ...]


MOST_LABELS = 16
LETTER_WIDTH = 6.2
OFFSETS = (-10.0, 18.0, -23.0, 31.0, -36.0, 44.0)
"""Where a label may be above or below its dot, the best place first."""


Known: TypeAlias = tuple[Alternative, int, float]
"""A configuration, the bytes that its fullest device holds, and its samples a second."""


def front_chart(plan: Plan) -> FrontChart | None:
    """The chart; None if the answer's rate or memory is unknown."""
    every = considered(plan)
    price = price_kind(every)
    known = [(each, each.memory_bytes or 0, rate_of(each, price) or 0.0) for each in every]
    known = [(each, held, rate) for each, held, rate in known if held > 0 and rate > 0]
    if not known or known[0][0] is not every[0]:
        return None
    stated = {_shape(each) for each in plan.pareto} if price == PLAYED else set()
    front = {index for index, (each, _, _) in enumerate(known) if _shape(each) in stated} or _front(known)
    most_bytes, most_rate = 1.1 * max(held for _, held, _ in known), 1.2 * max(rate for _, _, rate in known)
    dots = _dots(known, front, price, most_bytes, most_rate)
    line = sorted((dot for dot in dots if dot.on_front), key=lambda dot: dot.x)
    return FrontChart(
        price=price,
        unknown=len(every) - len(known),
        dots=tuple(reversed(dots)),  # the answer and the front are drawn last, over all others
        points=" ".join(f"{dot.x:.1f},{dot.y:.1f}" for dot in line),
        memory=memory_ticks(most_bytes, start=FILE.left, end=FILE.right, most=8),
        rates=FILE.rows(0.0, most_rate, "{:g}".format),
        rows=(
            (*DEGREES, "memory_bytes", "samples_per_s", "price", "on_front", "reason"),
            *(
                (*(of(each) for of in DEGREES.values()), held, rate, price, str(index in front).lower(), each.reason)
                for index, (each, held, rate) in enumerate(known)
            ),
        ),
    )


def _dots(known: Sequence[Known], front: set[int], price: str, most_bytes: float, most_rate: float) -> list[Dot]:
    """A dot a configuration, those of the front first and labelled where they are not too many."""
    dots: list[Dot] = []
    boxes: list[tuple[float, float, float]] = []
    for index in sorted(range(len(known)), key=lambda index: (index not in front, known[index][1], index)):
        each, held, rate = known[index]
        x, y = FILE.x(held, most_bytes), FILE.y(rate, most_rate)
        labelled = index == 0 or (index in front and len(boxes) < MOST_LABELS)
        text = f"{each.schedule} {shape(each.depth, each.width)}, {each.microbatch_size}" if labelled else ""
        start = x - LETTER_WIDTH * len(text) if x > (FILE.left + FILE.right) / 2 else x
        label_y = _label_y(y, start, start + LETTER_WIDTH * len(text), boxes)
        if text:
            boxes.append((start, start + LETTER_WIDTH * len(text), label_y))
        came_to = f"{four_digits(rate)} samples/s {price}, {size(held)} a device; {spelled_out(each.reason)}"
        dots.append(
            Dot(
                x=x,
                y=y,
                kind="chosen" if index == 0 else "front" if index in front else "beaten",
                on_front=index in front,
                title=f"{scheme(each)}, {shape(each.depth, each.width)}, microbatches of {each.microbatch_size}"
                f"{', recomputing' if each.recompute else ''}: {came_to}",
                label=text,
                label_x=x,
                label_y=label_y,
                anchor="end" if start < x else "start",
            )
        )
    return dots


def _label_y(y: float, start: float, end: float, boxes: Sequence[tuple[float, float, float]]) -> float:
    """Where a label of this width stands above or below its dot, over none of those that stand already."""
    beside = [at for low, high, at in boxes if low < end and start < high]
    inside = (y + by for by in OFFSETS if FILE.top <= y + by <= BOTTOM - 4)
    return next((at for at in inside if all(abs(other - at) >= 13 for other in beside)), y + OFFSETS[0])


def _front(known: Sequence[Known]) -> set[int]:
    """The places of those that none beats: no other is as fast with less memory, or faster with as much."""
    front, fastest = set(), 0.0
    for index in sorted(range(len(known)), key=lambda place: (known[place][1], -known[place][2], place)):
        if known[index][2] > fastest:
            front.add(index)
            fastest = known[index][2]
    return front


DEGREES: dict[str, Callable[[Alternative], str | int]] = {
    "schedule": lambda each: each.schedule,
    "stages": lambda each: each.depth,
    "replicas": lambda each: each.width or "mixed",
    "microbatch_size": lambda each: each.microbatch_size,
    "microbatches": lambda each: each.microbatches,
    "recompute": lambda each: "yes" if each.recompute else "no",
    "stages_a_rank": lambda each: each.chunks,
    "tensor": lambda each: each.form.tensor,
    "context": lambda each: each.form.context,
    "expert": lambda each: each.form.expert,
    "expert_tensor": lambda each: each.form.expert_tensor_degree,
    "sharding": lambda each: each.sharding,
    "replicate": lambda each: each.replicate,
    "graphs": lambda each: "yes" if each.graphs else "no",
    "a2a_overlap": lambda each: "yes" if each.a2a_overlap else "no",
    "offload": lambda each: each.offload,
    "offload_share": lambda each: f"{each.offload_share:.0%}",
}
"""The degrees that a map may have on its axes."""

MOST_VALUES = 24
CELL_HEIGHT = 34.0
MAP_LEFT, MAP_TOP = 132.0, 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MapCell:
    """The best configuration with these two values; `share` is its rate over the best of all, 0 without a rate."""

    x: float
    y: float
    width: float
    text: str
    title: str
    share: float
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchMap:
    """The cells that hold a configuration, and the values along the axes."""

    across: str
    down: str
    price: str
    cells: tuple[MapCell, ...]
    columns: tuple[Tick, ...]
    lines: tuple[Tick, ...]
    height: float
    hidden_values: int
    rows: tuple[Row, ...]


def search_map(plan: Plan, across: str | None = None, down: str | None = None) -> SearchMap:
    """The map over two degrees, by default those with the largest number of values.

    Raises InvalidInputError for an unknown degree.
    """
    every = considered(plan)
    price = price_kind(every)
    values = {name: {of(each) for each in every} for name, of in DEGREES.items()}
    default = sorted(DEGREES, key=lambda name: -min(len(values[name]), MOST_VALUES))
    across = across or next(name for name in default if name != down)
    down = down or next(name for name in default if name != across)
    rule = f"must be one of {', '.join(DEGREES)}"
    require(across in DEGREES, "across", rule, across)
    require(down in DEGREES, "down", rule, down)
    require(across != down, "down", "must be another degree than across", down)
    wide, high = (sorted(values[name], key=lambda each: (isinstance(each, str), each)) for name in (across, down))
    hidden = max(len(wide) - MOST_VALUES, 0) + max(len(high) - MOST_VALUES, 0)
    wide, high = wide[:MOST_VALUES], high[:MOST_VALUES]
    fastest = max((rate_of(each, price) or 0.0 for each in every), default=0.0)
    place = (FILE.right - MAP_LEFT) / len(wide)
    cells, rows = [], []
    for line, column in ((line, column) for line in range(len(high)) for column in range(len(wide))):
        pair = (wide[column], high[line])
        members = [each for each in every if (DEGREES[across](each), DEGREES[down](each)) == pair]
        if not members:
            continue
        best = max(members, key=lambda each: (rate_of(each, price) or 0.0, each is every[0]))
        rate = rate_of(best, price)
        told = f"{four_digits(rate)} samples/s {price}" if rate is not None else spelled_out(best.reason)
        without = "does not fit" if all(each.reason.startswith("memory") for each in members) else "not priced"
        cells.append(
            MapCell(
                x=MAP_LEFT + place * column,
                y=MAP_TOP + CELL_HEIGHT * line,
                width=place,
                text=four_digits(rate) if rate is not None else without if place > LETTER_WIDTH * 13 else "×",
                title=f"{across} {pair[0]}, {down} {pair[1]}: {told}; {several(len(members), 'configuration')}, "
                f"best {best.schedule} {shape(best.depth, best.width)}, microbatches of {best.microbatch_size}",
                share=rate / fastest if rate and fastest else 0.0,
                chosen=any(each is every[0] for each in members),
            )
        )
        rows.append((*pair, rate, len(members), best.schedule, best.reason))
    middle = place / 2
    return SearchMap(
        across=across,
        down=down,
        price=price,
        cells=tuple(cells),
        columns=tuple(Tick(position=MAP_LEFT + place * i + middle, label=str(each)) for i, each in enumerate(wide)),
        lines=tuple(Tick(position=MAP_TOP + CELL_HEIGHT * (i + 0.5), label=str(each)) for i, each in enumerate(high)),
        height=MAP_TOP + CELL_HEIGHT * len(high) + 24,
        hidden_values=hidden,
        rows=((across, down, "samples_per_s", "configurations", "schedule", "reason"), *rows),
    )
