"""Secrets: how a text is shown where secrets have no place, in logs and tables of settings."""

import re

HIDDEN = "***"
_SECRET = re.compile(
    r"(?i)(bearer\s+)[^\s\"',]+|(://[^\s/:@\"']*:)[^\s/@\"']+(?=@)|(password[\"']?\s*[=:]\s*)[^\s,;&]+"
)


def masked(text: str) -> str:
    """The text without what looks like a secret: bearer tokens, passwords in URLs and settings."""
    return _SECRET.sub(lambda found: f"{found[1] or found[2] or found[3]}{HIDDEN}", text)
