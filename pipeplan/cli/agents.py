"""`pipeplan agents`: the nodes that do the work."""

import typer

from pipeplan.cli.service import AsJson, Cursor, Limit, Token, Url, service_at, show_page
from pipeplan.protocol.agents import Agent

app = typer.Typer(no_args_is_help=True, help="The agents on the nodes: which are alive, draining or lost.")


@app.callback()
def agents() -> None:
    """The agents on the nodes: which are alive, draining or lost."""


@app.command("list")
def list_agents(
    limit: Limit = 50, cursor: Cursor = None, url: Url = None, token: Token = None, as_json: AsJson = False
) -> None:
    """Lists agents, newest first."""
    with service_at(url, token) as service:
        page = service.agents(limit=limit, cursor=cursor).page()
    headings = ("name", "state", "devices", "device", "torch", "address", "job", "last seen")
    show_page(page, headings, _row, as_json=as_json)


def _row(agent: Agent) -> tuple[str, ...]:
    about = (agent.name, agent.state, str(agent.devices), agent.device_name, agent.torch_version, agent.address)
    return (*about, agent.job_id or "", f"{agent.last_seen_at:%Y-%m-%d %H:%M:%S}")
