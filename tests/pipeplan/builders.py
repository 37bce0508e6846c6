"""Small profiles, clusters and programs, written down shortly, and strategies that draw them."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.profile import Block, Device, Model, Profile
from pipeplan.documents.stage_costs import StageCosts, unit_costs

PLENTY = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A block at microbatch size 1; larger sizes take and hold a multiple."""

    forward_s: float = 1.0
    backward_s: float = 2.0
    weight_bytes: int = 0
    output_bytes: int = 0
    activation_bytes: int = 0
    workspace_bytes: int = 0
    shared_bytes: int | None = None
    kept_output_bytes: int = 0
    passed_bytes: int = 0
    """At most so much of its input it passes on as a part of its output."""


def inputs_kept(stage: Sequence[Cell], input_bytes: int) -> int:
    """The inputs of all cells of a stage for a microbatch of 1; what is passed on is there once."""
    reads = [input_bytes, *(cell.output_bytes for cell in stage[:-1])]
    return sum(reads) - sum(min(cell.passed_bytes, read) for cell, read in zip(stage[:-1], reads[:-1], strict=True))


def again_bytes(cell: Cell, input_bytes: int) -> int:
    """What a cell holds when it has run again, beside its input, for a microbatch of 1."""
    passed = min(cell.passed_bytes, input_bytes)
    known = max(cell.kept_output_bytes - passed, 0) + (input_bytes if cell.shared_bytes is not None else 0)
    return cell.output_bytes - passed + max(cell.activation_bytes - known, 0)


def kept_bytes(stage: Sequence[Cell]) -> int:
    """What a stage of these cells keeps of a microbatch of 1: all of each, but what two neighbours share once."""
    return sum(cell.activation_bytes for cell in stage) - sum(cell.shared_bytes or 0 for cell in stage[1:])


def profile(cells: Sequence[Cell], *, sizes: Sequence[int] = (1,), input_bytes: int = 0) -> Profile:
    """A chain of these cells."""
    blocks = []
    for index, cell in enumerate(cells):
        blocks.append(
            Block(
                name=f"block{index}",
                weight_bytes=cell.weight_bytes,
                measurements=tuple(_measurement(cell, size, input_bytes) for size in sizes),
            )
        )
        input_bytes = cell.output_bytes
    return Profile(
        model=Model(name="chain"),
        device=Device(name="device", memory_bytes=PLENTY),
        dtype="float32",
        blocks=tuple(blocks),
    )


def _measurement(cell: Cell, size: int, input_bytes: int) -> Measurement:
    return Measurement(
        microbatch_size=size,
        forward_s=cell.forward_s * size,
        backward_s=cell.backward_s * size,
        input_bytes=input_bytes * size,
        output_bytes=cell.output_bytes * size,
        activation_bytes=cell.activation_bytes * size,
        workspace_bytes=cell.workspace_bytes * size,
        shared_bytes=None if cell.shared_bytes is None else cell.shared_bytes * size,
        kept_output_bytes=cell.kept_output_bytes * size,
        passed_bytes=min(cell.passed_bytes, input_bytes) * size,
    )


def cluster(*levels: tuple[int, float], memory_bytes: int = PLENTY, latency_s: float = 0.0) -> Cluster:
    """Levels from the inside out as (size, bandwidth)."""
    return Cluster(
        device=Device(name="device", memory_bytes=memory_bytes),
        levels=tuple(
            Level(size=size, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s) for size, bandwidth in levels
        ),
    )


def equal_thirds() -> StageCosts:
    """Forward, p1 and p2 a second each: what 2BP's table assumes."""
    return unit_costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)


def cells(*, weights: bool = True) -> st.SearchStrategy[Cell]:
    """Blocks of small whole costs, so that ties are frequent and sums exact."""
    few_bytes = st.integers(0, 4)
    kept_and_shared = few_bytes.flatmap(
        lambda kept: st.tuples(st.just(kept), st.one_of(st.none(), st.integers(0, kept)))
    )
    return st.builds(
        lambda kept, output, sent_anyway, passed, **others: Cell(
            activation_bytes=kept[0],
            shared_bytes=kept[1],
            output_bytes=output,
            kept_output_bytes=min(sent_anyway, output, kept[0]),
            passed_bytes=min(passed, output),
            **others,
        ),
        kept=kept_and_shared,
        output=few_bytes,
        sent_anyway=few_bytes,
        passed=few_bytes,
        forward_s=st.integers(0, 3).map(float),
        backward_s=st.integers(1, 4).map(float),
        weight_bytes=few_bytes if weights else st.just(0),
        workspace_bytes=st.integers(0, 2),
    )


def clusters(devices_at_most: int) -> st.SearchStrategy[Cluster]:
    """One level or two, slower outside, sometimes with devices that are too small."""
    bandwidths = st.sampled_from([0.5, 1.0, 2.0, 8.0])
    one = st.tuples(st.tuples(st.integers(1, devices_at_most), bandwidths))
    inner = st.tuples(st.integers(1, 3), bandwidths)
    two = st.tuples(inner, st.tuples(st.integers(1, max(devices_at_most // 3, 1)), bandwidths))
    memories = st.one_of(st.just(PLENTY), st.integers(1, 60))
    return st.builds(
        lambda levels, memory_bytes: cluster(*levels, memory_bytes=memory_bytes), st.one_of(one, two), memories
    )
