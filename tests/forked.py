"""Processes that are forked from one with the slow imports done: a service starts in a moment, and so does a rank."""

import multiprocessing
import sys
from multiprocessing.context import ForkServerContext

SERVICE = "planner_service.app"
RANK = ["torch._dynamo", "worker_agent.runtime.rank", "transformers.models.gpt2.modeling_gpt2"]
COMMAND = ["worker_agent.cli", "worker_agent.runtime.run"]


def fork_server() -> ForkServerContext:
    """The server that forks; started once, with torch and the service preloaded where these tests have them."""
    context = multiprocessing.get_context("forkserver")
    preloaded = [*RANK, *COMMAND] if "torch" in sys.modules else []
    if SERVICE in sys.modules:
        preloaded += [SERVICE, "planner_service.commands.serve", "uvicorn"]
    context.set_forkserver_preload([*preloaded, "tests.frozen"])
    return context
