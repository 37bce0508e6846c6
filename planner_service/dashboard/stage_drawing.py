"""Stage drawing: a model's blocks in a row, cut into a plan's stages. Pure geometry; the template writes the SVG."""

from dataclasses import dataclass

from pipeplan.documents.plan import Plan, Stage
from planner_service.dashboard.formats import seconds, size

WIDTH = 1160.0
HEIGHT = 46.0
LETTER_WIDTH = 7.0
MAX_DRAWN = 400
"""Beyond so many stages each would be narrower than three points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One stage; `slowest` is the one that sets the pace, `share` its part of that one's time."""

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


def stage_drawing(plan: Plan) -> StageDrawing | None:
    """The drawing; None where there are too many stages for one."""
    if plan.depth > MAX_DRAWN:
        return None
    blocks = plan.stages[-1].stop
    slowest_s = max(stage.time_s for stage in plan.stages)
    pieces = []
    for index, stage in enumerate(plan.stages):
        x, end = WIDTH * stage.start / blocks, WIDTH * stage.stop / blocks
        pieces.append(
            Piece(
                x=x,
                width=end - x,
                title=_title(index, stage),
                blocks=_fitting(_range(stage), end - x),
                replicas=_fitting(f"× {stage.replicas}" if stage.replicas > 1 else "", end - x),
                slowest=stage.time_s == slowest_s > 0,
                share=stage.time_s / slowest_s if slowest_s > 0 else 0.0,
            )
        )
    return StageDrawing(pieces=tuple(pieces))


def _title(index: int, stage: Stage) -> str:
    replicas = f"{stage.replicas} replicas" if stage.replicas > 1 else "1 replica"
    recompute = ", recomputing" if stage.recompute else ""
    device = f" on {stage.device}" if stage.device else ""
    return (
        f"Stage {index}: blocks {_range(stage)}, {replicas}{device}{recompute}, "
        f"{seconds(stage.time_s)} a microbatch, {size(stage.memory_bytes)} a worker"
    )


def _range(stage: Stage) -> str:
    return f"{stage.start}" if stage.stop == stage.start + 1 else f"{stage.start}–{stage.stop - 1}"


def _fitting(text: str, width: float) -> str:
    return text if LETTER_WIDTH * len(text) + 4 <= width else ""
