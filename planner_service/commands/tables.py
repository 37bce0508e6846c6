"""A table in the terminal, wide enough for a pipe where there is no terminal."""

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 200


def show_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """On standard output; what the cells hold is not markup."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)
