"""`pipeplan agents`: the nodes that do the work."""

import typer

from pipeplan.cli.service import AsJson, Cursor, Limit, Token, Url, service_at, tell_more

app = typer.Typer(no_args_is_help=True, help="The agents on the nodes: which are alive, draining or lost.")


@app.callback()
def agents() -> None:
    """The agents on the nodes: which are alive, draining or lost."""


@app.command("list")
def list_agents(
    limit: Limit = 50,
    cursor: Cursor = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Lists agents, newest first."""
    from pipeplan.cli.console import show_table

    with service_at(url, token) as service:
        page = service.agents(limit=limit, cursor=cursor).page()
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
    tell_more(page.next_cursor)
