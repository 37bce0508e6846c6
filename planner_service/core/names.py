"""Names: what a model, a block or a device may be called. Scripts, logs and terminals print these texts."""

import re

from planner_service.core.errors import require

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""C0, DEL, C1, the line and paragraph separators, and half characters."""

_RULE = "must hold no control character, line separator or lone surrogate"


def require_name(field: str, value: str) -> None:
    """Raises InvalidInputError for a name that is empty, or that does not print as the one line that it is.

    Letters of every script, spaces and emoji pass.
    """
    require(bool(value.strip()), field, "must not be empty", value)
    require_line(field, value)


def require_line(field: str, value: str) -> None:
    """Raises InvalidInputError for a text that does not print as one line."""
    require(_UNPRINTABLE.search(value) is None, field, _RULE, value)


def on_one_line(text: str) -> str:
    """The text with escapes in place of what `require_line` refuses: it prints as one line, whatever it was."""
    return _UNPRINTABLE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)
