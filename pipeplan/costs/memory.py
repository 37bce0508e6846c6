"""The memory term: the bytes that a worker of a stage holds at its peak, as counts of a few quantities.

`paper` is the law of PipeDream-2BW, appendix A.1.2, to the byte: weight versions, activations and inputs, nothing else.
`training` is what a user's device holds: the weight versions, the gradients, the float32 master weights, the
optimizer's states, the activations that are actually in flight on this stage, the largest transient of one block, and
the buffers of sends and receives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import gcd

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import Plan, Worker
from pipeplan.documents.profile import DTYPE_BYTES
from pipeplan.programs.in_transit import RECEIVES_AHEAD, InTransit, Size
from pipeplan.programs.instructions import Backward, BackwardInput, BackwardWeight, Forward
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.registry import schedule_named

OPTIMIZER_COPIES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Copies of the weights that an optimizer keeps as its state."""

MASTER_BYTES = 4
"""A master weight is a float32, and so are the gradient that it takes and the states that belong to it."""

ON_EDGE = RECEIVES_AHEAD + 1
"""Messages for which a worker may have memory on an edge, without those of its microbatches: posted ahead, and free."""

ROUNDS = 4
"""If ranks hold several stages, a batch of this many microbatches a rank keeps as much at a time as any longer one."""


def kept_bytes(blocks: Sequence[Measurement]) -> int:
    """The bytes that one microbatch keeps from forward to backward on a stage of these consecutive blocks.

    The first block keeps the same as in a stage of its own, including its input. Every other block adds the tensors
    that the stage does not have yet. Planners compute the same from sums over blocks (`kept_sums`).
    """
    return blocks[0].activation_bytes + sum(block.added_bytes for block in blocks[1:])


def passed_inputs(blocks: Sequence[Measurement]) -> list[int]:
    """By block, the part of its input that the block before only forwards: a stage that has both keeps it once."""
    return [0, *(min(before.passed_bytes, block.input_bytes) for before, block in pairwise(blocks))]


def replacing_bytes(gradients: int, weight_bytes: FloatArray, added_bytes: FloatArray) -> FloatArray:
    """By block, the bytes of `gradients` gradients (in copies of its weights) beyond its activations of a microbatch.

    The first backward after an update makes a block's gradients when it frees the block's activations. While it runs, a
    stage holds at most the larger of both for each of its blocks.
    """
    return np.maximum(gradients * weight_bytes - added_bytes, 0.0)


