"""Extras: what a command needs beyond the core, asked for by name before it is used."""

from importlib.util import find_spec

from planner_service.core.errors import MissingDependencyError

WORKER_MODULES = ("torch", "safetensors")


def require_worker() -> None:
    """Raises MissingDependencyError unless the worker extra is installed."""
    missing = [name for name in WORKER_MODULES if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(f"this command needs {missing[0]}: pip install 'pipeplan[worker]'")
