"""Memory drawing: what a worker holds, as one bar of parts. Pure geometry; the template writes the SVG."""

from dataclasses import dataclass, fields

from pipeplan.documents.plan import Plan, Stage, StageMemory
from planner_service.dashboard.formats import size

WIDTH = 1160.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One item of the memory."""

    x: float
    width: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBar:
    """The items that a worker of a stage holds, against the most that any bar beside it shows."""

    stage: int
    shares: tuple[Share, ...]
    total_bytes: int


def fullest(plan: Plan) -> int:
    """The stage whose workers hold most; the first of several."""
    return max(range(plan.depth), key=lambda index: (plan.stages[index].memory_bytes, -index))


def memory_bar(plan: Plan, most_bytes: float) -> MemoryBar:
    """The bar of the plan's fullest stage, on a scale that ends at `most_bytes`."""
    index = fullest(plan)
    stage = plan.stages[index]
    x, shares = 0.0, []
    for kind, held_bytes in items(stage):
        width = WIDTH * held_bytes / most_bytes if most_bytes > 0 else 0.0
        shares.append(Share(x=x, width=width, kind=kind, title=f"{kind.replace('-', ' ')}: {size(held_bytes)}"))
        x += width
    return MemoryBar(stage=index, shares=tuple(shares), total_bytes=stage.memory_bytes)


def items(stage: Stage) -> list[tuple[str, int]]:
    """What the memory is made of, without what is 0; one item where the planner did not take it apart."""
    if stage.memory is None:
        return [("all-of-it", stage.memory_bytes)]
    held = [(item.name.replace("_", "-"), getattr(stage.memory, item.name)) for item in fields(StageMemory)]
    return [(name, held_bytes) for name, held_bytes in held if held_bytes]