def kept_sums(activation_bytes: FloatArray, shared_bytes: FloatArray) -> tuple[FloatArray, FloatArray]:
    """`kept_bytes` of each stage [start, stop) of a chain: the first array's entry at stop, less the second's at start.

    Both have an entry before each block and one after the last. Differences within the first array alone are a lower
    bound: they leave out the bytes that a stage's first block shares with the block before it.
    """
    until = np.append(0.0, np.cumsum(activation_bytes - shared_bytes))
    return until, until - np.append(shared_bytes, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The copies held of a stage's weights and of a microbatch's tensors."""

    versions: int
    """Weight versions."""

    gradients: int = 0
    """Gradients, in copies of the weights."""

    late_gradients: int = 0
    """The same where gradients replace a microbatch's activations: `replacing_bytes` counts."""

    master_weights: int = 0
    """Master weights, in copies of the weights."""

    optimizer_states: int = 0
    """Optimizer states, in copies of the weights."""

    activations: int
    """Activations of a microbatch."""

    inputs: int
    """The stage's input of a microbatch."""

    transients: int
    """The largest workspace of a block."""

    input_buffers: int = 0
    """Messages in transit of the stage's input size."""

    output_buffers: int = 0
    """Messages in transit of the stage's output size."""

    kept_outputs: int = 0
    """The part of them that are outputs of microbatches kept whole, whose activations include a part of the output."""

    block_inputs: int = 0
    """The inputs of all blocks of the stage, without forwarded tensors (`passed_inputs`)."""

    blocks_again: int = 0
    """The largest block's bytes when it has run again: `Measurement.again_bytes`."""

    casts: float = 0.0
    """The 16-bit copies that autocast makes of the versions, if it makes one of every weight."""

    @property
    def stored(self) -> float:
        """The versions, with autocast's copies of them."""
        return self.versions + self.casts

    @property
    def weights(self) -> float:
        """All copies of the weights' size."""
        return self.stored + self.gradients + self.master_weights + self.optimizer_states

    @property
    def in_transit(self) -> InTransit:
        """All buffers except those that microbatches keep."""
        return InTransit(inputs=self.input_buffers, outputs=self.output_buffers, kept_outputs=self.kept_outputs)

    def buffer_bytes(self, input_bytes: Size, output_bytes: Size, kept_output_bytes: Size) -> Size:
        """Their bytes (`InTransit.bytes`)."""
        return self.in_transit.bytes(input_bytes, output_bytes, kept_output_bytes)


def keeps_master_weights(dtype: str, asked: bool | None) -> bool:
    """Whether gradients add up, and the optimizer works, in float32: for 16-bit weights, unless `asked` is False."""
    return DTYPE_BYTES[dtype] < MASTER_BYTES and asked is not False


def fixed_copies(dtype: str, optimizer: str, *, master_weights: bool) -> tuple[int, int, int]:
    """Gradients, master weights and optimizer states, in copies of the weights.

    With mixed-precision Adam that is 4 + 4 + 8 bytes a parameter in addition to 2 for every version: gradients of many
    microbatches add up in float32 (Micikevicius et al. 2018, section 3.3), and are exchanged in the weights' dtype.
    """
    size = MASTER_BYTES // DTYPE_BYTES[dtype] if master_weights else 1
    return size, size if master_weights else 0, OPTIMIZER_COPIES[optimizer] * size


def copies(
    accounting: str,
    schedule: Schedule,
    optimizer: str,
    *,
    recompute: bool,
    depth: int,
    stage: int,
    microbatches: int,
    dtype: str = "float32",
    master_weights: bool = False,
    replicas: int = 1,
    unit: str = "stage",
    autocast: str | None = None,
) -> Copies:
    """The copies that a worker of a stage holds in a pipeline whose stages have equal replicas."""
    if accounting == "paper":
        return paper_copies(schedule, recompute=recompute, depth=depth, microbatches=microbatches)
    held = schedule.in_flight(depth=depth, stage=stage, microbatches=microbatches)
    before = schedule.in_flight(depth=depth, stage=stage - 1, microbatches=microbatches) if stage > 0 else None
    return training_copies(
        schedule,
        optimizer,
        recompute=recompute,
        held=held,
        dtype=dtype,
        master_weights=master_weights,
        held_before=before,
        sends_on=stage < depth - 1,
        microbatches=microbatches,
        replicas=replicas,
        unit=unit,
        autocast=autocast,
    )


def cast_copies(dtype: str, autocast: str | None) -> float:
    """The largest size of the copies under autocast, in copies of the weights."""
    return DTYPE_BYTES[autocast] / DTYPE_BYTES[dtype] if autocast else 0.0


def exchanged_sets(schedule: Schedule, replicas: int) -> int:
    """Sets of gradients that are exchanged in addition to the stage's own: under ASP those of all other replicas.

    ASP is asynchronous data parallelism: every replica updates by itself. 2BW exchanges a batch's gradients while those
    of the next batch accumulate, yet needs no further set: during this time only one of its two versions is held.
    """
    return replicas - 1 if schedule.update == "replica" else 0


def paper_copies(schedule: Schedule, *, recompute: bool, depth: int, microbatches: int) -> Copies:
    """Appendix A.1.2 on every stage: 2|W| + d|A| + d|I|, with recomputation 2|W| + |A| + d|I|.

    PipeDream-Flush holds one version, GPipe (which recomputes) |W| + |A| + m|I|; without pipelining d is 1.
    """
    kept = schedule.paper_in_flight(depth=depth, microbatches=microbatches)
    return Copies(
        versions=schedule.weight_versions(kept), activations=1 if recompute else kept, inputs=kept, transients=0
    )


def minibatches_in_flight(replicas: Sequence[int]) -> list[int]:
    """Minibatches in flight on each of PipeDream's stages, by their `replicas` (2018, section 3.3)."""
    return [-(-sum(replicas[stage:]) // count) for stage, count in enumerate(replicas)]


def edges_to(replicas: int, others: int) -> int:
    """The number of a neighbouring stage's `others` workers with which each of `replicas` workers exchanges messages.

    Microbatch k is that of replica k modulo replicas on every stage (`programs.instructions`).
    """
    return others // gcd(replicas, others)


@lru_cache(maxsize=65_536)
def training_copies(
    schedule: Schedule,
    optimizer: str,
    *,
    recompute: bool,
    held: int,
    dtype: str = "float32",
    master_weights: bool = False,
    held_before: int | None = None,
    sends_on: bool = False,
    edges_before: int = 1,
    edges_after: int = 1,
    microbatches: int | None = None,
    replicas: int = 1,
    unit: str = "stage",
    autocast: str | None = None,
) -> Copies:
    """The copies that training holds, and those that `held` microbatches in flight keep.

    A stage that recomputes keeps their inputs, and one microbatch's activations while its backward runs. Where its unit
    is a block it keeps the inputs of every block, and one block's activations (Chen et al. 2016, section 4.1).

    `microbatches` are those of a batch, if known. They decide whether a stage that keeps `held` microbatches whole has
    gradients at the same time (`Schedule.gathers_beside`). Else the gradients of the first backward replace the
    activations of its microbatch.

    `held_before` are the microbatches that a worker of the stage before has in flight for this one; None on the first
    stage. `sends_on` says that a stage follows. A worker has `edges_before` and `edges_after` edges (`edges_to`).
    Buffers hold a sent message until it is certain to have arrived: until its edge has carried as many later messages
    as the edge's earlier worker has microbatches in flight for it, and an output no longer than until its gradient
    comes. Buffers also hold receives that are posted ahead on every edge, a message's memory on every other edge, and a
    received gradient while its backward runs. A received input counts as one of the stage's own inputs. Where gradients
    replace activations, two more exist when the backward has ended: the input's memory, which the next message takes,
    and the gradient to be sent next.
    """
    gradients, masters, states = fixed_copies(dtype, optimizer, master_weights=master_weights)
    by_block = recompute and unit == "block"
    versions = schedule.weight_versions(held)
    beside = microbatches is None or recompute or schedule.gathers_beside(held=held, microbatches=microbatches)
    return Copies(
        versions=versions,
        casts=versions * cast_copies(dtype, autocast),
        gradients=gradients + exchanged_sets(schedule, replicas) if beside else 0,
        late_gradients=0 if beside else gradients,
        master_weights=masters,
        optimizer_states=states,
        activations=0 if by_block else 1 if recompute else held,
        inputs=held if recompute and not by_block else 0,
        block_inputs=held if by_block else 0,
        blocks_again=1 if by_block else 0,
        transients=1,
        input_buffers=0 if held_before is None else edges_before * (ON_EDGE + held_before) - 1 + (0 if beside else 2),
        output_buffers=edges_after * ON_EDGE + held if sends_on else 0,
        kept_outputs=held if sends_on and not recompute else 0,
    )


@lru_cache(maxsize=4096)
def chunked_pipeline(laws: Schedule, *, ranks: int, chunks: int, microbatches: int) -> Pipeline:
    """A pipeline of ranks that hold several stages each, one batch of it."""
    return Pipeline(replicas=(1,) * (ranks * chunks), microbatches=microbatches, chunks=chunks, v_shaped=laws.v_shaped)


def stages_by_rank(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The stages of every rank of a pipeline, by chunk."""
    if plan.chunks == 1:
        return tuple((stage,) for stage in range(plan.depth))
    span, laws = plan.depth // plan.chunks, schedule_named(plan.schedule)
    pipeline = chunked_pipeline(laws, ranks=span, chunks=plan.chunks, microbatches=1)
    return tuple(tuple(pipeline.stage_of(rank, chunk) for chunk in range(plan.chunks)) for rank in range(span))


def rank_bytes(plan: Plan) -> tuple[int, ...]:
    """The bytes that a worker of every rank of a pipeline holds: all its stages together."""
    return tuple(sum(plan.stages[stage].memory_bytes for stage in stages) for stages in stages_by_rank(plan))


def rank_host_bytes(plan: Plan) -> tuple[int, ...]:
    """The bytes that a worker of every rank of a pipeline has on its host."""
    return tuple(sum(plan.stages[stage].host_bytes for stage in stages) for stages in stages_by_rank(plan))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldByRank:
    """The microbatches that a rank keeps, at the moments of its possible peaks.

    A row of `moments` has, by chunk, the microbatches that are kept whole, then those of which only the inputs are
    kept. `most`: by chunk, the upper bound on microbatches in flight.
    """

    moments: IntArray
    most: tuple[int, ...]


def held_by(laws: Schedule, ranks: int, chunks: int, rank: int, microbatches: int, recompute: bool) -> HeldByRank:
    """The microbatches that a rank keeps in the stream of a batch, from a forward to the gradients of the weights.

    Its chunks keep microbatches at different times, so the sum over all chunks at one moment counts.
    """
    return _held_by(laws, ranks, chunks, rank, as_few(microbatches, ranks), recompute)


def as_few(microbatches: int, ranks: int) -> int:
    """The length of the shortest batch in which ranks keep as many microbatches as in one of `microbatches`."""
    return microbatches if microbatches < ROUNDS * ranks else ROUNDS * ranks + microbatches % ranks


@lru_cache(maxsize=16_384)
def _held_by(laws: Schedule, ranks: int, chunks: int, rank: int, microbatches: int, recompute: bool) -> HeldByRank:
    pipeline = chunked_pipeline(laws, ranks=ranks, chunks=chunks, microbatches=microbatches)
    now, most, seen = [0] * (2 * chunks), [0] * chunks, set[tuple[int, ...]]()
    kept = chunks if recompute else 0  # the column that a forward counts in: whole, or inputs
    for instruction in laws.compute(pipeline, Worker(stage=rank)):
        match instruction:
            case Forward(chunk=chunk):
                now[kept + chunk] += 1
                most[chunk] = max(most[chunk], now[chunk] + now[chunks + chunk])
            case Backward(chunk=chunk) | BackwardInput(chunk=chunk):
                if recompute:
                    now[chunks + chunk] -= 1
                    now[chunk] += 1
                    seen.add(tuple(now))
                now[chunk] -= isinstance(instruction, Backward)
            case BackwardWeight(chunk=chunk):
                now[chunk] -= len(instruction.microbatches)
            case _:
                continue
        seen.add(tuple(now))
    every = np.asarray(sorted(seen, reverse=True), dtype=np.int64)
    exceeded = (every[None, :, :] >= every[:, None, :]).all(axis=2).sum(axis=1) > 1
    every = every[~exceeded]
    # A moment half-way between two others is never the only peak.
    between = np.zeros(len(every), dtype=bool)
    between[1:-1] = (2 * every[1:-1] == every[:-2] + every[2:]).all(axis=1)
    return HeldByRank(moments=every[~between], most=tuple(most))
