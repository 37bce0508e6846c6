"""Completion: the values that the shell offers for an option: names from the registries, and existing files."""

from collections.abc import Callable, Iterable
from pathlib import Path

from pipeplan.documents.named_clusters import SERVERS

Completer = Callable[[str], list[str]]


def names(known: Iterable[str]) -> Completer:
    """Offers the names that begin with the typed text."""
    every = tuple(known)
    return lambda incomplete: [name for name in every if name.startswith(incomplete)]


def clusters(incomplete: str) -> list[str]:
    return [*names(SERVERS)(incomplete), *_files(incomplete)]


def _files(incomplete: str) -> list[str]:
    prefix, slash, typed = incomplete.rpartition("/")
    prefix += slash
    place = Path(prefix or ".")
    if not place.is_dir():
        return []
    found = [path for path in sorted(place.iterdir()) if path.name.startswith(typed)]
    folders = [f"{prefix}{path.name}/" for path in found if path.is_dir()]
    return [*folders, *(f"{prefix}{path.name}" for path in found if path.suffix == ".json")]
