"""User code: models, data and losses that a SPEC names. They may raise anything. A UserCodeError reports the type, the
message and the place of what they raise: the sentence that ends a run names what to look at.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeplan.errors import PipeplanError, RunFailedError

SHOWN_CHARACTERS = 600

_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")
_ALLOCATION = "can't allocate memory"
_TORCHS_STACK = "Exception raised from"


class UserCodeError(RunFailedError):
    """Code that a SPEC names raised an error of its own: its type, its message, and where it was called."""


@contextmanager
def user_code(place: str) -> Iterator[None]:
    """What the code under it raises becomes a UserCodeError that names the place. Errors of ours pass."""
    try:
        yield
    except PipeplanError:
        raise
    except (Exception, SystemExit) as error:  # it is the user's: anything may be raised, and it may want to exit
        raise UserCodeError(f"{described(error)}, in {place}") from error


def described(error: BaseException) -> str:
    """An error's type and its whole message as one line; memory that ran out is called that."""
    lines = str(error).partition(_TORCHS_STACK)[0].split()
    message = "".join(c if c.isprintable() else " " for c in " ".join(lines))
    if type(error).__name__ in _OUT_OF_MEMORY or _ALLOCATION in message:
        message = f"too little memory ({message})" if message else "too little memory"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
