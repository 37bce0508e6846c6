"""Tokens: who may call the service, with which scopes, and how secrets are masked in logs and tables of settings."""

import ipaddress
import re
import secrets
import zlib
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, get_args

from pydantic import Field, field_validator

from pipeplan.documents.names import require_own_name
from pipeplan.errors import require
from pipeplan.protocol.listing import WireModel

Scope = Literal["read", "plan", "agent", "admin"]
"""The scopes that routes demand: to read, to plan and enqueue, to work as an agent, to manage."""

SCOPES: tuple[Scope, ...] = get_args(Scope)

INCLUDED: dict[Scope, frozenset[Scope]] = {
    "read": frozenset({"read"}),
    "plan": frozenset({"read", "plan"}),
    "agent": frozenset({"agent"}),
    "admin": frozenset(SCOPES),
}
"""What each scope of a token allows. An agent sees the jobs and plans that it works on, not the lists."""

DAY_S = 24 * 3600
DEFAULT_LIFE_S = 90 * DAY_S
LONGEST_LIFE_S = 3650 * DAY_S

RESERVED = ("local", "nobody", "console")
"""Names that callers without a token have."""

SECRET_BYTES = 32
TOKEN_PREFIX = "ppl"
SESSION_PREFIX = "pps"

HIDDEN = "***"
_SECRET = re.compile(
    r"(?i)(bearer\s+)[^\s\"',]+|(://[^\s/:@\"']*:)[^\s/@\"']+(?=@)|(password[\"']?\s*[=:]\s*)[^\s,;&]+"
    r"|(pp[ls]_[0-9a-f]{32}_)[0-9a-f]+"
)
_TEXT = re.compile(r"(ppl|pps)_([0-9a-f]{32})_([0-9a-f]{64})([0-9a-f]{8})")

TokenState = Literal["valid", "expired", "revoked", "foreign"]
"""A foreign token was made under another PIPEPLAN_TOKEN_KEY: it is valid again when that key is back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """A token's or a session's parts: `id` finds it, `secret` proves it. Its text is what the holder keeps."""

    prefix: str
    id: str
    secret: str = field(repr=False)

    def text(self) -> str:
        """The parts with a checksum, which shows a mistyped text without a query of the database."""
        body = f"{self.prefix}_{self.id}_{self.secret}"
        return f"{body}{zlib.crc32(body.encode()):08x}"


def new_credential(prefix: str) -> Credential:
    return Credential(prefix=prefix, id=secrets.token_hex(16), secret=secrets.token_hex(SECRET_BYTES))


def parse_credential(prefix: str, text: str) -> Credential | None:
    """The credential in a text; None for any other text."""
    match = _TEXT.fullmatch(text)
    if match is None or match[1] != prefix:
        return None
    credential = Credential(prefix=prefix, id=match[2], secret=match[3])
    return credential if credential.text() == text else None


def masked(text: str) -> str:
    """The text with secrets masked: tokens, passwords in URLs and settings."""
    return _SECRET.sub(lambda found: f"{found[1] or found[2] or found[3] or found[4]}{HIDDEN}", text)


class NewToken(WireModel):
    """A token to be made. `expires_in_s` is null for one that never expires."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,99}$",
        description="who or what it is for; histories and logs show it",
        examples=["ci"],
    )
    scopes: tuple[Scope, ...] = Field(min_length=1, max_length=len(SCOPES), examples=[["plan"]])
    expires_in_s: int | None = Field(default=DEFAULT_LIFE_S, ge=1, le=LONGEST_LIFE_S, description="seconds from now")

    @field_validator("name")
    @classmethod
    def _not_reserved(cls, name: str) -> str:
        rule = f"must not be {' or '.join(RESERVED)}, which name callers without a token"
        require(name not in RESERVED, "", rule, name)
        require_own_name("", name)
        return name


class Token(WireModel):
    """A token as it is listed: its secret is not kept."""

    id: str
    name: str
    scopes: tuple[Scope, ...]
    state: TokenState
    created_by: str = Field(description="the name of the token that made it; `console`: the command")
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None = Field(description="exact to a minute")


class CreatedToken(Token):
    """A new token. `token` is shown this once."""

    token: str = Field(description="sent as `Authorization: Bearer ...`; the service keeps only its hash")


class Whoami(WireModel):
    """Who the caller is to the service. `token` is null if none was demanded."""

    name: str
    scopes: tuple[Scope, ...] = Field(description="all that is allowed, with the scopes that others include")
    token: Token | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who calls: the token's name, and every scope that it allows. `token_id` is None if no token was demanded."""

    name: str
    scopes: frozenset[Scope]
    token_id: str | None = None


LOCAL = Identity(name="local", scopes=frozenset(SCOPES))
"""Any caller from this machine, if no token is demanded."""

NOBODY = Identity(name="nobody", scopes=frozenset())
"""Any caller of a public page."""


def allowed(scopes: tuple[Scope, ...]) -> frozenset[Scope]:
    return frozenset().union(*(INCLUDED[scope] for scope in scopes))


def is_loopback(host: str) -> bool:
    """Whether a name or an address can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
