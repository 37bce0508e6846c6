"""The tensors at a stage's ends: one in a chain, in a graph all that cross the cut; a stage forwards what it skips."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner_service.core.graph import Graph, crossing_bytes, graph_of
from planner_service.core.plan import Stage
from planner_service.core.profile import Measurement, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Bytes that a stage keeps as its input, that it receives from the stage before, and that it sends on.

    The first stage receives nothing and the last one sends nothing; what stands there is not used.
    """

    input_bytes: int
    received_bytes: int
    sent_bytes: int


def in_order(profile: Profile, order: Sequence[int]) -> Profile:
    """The profile with its blocks in an order of stages, in which edges count no longer."""
    return replace(profile, blocks=tuple(profile.blocks[block] for block in order), edges=None)


def boundaries(
    profile: Profile, microbatch_size: int, stages: Sequence[Stage], order: Sequence[int] | None
) -> list[Boundary]:
    """By stage, whose [start, stop) are places in the order, or blocks of a chain."""
    measured = profile.at(microbatch_size)
    if order is None or profile.edges is None:
        return [_in_chain(measured, stage) for stage in stages]
    graph = graph_of(len(measured), profile.edges)
    crossing = crossing_bytes(graph, order, [block.output_bytes for block in measured])
    loaded = loaded_bytes(graph, measured)
    return [
        Boundary(
            input_bytes=int(crossing[stage.start]) if stage.start > 0 else loaded,
            received_bytes=int(crossing[stage.start]),
            sent_bytes=int(crossing[stage.stop]),
        )
        for stage in stages
    ]


def loaded_bytes(graph: Graph, measured: Sequence[Measurement]) -> int:
    """What the data loader hands over: the inputs of the blocks that read no other."""
    return sum(block.input_bytes for block, reads in zip(measured, graph.reads, strict=True) if not reads)


def _in_chain(measured: Sequence[Measurement], stage: Stage) -> Boundary:
    return Boundary(
        input_bytes=measured[stage.start].input_bytes,
        received_bytes=measured[stage.start - 1].output_bytes,
        sent_bytes=measured[stage.stop - 1].output_bytes,
    )
