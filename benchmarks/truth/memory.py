"""Memory: what is in use on the fullest device, by what blocks keep and the engine's ledger. Nothing is fitted."""

from benchmarks.truth.constants import GPUS
from benchmarks.truth.counted import Counted, CountedKind, family_of, key_of
from benchmarks.truth.iteration import ledger_of
from benchmarks.truth.rows import SHARDINGS, Row
from pipeplan.costs.ledger import GATHERED_BLOCKS
from pipeplan.costs.memory import MASTER_BYTES
from worker_agent.profiler.operations import DeviceOperation

KEPT_PRODUCTS = 0.5
"""Of the results of matrix products, so many are kept by torchtitan's selective checkpointing: every second one."""


def usable_bytes(row: Row) -> float:
    """What a program has of the device. The allocator's reserve counts as usable: it gives it back under pressure."""
    device = GPUS[row.gpu].sheet.device()
    return device.memory_bytes - device.context_bytes


def held_bytes(row: Row, microbatch_size: int, chunks: int, counted: Counted) -> float:
    """On the rank of the pipeline that holds most: states, microbatches in flight, and the most that a block needs.

    Sharded weights and their gradients are whole for the block that computes; in a pipeline for all blocks, from the
    first microbatch to the last, the gradients in float32 (torchtitan 2024, section 2.1).
    """
    kinds = counted[key_of(row), microbatch_size]
    microbatches = row.batch // row.data_parallel // microbatch_size
    p = row.pipeline_parallel
    ranks = {0, p - 1}
    return max(_rank_bytes(row, kinds, rank, chunks, microbatches) for rank in ranks)


def in_flight(depth: int, chunks: int, rank: int, microbatches: int) -> float:
    """Microbatches of all its chunks that a rank keeps at most (Narayanan et al. 2021, section 2.2)."""
    if chunks == 1:
        return min(depth - rank, microbatches)
    return min(2 * (depth - rank - 1) + (chunks - 1) * depth + 1, microbatches * chunks) / chunks


def _rank_bytes(
    row: Row, kinds: tuple[CountedKind, CountedKind, CountedKind], rank: int, chunks: int, microbatches: int
) -> float:
    embedding, layer, head = kinds
    p, layers = row.pipeline_parallel, row.layers / row.pipeline_parallel
    blocks = [(layer, layers)]
    blocks += [(embedding, 1.0)] * (rank == 0) + [(head, 1.0)] * (rank == p - 1)
    if rank == p - 1 > 0 and head.parameters < embedding.parameters:  # a copy of the embedding that is tied to it
        states = layer.parameters * layers + embedding.parameters
    else:
        states = sum(kind.parameters * count for kind, count in blocks)
    held = ledger_of(row, row.data_parallel * row.context_parallel)
    flying = in_flight(p, chunks, rank, microbatches)
    kept = sum(_kept_bytes(row, kind, is_layer=kind is layer) * count for kind, count in blocks)
    more = []
    for kind, _ in blocks:
        again = kind.counts.activation_bytes - _kept_bytes(row, kind, is_layer=kind is layer)
        workspace = 0 if kind is head and family_of(row).fused_loss else kind.counts.workspace_bytes
        gathered = GATHERED_BLOCKS * (SHARDINGS[row.sharding] == "weights") + (row.sharding != "none")
        more.append(max(again, 0) + workspace + gathered * held.gathered * kind.parameters * (p == 1))
    whole = states * (held.gathered + MASTER_BYTES) if row.sharding != "none" and p > 1 else 0.0
    return states * held.kept + whole + flying * kept + max(more)


def _kept_bytes(row: Row, kind: CountedKind, *, is_layer: bool) -> float:
    """What a microbatch in flight keeps of a block."""
    counts, recompute = kind.counts, row.recompute if is_layer else "none"
    if recompute == "full":
        return counts.input_bytes
    if recompute == "selective" and counts.selective is not None:
        return counts.selective.activation_bytes
    if recompute == "selective":
        return counts.input_bytes + sum(map(_result_bytes, counts.forward))
    return counts.activation_bytes


def _result_bytes(op: DeviceOperation) -> float:
    """What selective checkpointing keeps of results, in 16 bits: attention's, and those of half of all products."""
    if op.sizes is None:
        return 0.0
    if "attention" in op.name:
        return 2.0 * op.sizes.batch * op.sizes.m * op.sizes.k
    return 2.0 * op.sizes.batch * op.sizes.m * op.sizes.n * KEPT_PRODUCTS
