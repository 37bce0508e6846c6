"""Secrets: how a text is shown where secrets have no place, in logs and tables of settings."""

import re

HIDDEN = "***"
_SECRET = re.compile(
    r"(?i)(bearer\s+)[^\s\"',]+|(://[^\s/:@\"']*:)[^\s/@\"']+(?=@)|(password[\"']?\s*[=:]\s*)[^\s,;&]+"
    r"|(pp[ls]_[0-9a-f]{32}_)[0-9a-f]+"
)


def masked(text: str) -> str:
    """The text without what looks like a secret: tokens, passwords in URLs and settings."""
    return _SECRET.sub(lambda found: f"{found[1] or found[2] or found[3] or found[4]}{HIDDEN}", text)
