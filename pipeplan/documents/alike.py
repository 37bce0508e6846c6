"""Alike: runs of equal consecutive blocks, each as one row of a table."""

import re
from collections.abc import Hashable, Iterator, Sequence

_NUMBERED = re.compile(r"(.*?)(\d+)", re.DOTALL)


def alike(names: Sequence[str], contents: Sequence[Hashable]) -> Iterator[tuple[int, int, str]]:
    """The start, stop and name of each run of equal blocks: `layer.0-79` for layer.0 to layer.79.

    The blocks of a run have equal contents, and names that end with consecutive numbers.
    """
    start = 0
    for stop in range(1, len(names) + 1):
        if stop < len(names) and contents[stop] == contents[start] and _follows(names[stop - 1], names[stop]):
            continue
        last = _NUMBERED.fullmatch(names[stop - 1])
        several = stop - start > 1 and last is not None
        yield start, stop, f"{names[start]}-{last[2]}" if several and last else names[start]
        start = stop


def _follows(name: str, following: str) -> bool:
    first, second = _NUMBERED.fullmatch(name), _NUMBERED.fullmatch(following)
    return bool(first and second and first[1] == second[1] and int(second[2]) == int(first[2]) + 1)
