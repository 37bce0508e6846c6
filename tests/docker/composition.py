"""docker-compose.yml as the tests read it: parsed, its substitutions made, its commands run as processes."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
ENTRYPOINTS = {
    "docker/service.Dockerfile": [sys.executable, "-m", "planner_service"],
    "docker/agent.Dockerfile": [sys.executable, "-m", "worker_agent"],
}
_SUBSTITUTION = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def composition() -> dict[str, Any]:
    """The whole file."""
    read: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return read


def services() -> dict[str, dict[str, Any]]:
    """The services by name."""
    found: dict[str, dict[str, Any]] = composition()["services"]
    return found


def ours() -> dict[str, dict[str, Any]]:
    """The services that are built here."""
    return {name: service for name, service in services().items() if "build" in service}


def command(service: dict[str, Any]) -> list[str]:
    """What the container executes: its image's entry point, and the service's command."""
    return [*ENTRYPOINTS[service["build"]["dockerfile"]], *service["command"]]


def environment(service: dict[str, Any], secrets: Path, **changes: str) -> dict[str, str]:
    """The container's environment, its secrets in this folder, with these changes (to ports and addresses)."""
    given = {
        name: _substituted(str(value)).replace("/run/secrets", str(secrets))
        for name, value in service["environment"].items()
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIPEPLAN_")}
    return kept | given | changes


def _substituted(text: str) -> str:
    return _SUBSTITUTION.sub(lambda found: os.environ.get(found[1]) or found[2] or "", text)
