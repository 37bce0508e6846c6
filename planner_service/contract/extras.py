"""Extras: what a command needs beyond the core, asked for by name before it is used."""

from importlib.util import find_spec
from typing import Literal

from pipeplan.errors import MissingDependencyError

MODULES = {
    "service": ("fastapi", "uvicorn", "sqlalchemy", "alembic", "jinja2", "prometheus_client"),
    "worker": ("torch", "transformers", "safetensors"),
}


def require_extra(extra: Literal["service", "worker"]) -> None:
    """Raises MissingDependencyError unless the extra is installed."""
    missing = [name for name in MODULES[extra] if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(f"this command needs {missing[0]}: pip install 'pipeplan[{extra}]'")
