"""Extras: what a command needs beyond the core, asked for by name before it is used."""

from importlib.util import find_spec

from planner_service.core.errors import MissingDependencyError

SERVICE_MODULES = ("fastapi", "uvicorn", "sqlalchemy", "alembic", "jinja2")


def require_service() -> None:
    """Raises MissingDependencyError unless the service extra is installed."""
    missing = [name for name in SERVICE_MODULES if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(f"this command needs {missing[0]}: pip install 'pipeplan[service]'")
