"""Foreign: code of the user's that may raise anything, and how that is told."""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeplan.errors import InvalidInputError, PipeplanError
from worker_agent.models.user_code import UserCodeError, described


@contextmanager
def foreign_code(field: str, rule: str, value: object) -> Iterator[None]:
    """What the code under it raises becomes an InvalidInputError: the rule, and in brackets the cause in one line."""
    try:
        yield
    except UserCodeError as error:
        raise InvalidInputError(field, f"{rule} ({error})", value) from error
    except PipeplanError:
        raise
    except Exception as error:  # a model, its data and its loss are the user's: anything may be raised
        raise InvalidInputError(field, f"{rule} ({described(error)})", value) from error
