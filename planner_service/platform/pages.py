"""Pages: the common part of the dashboard's pages.

`Address` makes the links from a list to the same list: sorted or filtered differently, or one page further or back.
`query_of` reads an address under the rules of the API's lists. `OwnPage` refuses forms that a page of another site
sends. `page` renders a template, which is in the folder of the page that uses it, and adds the headers of every page.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, get_origin
from urllib.parse import urlencode

from fastapi import Depends, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import ValidationError

from pipeplan import formats
from pipeplan.documents.files import dump, invalid_input
from pipeplan.errors import ForbiddenError
from pipeplan.protocol.listing import ListQuery
from pipeplan.protocol.tokens import LOCAL, Identity
from planner_service.platform.base_path import base_of
from planner_service.platform.requests import KEY

SEPARATOR = "~"
"""Separates the cursors of the previous pages. No cursor contains it."""

MOST_BACK = 12
"""How many pages back an address remembers. The first page is always one link away."""

SHOWN = 50
"""Items on a page of a list."""

FOLDER = Path(__file__).parent
TEMPLATES = FOLDER.parent
"""A template is in its page's folder, and its name includes the noun: `plans/plans.html`."""

POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""A page loads only our own style sheet and script, and cannot be framed, for any content of a document."""

REFERRER = "same-origin"
"""Under `no-referrer` browsers send forms with `Origin: null`, and every button would be refused."""

PAGES = (
    ("/plans", "Plans"),
    ("/aliases", "Aliases"),
    ("/profiles", "Profiles"),
    ("/clusters", "Clusters"),
    ("/runs", "Runs"),
    ("/jobs", "Jobs"),
    ("/agents", "Agents"),
)
"""The links of every page."""

Query = TypeVar("Query", bound=ListQuery)

templates = Environment(
    loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
templates.filters.update(formats.FILTERS, document=dump)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A path and its parameters in order, without empty ones. In links the base path precedes it."""

    path: str
    parameters: tuple[tuple[str, str], ...]
    base: str = ""

    def value(self, name: str) -> str:
        """A parameter; empty if it is not given."""
        return dict(self.parameters).get(name, "")

    def changed(self, **changes: str | None) -> str:
        """The same list from its beginning, with other parameters (None: without one)."""
        return self._with(changes | {"cursor": None, "back": None})

    def ordered(self, name: str) -> str:
        """The list sorted by this name in descending order, or in ascending order if it is descending already."""
        return self.changed(sort=name if self.value("sort") == f"-{name}" else f"-{name}")

    def following(self, cursor: str) -> str:
        """The page that starts at the cursor; it remembers this one."""
        back = [*self._back(), self.value("cursor")][-MOST_BACK:]
        return self._with({"cursor": cursor, "back": SEPARATOR.join(back)}, keep_empty=("back",))

    @property
    def previous(self) -> str | None:
        """The previous page; None on the first page, or if the address no longer remembers it."""
        before = self._back()
        if not self.value("cursor") or not before:
            return None
        kept = {"back": SEPARATOR.join(before[:-1])} if len(before) > 1 else {"back": None}
        return self._with({"cursor": before[-1] or None, **kept}, keep_empty=("back",) if len(before) > 1 else ())

    def _back(self) -> list[str]:
        given = dict(self.parameters)
        return given["back"].split(SEPARATOR) if "back" in given else []

    def _with(self, changes: dict[str, str | None], *, keep_empty: tuple[str, ...] = ()) -> str:
        kept = [(name, value) for name, value in self.parameters if name not in changes]
        added = [(n, v) for n, v in changes.items() if v is not None and (v or n in keep_empty)]
        return self.base + self.path + (f"?{urlencode(kept + added)}" if kept or added else "")


def address_of(request: Request) -> Address:
    """The address of the request, without the empty fields that a form also sends."""
    given = request.query_params.multi_items()
    kept = tuple((name, value) for name, value in given if value or name == "back")
    return Address(path=request.url.path, parameters=kept, base=base_of(request.scope))


def origin_of(request: Request) -> str:
    return str(request.base_url).rstrip("/") + base_of(request.scope)


def query_of(kind: type[Query], request: Request) -> Query:
    """The address's filters, sort and cursor. Raises InvalidInputError for any that the list does not have."""
    given = [(name, value) for name, value in address_of(request).parameters if name != "back"]
    single = {name: value for name, value in given if not _repeats(kind, name)}
    several = {name: [value for key, value in given if key == name] for name, _ in given if _repeats(kind, name)}
    try:
        return kind.model_validate({"limit": SHOWN} | single | several)
    except ValidationError as error:
        raise invalid_input(error) from error


def _repeats(kind: type[ListQuery], name: str) -> bool:
    return name in kind.model_fields and get_origin(kind.model_fields[name].annotation) is list


async def _own_page(request: Request) -> None:
    """Raises ForbiddenError unless the browser says that a page of this service sent the form."""
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    if origin is None or origin.partition("://")[2].lower() != host.lower():
        raise ForbiddenError(
            "a request that changes something must come from a page of this service; programs use the API"
        )


OwnPage = Depends(_own_page)
"""The dependency of every route that takes a form."""


def page(request: Request, template: str, *, status: int = 200, **content: object) -> HTMLResponse:
    """Renders a template with its content, and with the parts of every page: the caller, the address, the time."""
    caller: Identity = request.scope.get(KEY, LOCAL)
    shared = {
        "caller": caller,
        "address": address_of(request),
        "pages": PAGES,
        "base": base_of(request.scope),
        "origin": origin_of(request),
        "now": request.app.state.context.now(),
    }
    text = templates.get_template(template).render(**shared, **content)
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": REFERRER}
    return HTMLResponse(text, status, headers=headers)
