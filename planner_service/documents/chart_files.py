"""Charts as files: CSV for spreadsheets, self-contained SVG. Pages make PNG of the SVG in the browser.

A chart's template extends `platform/chart.svg`, which adds the style sheet, the white ground and the legend.
"""

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fastapi import Request, Response

from planner_service.documents.caching import REVALIDATE, UNCHANGED, derived_tag, document_response
from planner_service.platform.pages import FOLDER, templates

Format = Literal["csv", "svg"]
Row: TypeAlias = tuple[str | int | float | None, ...]

STYLE = (FOLDER / "static" / "pipeplan.css").read_text(encoding="utf-8")
MEDIA_TYPES = {"csv": "text/csv", "svg": "image/svg+xml"}
LEGEND_WIDTH, LEGEND_ROW, LEGEND_CHIP, LEGEND_LETTER = 1160.0, 20.0, 38.0, 6.5
"""Sizes of a legend: its width, a row's height, the width of a colour and of its gap, a letter's width."""

FORMULAS = (
    *("=", "+", "-", "@", "'"),
    "\N{FULLWIDTH EQUALS SIGN}",
    "\N{FULLWIDTH PLUS SIGN}",
    "\N{FULLWIDTH HYPHEN-MINUS}",
    "\N{FULLWIDTH COMMERCIAL AT}",
)
"""The characters that begin a formula in a spreadsheet, and the apostrophe, which prevents one. A spreadsheet may drop
spaces before them, and some take full-width characters for the plain ones.
"""

CONTENT: dict[str, Any] = {media_type: {"schema": {"type": "string"}} for media_type in MEDIA_TYPES.values()}
ANSWERS: dict[int | str, dict[str, Any]] = UNCHANGED | {200: {"description": "The chart", "content": CONTENT}}
"""The OpenAPI description of routes of charts."""


def csv_text(rows: Iterable[Row]) -> str:
    """The rows as CSV. No text is a formula in a spreadsheet: one that begins like one has an apostrophe before it.

    So has one that begins with an apostrophe: without the first apostrophe of a cell, its text is what it was.
    """
    text = io.StringIO()
    for row in rows:
        opens_formula = [isinstance(cell, str) and cell.lstrip().startswith(FORMULAS) for cell in row]
        cells = (f"'{cell}" if opens else cell for cell, opens in zip(row, opens_formula, strict=True))
        csv.writer(text).writerow(cells)
    return text.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class LegendEntry:
    """A colour, by its class in the style sheet, and its meaning."""

    x: float
    y: float
    colour: str
    text: str


def svg_text(
    template: str, *, title: str, height: float, legend: Iterable[tuple[str, str]] = (), **content: object
) -> str:
    """The picture that the template draws, with a title for screen readers.

    `legend` has the class and the meaning of each colour; it is written below the chart.
    """
    entries = _placed(legend, height)
    height = max([height, *(entry.y + LEGEND_ROW for entry in entries)])
    made = templates.get_template(template)
    return made.render(style=STYLE, title=title, height=height, legend=entries, **content)


def legend_of_parts(kinds: Iterable[str]) -> tuple[tuple[str, str], ...]:
    return tuple((f"m-{kind}", kind.replace("-", " ")) for kind in kinds)


def _placed(legend: Iterable[tuple[str, str]], height: float) -> tuple[LegendEntry, ...]:
    """The entries in rows below a chart of this height, each row as long as the chart is wide."""
    x, y, placed = 0.0, height + 8, []
    for colour, text in legend:
        width = LEGEND_CHIP + LEGEND_LETTER * len(text)
        if x > 0 and x + width > LEGEND_WIDTH:
            x, y = 0.0, y + LEGEND_ROW
        placed.append(LegendEntry(x=x, y=y, colour=colour, text=text))
        x += width
    return tuple(placed)


def chart_response(
    request: Request, identity: str, kind: Format, name: str, make: Callable[[], str], *parameters: object
) -> Response:
    """The chart as a file of this name. Its entity tag includes `parameters`, on which the chart also depends."""
    tag = derived_tag(identity, name, kind, *parameters)
    response = document_response(request, tag, make, cache_control=REVALIDATE, media_type=MEDIA_TYPES[kind])
    response.headers["Content-Disposition"] = f'attachment; filename="{name}.{kind}"'
    return response
