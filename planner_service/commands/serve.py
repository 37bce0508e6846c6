"""`pipeplan serve`: the service and its dashboard, on this machine."""

import errno
import logging
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated

import typer

from planner_service.contract.extras import require_extra
from planner_service.core.errors import PipeplanError

if TYPE_CHECKING:
    import uvicorn

BACKLOG = 2048
PARENT_POLL_S = 0.5
GRACE_S = 5.0

Host = Annotated[str | None, typer.Option(help="Address to listen on; of this machine alone. [PIPEPLAN_HOST]")]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="0 takes a free one. [PIPEPLAN_PORT]")]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database", help="sqlite:///FILE; default: a file in the user's data folder. [PIPEPLAN_DATABASE_URL]"
    ),
]
ExitWithParent = Annotated[
    bool, typer.Option("--exit-with-parent", help="End when the process that started this one ends.")
]


def serve(
    host: Host = None, port: Port = None, database: DatabaseUrl = None, exit_with_parent: ExitWithParent = False
) -> None:
    """Serves the API and the dashboard until it is interrupted."""
    require_extra("service")
    import uvicorn

    from planner_service.app import create_app
    from planner_service.settings import load_settings
    from planner_service.storage.migrations import upgrade

    settings = load_settings(host=host, port=port, database_url=database)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with _listen(settings.host, settings.port) as listener:
        application = create_app(settings)
        upgrade(application.state.context.database)
        server = uvicorn.Server(uvicorn.Config(application, log_config=None, access_log=False, lifespan="on"))
        if exit_with_parent:
            threading.Thread(target=_follow, args=(server, os.getppid()), daemon=True).start()
        threading.Thread(target=_announce, args=(server, _url(settings.host, listener)), daemon=True).start()
        server.run(sockets=[listener])
    if not server.started:
        raise PipeplanError("the service could not start; the lines above say why")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            advice = "stop what listens there, or choose another with --port (0 takes a free one)"
            raise PipeplanError(f"port {port} of {host} is taken: {advice}") from error
        raise PipeplanError(f"cannot listen on port {port} of {host}: {error.strerror}") from error
    return listener


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _announce(server: "uvicorn.Server", url: str) -> None:
    """Says where the service is, once it answers."""
    while not server.started:
        if server.should_exit:
            return
        time.sleep(0.01)
    typer.echo(f"pipeplan serves {url}", err=True)


def _follow(server: "uvicorn.Server", parent: int) -> None:
    """Ends the service in good order once the parent is gone, and for certain soon after."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    server.should_exit = True
    time.sleep(GRACE_S)
    os._exit(1)
