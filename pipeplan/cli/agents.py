"""`pipeplan agents`: the nodes that do the work."""

from typing import Annotated

import typer

from pipeplan.client.connection import DEFAULT_URL

app = typer.Typer(no_args_is_help=True, help="The agents on the nodes: who is alive, draining or lost.")

Url = Annotated[str, typer.Option("--url", envvar="PIPEPLAN_URL", help="The service.")]
Token = Annotated[str | None, typer.Option("--token", envvar="PIPEPLAN_TOKEN", help="The service's access token.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


@app.callback()
def agents() -> None:
    """The agents on the nodes: who is alive, draining or lost."""


@app.command("list")
def list_agents(
    limit: Annotated[int, typer.Option(min=1, max=200, help="How many at most.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="The next_cursor of the page before.")] = None,
    url: Url = DEFAULT_URL,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Lists agents, newest first."""
    from pipeplan.cli.console import show_table
    from pipeplan.client.client import ServiceClient

    with ServiceClient(url, token) as service:
        page = service.agents(limit=limit, cursor=cursor)
    if as_json:
        typer.echo(page.model_dump_json(indent=2))
        return
    show_table(
        ("name", "state", "devices", "device", "torch", "address", "job", "last seen"),
        [
            (
                agent.name,
                agent.state,
                str(agent.devices),
                agent.device_name,
                agent.torch_version,
                agent.address,
                agent.job_id or "",
                f"{agent.last_seen_at:%Y-%m-%d %H:%M:%S}",
            )
            for agent in page.items
        ],
    )
    if page.next_cursor is not None:
        typer.echo(f"more: --cursor {page.next_cursor}")
