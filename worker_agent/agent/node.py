"""Node: an agent's report of its node. `python -m worker_agent.agent.node` prints the GPUs as JSON."""

import contextlib
import fcntl
import json
import os
import platform
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from pipeplan.documents.files import parse
from pipeplan.documents.names import STRICT
from pipeplan.errors import InvalidInputError
from pipeplan.protocol.agents import Registration
from worker_agent.agent.settings import AgentSettings

MOST_ON_CORES = 64
"""How many ranks a node without GPUs takes at the same time: they share its cores."""

_SHARED_MARK = ".pipeplan-folder"
_ASK_S = 120.0
_ADDRESS_OF = 0x8915
"""SIOCGIFADDR: asks an interface for its address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs that torch finds, all assumed to be like the first; `count` is 0 if there are none."""

    count: int
    name: str = ""
    memory_bytes: int = 0
    driver: str | None = None

    __pydantic_config__: ClassVar = STRICT


class Port:
    """A port of this node that is reserved until a rendezvous listens there.

    A socket that is bound but does not listen holds it. The rendezvous that listens there later shares the address.
    """

    def __init__(self, wanted: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("", wanted))
        except OSError as error:
            self._socket.close()
            raise InvalidInputError("rendezvous_port", f"must be free ({error.strerror})", wanted) from error
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def registration(settings: AgentSettings, *, instance: str, port: int) -> Registration:
    """The registration of this node's agent. Raises InvalidInputError if the shared folder cannot be used."""
    gpus = find_gpus()
    return Registration(
        name=settings.name,
        instance=instance,
        host=platform.node(),
        address=settings.address or address_towards(settings.url),
        port=port,
        devices=gpus.count or len(os.sched_getaffinity(0)),
        max_processes=settings.devices or gpus.count or MOST_ON_CORES,
        device_name=gpus.name or f"{platform.processor() or platform.machine()}, 1 core",
        memory_bytes=gpus.memory_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        torch_version=_version("torch"),
        driver=gpus.driver,
        version=_version("pipeplan"),
        allow=settings.allowed,
        shared_folder=None if settings.shared_dir is None else folder_id(settings.shared_dir, instance),
    )


def address_towards(url: str) -> str:
    """This node's address towards a service. Nothing is sent."""
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, _, _, there = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError:
        return platform.node()


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None if none is known to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF, name.encode()[:15].ljust(256, b"\0"))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def use_interface_towards(address: str, port: int) -> None:
    """Makes gloo use the interface towards an address. By default it asks for the host's name, often the loopback's."""
    name = interface_of(address_towards(f"tcp://{address}:{port}"))
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def folder_id(folder: Path, proposed: str) -> str:
    """The name of a shared folder: the first agent writes it into the folder, and all others read it there."""
    mark = folder / _SHARED_MARK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f"{_SHARED_MARK}.{proposed}"
        aside.write_text(proposed, encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(aside, mark)
        aside.unlink()
        return mark.read_text(encoding="utf-8").strip()
    except OSError as error:
        rule = f"must be a folder that can be written ({error.strerror})"
        raise InvalidInputError("shared_dir", rule, str(folder)) from error


def find_gpus() -> Gpus:
    """The node's GPUs, found in a separate process, because the agent itself does not load torch."""
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
        return Gpus(count=0)
    command = [sys.executable, "-m", "worker_agent.agent.node"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return Gpus(count=0)
    return parse(Gpus, answer.stdout.strip().splitlines()[-1])


def _ask_torch() -> Gpus:
    """The GPUs, in the process that loads torch."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
        return Gpus(count=0)
    first = torch.cuda.get_device_properties(0)
    version_file = Path("/sys/module/nvidia/version")
    driver = version_file.read_text(encoding="utf-8").strip() if version_file.exists() else None
    return Gpus(count=torch.cuda.device_count(), name=first.name, memory_bytes=first.total_memory, driver=driver)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_ask_torch())) + "\n")
