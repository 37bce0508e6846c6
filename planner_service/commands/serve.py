"""`pipeplan serve` and `pipeplan settings`: the service with its dashboard, and its settings.

`serve` is one process; several on one PostgreSQL behave as one service. `settings` shows every setting, its value, and
where that comes from.
"""

import errno
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from pipeplan.cli.console import require_extra, show_table
from pipeplan.documents.files import dump
from pipeplan.errors import InvalidInputError, PipeplanError
from planner_service.platform.logs import configure, tell

if TYPE_CHECKING:
    import uvicorn

    from planner_service.platform.settings import Settings

BACKLOG = 2048
POLL_S = 0.5
"""Seconds between two checks whether the parent still runs."""

GRACE_S = 5.0
"""The time beyond `shutdown_s` after which the process ends immediately."""

Config = Annotated[
    Path | None, typer.Option("--config", help="A TOML file of settings, for what nothing else sets. [PIPEPLAN_CONFIG]")
]
Host = Annotated[str | None, typer.Option(help="Address to listen on. [PIPEPLAN_HOST]")]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="0 takes a free one. [PIPEPLAN_PORT]")]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database",
        help="sqlite:///FILE or postgresql://...; default: a file in the user's data folder. [PIPEPLAN_DATABASE_URL]",
    ),
]
LevelOfLogs = Annotated[
    str | None, typer.Option("--log-level", help="debug, info, warning or error. [PIPEPLAN_LOG_LEVEL]")
]
FormOfLogs = Annotated[str | None, typer.Option("--log-format", help="auto, json or human. [PIPEPLAN_LOG_FORMAT]")]
ExitWithParent = Annotated[
    bool, typer.Option("--exit-with-parent", help="End when the process that started this one ends.")
]


def serve(
    host: Host = None,
    port: Port = None,
    database: DatabaseUrl = None,
    config: Config = None,
    log_level: LevelOfLogs = None,
    log_format: FormOfLogs = None,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Serves the API and the dashboard until it is interrupted. Requests in progress are finished first."""
    require_extra("service")
    from planner_service.platform.settings import load_settings

    settings = load_settings(
        config=config, host=host, port=port, database_url=database, log_level=log_level, log_format=log_format
    )
    configure(settings.log_level, settings.log_format)
    with _socket(settings.host, settings.port) as listener:
        server, shown, stopping = _server(settings)
        try:
            listener.listen(BACKLOG)
        except OSError as error:  # another process has been faster
            raise _cannot_listen(settings.host, settings.port, error) from error
        host_in_url = f"[{settings.host}]" if ":" in settings.host else settings.host
        url = f"http://{host_in_url}:{listener.getsockname()[1]}{settings.base_path}"
        parent = os.getppid() if exit_with_parent else None
        threading.Thread(target=_watch, args=(server, parent, settings.shutdown_s, stopping), daemon=True).start()
        threading.Thread(target=_announce, args=(server, settings, url, shown), daemon=True).start()
        server.run(sockets=[listener])
    if not server.started:
        raise PipeplanError("the service could not start; the lines above say why")


def settings(
    config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Shows the service's settings. Each has its value, its meaning and what set it; secrets are masked."""
    from planner_service.platform.settings import resolve_settings

    shown = resolve_settings(config=config).shown()
    if as_json:
        typer.echo(dump({"settings": [asdict(setting) for setting in shown]}))
        return
    rows = [(row.name, "" if row.value is None else str(row.value), row.source, row.meaning) for row in shown]
    show_table(("setting", "value", "from", "meaning"), rows)


def _server(settings: "Settings") -> "tuple[uvicorn.Server, str, Callable[[], None]]":
    """The server, its database's name, and a function that ends event streams and long searches.

    The server is not started yet, but everything that could fail at its start has been done. Streams and searches would
    not end by themselves in time, so they need that function. From here on SIGTERM shuts the server down cleanly, with
    exit status 0. While the server runs, uvicorn's own handler does this, and calls this handler when everything has
    ended.
    """
    # Nearly all objects made here stay, and later collections leave them out. A full collection would take 0.2 s to
    # walk through them, and 64 KiB of empty lists trigger one.
    gc.disable()
    try:
        import uvicorn

        from planner_service.app import create_app, prepare
        from planner_service.platform.connections import BoundedProtocol, most_connections

        application = create_app(settings)
        prepare(settings, application.state.context)
        gc.freeze()
    finally:
        gc.enable()
    config = uvicorn.Config(
        application,
        http=BoundedProtocol,
        limit_concurrency=most_connections(settings.event_streams),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        proxy_headers=True,
        forwarded_allow_ips=list(settings.trusted_proxies),
        timeout_graceful_shutdown=max(1, round(settings.shutdown_s)),
    )
    server = uvicorn.Server(config)

    def end(_signal: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    signal.signal(signal.SIGTERM, end)
    state = application.state
    return server, state.context.database.shown, partial(state.background.wind_down, settings.shutdown_s / 2)


def _socket(host: str, port: int) -> socket.socket:
    """A socket at the address. It listens later: until the service can answer, connections are refused, by which
    agents know that it is away for everybody, and that the network is whole.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    rule = "must be an address of this machine"
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise InvalidInputError("host", f"{rule} ({error.strerror})", host) from error
        raise _cannot_listen(host, port, error) from error
    except (TypeError, ValueError) as error:  # errors of the name's encoding
        bound.close()
        raise InvalidInputError("host", f"{rule} ({error})", host) from error
    return bound


def _cannot_listen(host: str, port: int, error: OSError) -> PipeplanError:
    if error.errno == errno.EADDRINUSE:
        advice = "stop what listens there, or choose another with --port (0 takes a free one)"
        return PipeplanError(f"port {port} of {host} is taken: {advice}")
    return PipeplanError(f"cannot listen on port {port} of {host}: {error.strerror}")


def _announce(server: "uvicorn.Server", settings: "Settings", url: str, database: str) -> None:
    """Prints the service's address once it answers: a sentence that scripts wait for, or JSON."""
    while not server.started:
        if server.should_exit:
            return
        time.sleep(0.01)
    if settings.log_format == "json":
        tell(f"pipeplan serves {url} from {database}")
    else:
        typer.echo(f"pipeplan serves {url}", err=True)


def _watch(server: "uvicorn.Server", parent: int | None, shutdown_s: float, stopping: Callable[[], None]) -> None:
    """Shuts the service down cleanly once its parent has ended; kills it if the shutdown takes too long."""
    while not server.should_exit:
        time.sleep(POLL_S)
        if parent is not None and os.getppid() != parent:
            server.should_exit = True
    stopping()  # takes at most half of shutdown_s
    time.sleep(shutdown_s + GRACE_S)
    os._exit(1)
