"""On a process's path, it makes the libraries unimportable that a machine with a GPU need not have."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

ABSENT = frozenset(
    {"alembic", "fastapi", "httpx", "huggingface_hub", "jinja2", "ortools", "pydantic", "pydantic_core"}
    | {"pydantic_settings", "rich", "sqlalchemy", "transformers", "typer", "uvicorn"}
)


class Absent(MetaPathFinder):
    """Finds none of them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raises ImportError for what is to be absent, and leaves all else to others."""
        if fullname.partition(".")[0] in ABSENT:
            raise ImportError(f"{fullname} is made absent")


sys.meta_path.insert(0, Absent())
