"""JSON lines: tokens in lists, an object a line.

A line is a document: one key has its tokens as a list. It may also have lists `labels` and `attention_mask`, as the
columns of Arrow files. Tokens whose mask is 0 are padding, and are left out.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.errors import InvalidInputError, require
from worker_agent.models.arrow_files import LABELS, MASK


def read_lines(path: Path, field: str) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, NDArray[np.int64]]:
    """All tokens in one row, their labels if the lines have some, and the lengths of the documents.

    Raises InvalidInputError for a line that breaks a rule.
    """
    tokens: list[NDArray[np.int64]] = []
    labels: list[NDArray[np.int64]] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{path} line {number}"
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidInputError("data.path", "must hold JSON in every line", place) from error
            document = found if isinstance(found, dict) else {}
            row = _numbers(document, field, place)
            has_labels = LABELS in document and field != LABELS
            rule = f"must have {LABELS!r} in every line or in none"
            require(not tokens or has_labels == bool(labels), "data.path", rule, place)
            beside = {key: _numbers(document, key, place) for key in (LABELS, MASK) if key in document and key != field}
            for key, numbers in beside.items():
                rule = f"must have lists of one length in a line: {field!r} and {key!r} of {place}"
                require(len(numbers) == len(row), "data.path", rule, {field: len(row), key: len(numbers)})
            kept = beside[MASK] != 0 if MASK in beside else slice(None)
            tokens.append(row[kept])
            labels += [beside[LABELS][kept]] if has_labels else []
    sizes = np.array([len(row) for row in tokens], dtype=np.int64)
    return np.concatenate(tokens), np.concatenate(labels) if labels else None, sizes


def _numbers(document: dict[str, Any], key: str, place: str) -> NDArray[np.int64]:
    found = document.get(key)
    kinds = (int, bool) if key == MASK else (int,)
    fits = isinstance(found, list) and all(type(number) in kinds and abs(number) < 2**62 for number in found)
    what = "numbers" if key in (LABELS, MASK) else "token numbers"
    require(fits, "data.path", f"must hold an object with a list of {what} as {key!r} in every line", place)
    return np.array(found, dtype=np.int64)
