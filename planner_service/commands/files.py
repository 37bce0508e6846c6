"""Files that the commands write."""

from pathlib import Path

from pipeplan.errors import InvalidInputError


def write_document(path: Path, text: str) -> None:
    """Writes a document. Raises InvalidInputError where that is not possible."""
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInputError("output", "must be a file that can be written", str(path)) from error
