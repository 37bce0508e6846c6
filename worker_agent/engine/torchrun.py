"""torchrun: settings of its agent for the processes of one node, alone or among several."""

import logging
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig

from worker_agent.engine.processes import Place


def one_node(processes: int, logs: LogsSpecs | None = None) -> LaunchConfig:
    """Runs `processes` on this node alone, over loopback and without restarts."""
    return _config(1, processes, logs, "c10d", "127.0.0.1:0", run_id="pipeplan", local_addr="127.0.0.1")


def node_of(place: Place | None, processes: int, logs: LogsSpecs | None = None) -> LaunchConfig:
    """Runs `processes` on this node as its part of a run: `torchrun --nnodes --node-rank`, static rendezvous."""
    if place is None:
        return one_node(processes, logs)
    configs = {"rank": place.node_rank, "timeout": place.meeting_s}
    endpoint = f"{place.address}:{place.port}"
    return _config(place.nodes, processes, logs, "static", endpoint, run_id=place.meeting, rdzv_configs=configs)


def _config(
    nodes: int, processes: int, logs: LogsSpecs | None, backend: str, endpoint: str, **others: Any
) -> LaunchConfig:
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):  # torchrun's own log
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=processes,
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        max_restarts=0,
        monitor_interval=0.05,
        logs_specs=logs or DefaultLogsSpecs(),
        **others,
    )
