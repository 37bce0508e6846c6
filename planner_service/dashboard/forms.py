"""Forms: what a page's button changes is changed only where a page of this service has sent it."""

from fastapi import Depends, Request

from pipeplan.errors import ForbiddenError


async def _own_page(request: Request) -> None:
    """Raises ForbiddenError for what another site's page, or no page at all, has sent (browsers say which it was)."""
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    if origin is None or origin.partition("://")[2].lower() != host.lower():
        raise ForbiddenError("what changes something must be sent from a page of this service; programs have the API")


OwnPage = Depends(_own_page)
"""The dependency of every route that takes a form."""
