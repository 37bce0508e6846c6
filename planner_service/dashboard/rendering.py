"""Rendering: the templates that stand beside the pages, and what every page is sent with."""

from pathlib import Path

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeplan.documents.files import dump
from planner_service.api.auth import KEY
from planner_service.contract.tokens import LOCAL, Identity
from planner_service.dashboard import formats
from planner_service.dashboard.addresses import address_of

FOLDER = Path(__file__).parent
POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Nothing but our own style sheet and script is loaded, whatever a document's names hold, and nobody frames a page."""

REFERRER = "same-origin"
"""With `no-referrer` browsers send forms as if from nowhere (`Origin: null`), and every button would be refused."""

PAGES = (
    ("/plans", "Plans"),
    ("/aliases", "Aliases"),
    ("/profiles", "Profiles"),
    ("/clusters", "Clusters"),
    ("/runs", "Runs"),
    ("/jobs", "Jobs"),
    ("/agents", "Agents"),
)
"""What every page links to."""

templates = Environment(
    loader=FileSystemLoader(FOLDER / "views"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
templates.filters.update(formats.FILTERS, document=dump)


def page(request: Request, template: str, *, status: int = 200, **content: object) -> HTMLResponse:
    """A page: its template, with where it is and what time it is."""
    caller: Identity = request.scope.get(KEY, LOCAL)
    shared = {
        "caller": caller,
        "address": address_of(request),
        "pages": PAGES,
        "origin": str(request.base_url).rstrip("/"),
        "now": request.app.state.context.now(),
    }
    text = templates.get_template(template).render(**shared, **content)
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": REFERRER}
    return HTMLResponse(text, status, headers=headers)
