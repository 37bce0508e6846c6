"""torchrun: settings of its agent for the processes of one node, alone or among several."""

import logging

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig

from worker_agent.engine.processes import Place


def one_node(processes: int, logs: LogsSpecs | None = None) -> LaunchConfig:
    """Runs `processes` on this node alone, over loopback and without restarts. Silences torchrun's own log."""
    _be_quiet()
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        run_id="pipeplan",
        max_restarts=0,
        monitor_interval=0.05,
        logs_specs=logs or DefaultLogsSpecs(),
    )


def node_of(place: Place | None, processes: int, logs: LogsSpecs | None = None) -> LaunchConfig:
    """Runs `processes` on this node as its part of a run: `torchrun --nnodes --node-rank`, static rendezvous."""
    if place is None:
        return one_node(processes, logs)
    _be_quiet()
    return LaunchConfig(
        min_nodes=place.nodes,
        max_nodes=place.nodes,
        nproc_per_node=processes,
        rdzv_backend="static",
        rdzv_endpoint=f"{place.address}:{place.port}",
        rdzv_configs={"rank": place.node_rank, "timeout": place.meeting_s},
        run_id=place.meeting,
        max_restarts=0,
        monitor_interval=0.05,
        logs_specs=logs or DefaultLogsSpecs(),
    )


def _be_quiet() -> None:
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
