"""Tokens: who may call the service, and what with."""

from dataclasses import dataclass
from typing import Literal, get_args

Scope = Literal["read", "plan", "agent", "admin"]
"""What a route asks for: to look, to plan and enqueue, to work as an agent, to manage."""

SCOPES: tuple[Scope, ...] = get_args(Scope)

INCLUDED: dict[Scope, frozenset[Scope]] = {
    "read": frozenset({"read"}),
    "plan": frozenset({"read", "plan"}),
    "agent": frozenset({"agent"}),
    "admin": frozenset(SCOPES),
}
"""What each scope of a token allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who calls: the token's name, and every scope that it allows. `token_id` is None where no token was asked for."""

    name: str
    scopes: frozenset[Scope]
    token_id: str | None = None


LOCAL = Identity(name="local", scopes=frozenset(SCOPES))
"""Whoever calls from this machine where no token is demanded."""
