"""Excerpts: what an error shows of a value that may be as large as the document that holds it."""

import reprlib
from dataclasses import dataclass

SHOWN_CHARACTERS = 300
SHOWN_ITEMS = 100
_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 6
_SHORT.maxlevel = 4
_SHORT.maxstring = 60


@dataclass(frozen=True, slots=True, repr=False)
class Excerpt:
    """The beginning of a large value, in the form in which Python shows it."""

    text: str

    def __repr__(self) -> str:
        return self.text


def excerpt(value: object) -> object:
    """The value itself where it is small; of a longer text its beginning, of a larger collection an Excerpt."""
    if isinstance(value, str):
        return value if len(value) <= SHOWN_CHARACTERS else value[: SHOWN_CHARACTERS - 3] + "..."
    if isinstance(value, bytes):
        return value[:SHOWN_CHARACTERS]
    if isinstance(value, list | tuple | dict) and not _is_small(value):
        return Excerpt(_SHORT.repr(value))
    return value


def _is_small(value: object) -> bool:
    """Whether little is in it; looks at no more than that."""
    waiting, seen = [value], 0
    while waiting and seen <= SHOWN_ITEMS:
        match waiting.pop():
            case dict() as pairs if len(pairs) <= SHOWN_ITEMS:
                waiting += [*pairs.keys(), *pairs.values()]
            case list() | tuple() as items if len(items) <= SHOWN_ITEMS:
                waiting += items
            case dict() | list() | tuple():
                return False
            case str() as text:
                seen += len(text) // 10
            case _:
                pass
        seen += 1
    return not waiting
