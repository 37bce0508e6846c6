"""The exchange term: what the replicas of a stage send for one update, and how long that outlasts the backward."""

from collections.abc import Callable, Iterable

from pipeplan.arrays import FloatArray


def parameter_server(replicas: FloatArray) -> FloatArray:
    """4 (m - 1) / m of the weights: gradients out and weights back, sent and received (PipeDream 2018, section 3.2)."""
    return 4.0 * (replicas - 1.0) / replicas


def all_reduce(replicas: FloatArray) -> FloatArray:
    """2 (m - 1) / m of the weights: the ring's reduce-scatter and all-gather."""
    return 2.0 * (replicas - 1.0) / replicas


def in_turn(replicas: FloatArray) -> FloatArray:
    """Once the weights for each replica: under ASP the gradients of each go to all others by themselves."""
    return replicas


EXCHANGES: dict[str, Callable[[FloatArray], FloatArray]] = {
    "parameter-server": parameter_server,
    "all-reduce": all_reduce,
}
"""Weights moved a worker and update, as a share of the stage's, by the name of `Options.synchronisation`."""

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
"""The least bytes of the first and of each later bucket, in which gradients are exchanged together: those of torch's
DistributedDataParallel. The first is small to let the exchange begin early.
"""


def outlasting_s(blocks: Iterable[tuple[float, float]], seconds_per_byte: float) -> float:
    """How long an exchange goes on when the backward that it overlaps with has ended.

    `blocks` are a stage's (backward seconds, bytes of weights), from the first to the last. The backward goes through
    them from the last to the first. A bucket leaves when it is complete and the buckets before it have left: wait-free
    backpropagation (PipeDream 2018, section 2).
    """
    through_s = free_s = 0.0
    gathered_bytes, enough_bytes = 0.0, FIRST_BUCKET_BYTES
    for backward_s, weight_bytes in reversed(list(blocks)):
        through_s += backward_s
        gathered_bytes += weight_bytes
        if gathered_bytes >= enough_bytes:
            free_s = max(free_s, through_s) + gathered_bytes * seconds_per_byte
            gathered_bytes, enough_bytes = 0.0, BUCKET_BYTES
    return max(free_s, through_s) + gathered_bytes * seconds_per_byte - through_s
