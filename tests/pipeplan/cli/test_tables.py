"""Tables on a terminal: what a cell holds is shown, never obeyed."""

import io

from rich.console import Console

from pipeplan.cli.console import printable, table_of


def test_characters_that_a_terminal_obeys_are_escaped() -> None:
    text = io.StringIO()
    hostile = "gpt\x1b[2J\x07\u202e2\u2028"
    Console(file=text, width=120, markup=False).print(table_of(("Model", "Batch"), [(hostile, "[red]8[/]")]))
    shown = text.getvalue()
    assert all(char.isprintable() for char in shown.replace("\n", ""))
    assert r"gpt\x1b[2J\x07\u202e2\u2028" in shown and "[red]8[/]" in shown


def test_a_text_keeps_its_lines_and_shows_what_a_terminal_would_obey() -> None:
    assert printable("a\n\x1b[2J\u202eb\r") == "a\n\\x1b[2J\\u202eb\\r"
