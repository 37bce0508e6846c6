"""Processes and ports of this machine, for tests that start what starts others."""

import os
import socket
from pathlib import Path


def processes_naming(text: Path | str) -> list[int]:
    """The processes, other than this one, whose command lines hold a text, such as a folder of their own."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ")
        except OSError:
            continue  # it has ended meanwhile
        if str(text).encode() in line and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
