"""Auth: what every route asks of its caller, and who that is. A route that asks for nothing does not start."""

from typing import Annotated, Any

from fastapi import Depends, Request

from planner_service.contract.tokens import LOCAL, Identity, Scope
from planner_service.core.errors import ForbiddenError

KEY = "pipeplan.caller"
"""Where a request's caller stands in its ASGI scope."""


class Demand:
    """Passes callers with one of the scopes. Raises ForbiddenError for the others."""

    def __init__(self, *scopes: Scope) -> None:
        self.scopes = frozenset(scopes)

    async def __call__(self, request: Request) -> None:
        """Passes or raises."""
        identity = await caller(request)
        if not self.scopes & identity.scopes:
            wanted = " or ".join(sorted(self.scopes))
            raise ForbiddenError(f"the token {identity.name!r} does not have the scope {wanted}, which this asks for")


def scope(*scopes: Scope) -> Any:
    """The dependency that lets callers with one of the scopes in."""
    return Depends(Demand(*scopes))


async def caller(request: Request) -> Identity:
    """Who calls."""
    identity: Identity = request.scope.get(KEY, LOCAL)
    return identity


Caller = Annotated[Identity, Depends(caller)]
