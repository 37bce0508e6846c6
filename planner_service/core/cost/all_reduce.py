"""The gradient exchange: bytes that every replica of a stage sends for one update, by the way they synchronise."""

from collections.abc import Callable

from planner_service.core.cost.compute import FloatArray


def parameter_server(replicas: FloatArray) -> FloatArray:
    """4 (m - 1) / m of the weights: gradients out and weights back, sent and received (PipeDream 2018, section 3.2)."""
    return 4.0 * (replicas - 1.0) / replicas


def all_reduce(replicas: FloatArray) -> FloatArray:
    """2 (m - 1) / m of the weights: the ring's reduce-scatter and all-gather."""
    return 2.0 * (replicas - 1.0) / replicas


EXCHANGES: dict[str, Callable[[FloatArray], FloatArray]] = {
    "parameter-server": parameter_server,
    "all-reduce": all_reduce,
}
"""Weights moved a worker and update, as a share of the stage's, by the name of `Options.synchronisation`."""
