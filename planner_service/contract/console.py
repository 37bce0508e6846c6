"""How both commands end: one clear sentence on standard error, and an exit status that scripts can rely on."""

import sys
from collections.abc import Callable

from planner_service.core.errors import InvalidInputError, PipeplanError

DONE, FAILED, INVALID_INPUT, INFEASIBLE = 0, 1, 2, 3


def run_command(app: Callable[[], object]) -> None:
    """Runs a command-line app; errors of ours become a sentence and an exit status, never a traceback."""
    try:
        app()
    except InvalidInputError as error:
        _fail(str(error), INVALID_INPUT)
    except PipeplanError as error:
        _fail(str(error), FAILED)
    except KeyboardInterrupt:
        _fail("interrupted", 130)


def _fail(sentence: str, status: int) -> None:
    print(f"error: {sentence}", file=sys.stderr)  # noqa: T201 (this is the console)
    raise SystemExit(status)
