"""torchrun's own agent, set up for the processes of one node."""

import logging

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig


def one_node(processes: int, logs: LogsSpecs | None = None) -> LaunchConfig:
    """So many processes on this node, over loopback, without restarts; torchrun's own log lines are kept quiet."""
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
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
