"""Data parallelism: every replica holds the whole model; gradients are averaged once a batch.

replica 0   F1 B1 F3 B3 G1 U1
replica 1   F2 B2 F4 B4 G1 U1
"""

from collections.abc import Iterator

from planner_service.core.errors import require
from planner_service.core.plan import Worker
from planner_service.core.schedule.instructions import Instruction
from planner_service.core.schedule.naive import naive
from planner_service.core.schedule.pipeline import Pipeline


def data_parallel(pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
    """The naive order on a single stage. Raises InvalidInputError for more than one stage."""
    require(pipeline.depth == 1, "stages", "must be 1 for data-parallel", pipeline.depth)
    return naive(pipeline, worker)
