"""`pipeplan-agent start`: serves as this node's agent."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from pipeplan.cli.console import require_extra


def start(
    url: Annotated[str | None, typer.Option(help="The service. [PIPEPLAN_AGENT_URL, else PIPEPLAN_URL]")] = None,
    name: Annotated[
        str | None, typer.Option(help="This node's name; default: the host's. [PIPEPLAN_AGENT_NAME]")
    ] = None,
    work_dir: Annotated[
        Path | None, typer.Option(help="Where jobs keep their files. [PIPEPLAN_AGENT_WORK_DIR]")
    ] = None,
    allow: Annotated[list[str] | None, typer.Option(help="A factory that jobs may name; may be repeated.")] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="How many ranks it takes at once; default: its GPUs, or any number.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="The address of this node, for others.")] = None,
    rendezvous_port: Annotated[int | None, typer.Option(help="Its port, for others; default: a free one.")] = None,
    shared_dir: Annotated[
        Path | None, typer.Option(help="A folder that several nodes see, for runs over them.")
    ] = None,
    models_dir: Annotated[
        Path | None, typer.Option(help="A folder of Hugging Face models that jobs may name by path.")
    ] = None,
    drain_s: Annotated[
        float | None, typer.Option(min=0, help="How long a job may go on after SIGTERM, before it is handed back.")
    ] = None,
    exit_with_parent: Annotated[bool, typer.Option("--exit-with-parent", help="End when its parent ends.")] = False,
) -> None:
    """Takes jobs from the service until it is interrupted.

    It does one at a time. A second interrupt ends it at once.
    """
    require_extra("worker")
    from worker_agent.agent.agent import NodeAgent
    from worker_agent.agent.client import AgentClient
    from worker_agent.agent.limits import hide_from_jobs
    from worker_agent.agent.settings import load_settings
    from worker_agent.engine import processes as parent

    settings = load_settings(
        url=url,
        name=name,
        work_dir=None if work_dir is None else work_dir.absolute(),
        allow=tuple(allow) if allow else None,
        devices=devices,
        address=address,
        rendezvous_port=rendezvous_port,
        shared_dir=None if shared_dir is None else shared_dir.absolute(),
        models_dir=None if models_dir is None else models_dir.absolute(),
        drain_s=drain_s,
    )
    hide_from_jobs()
    if exit_with_parent:
        parent.exit_with_parent()
    agent = NodeAgent(settings, AgentClient(settings.url, settings.token), lambda line: typer.echo(line, err=True))
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda *_: agent.stop())
    typer.echo(f"agent {settings.name} serves {settings.url}", err=True)
    agent.serve()
