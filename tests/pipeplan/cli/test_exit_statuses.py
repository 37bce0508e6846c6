"""One table of exit statuses: what errors end with, what --help says, and what the docs say."""

import re
from pathlib import Path

import pytest

from pipeplan.cli.console import EPILOG, MEANINGS, STATUSES
from tests.pipeplan.cli.commands import pipeplan


def test_the_docs_table_is_todays() -> None:
    page = (Path(__file__).parents[3] / "docs" / "ci.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert {int(status): meaning for status, meaning in rows} == MEANINGS


def test_every_error_has_a_status_that_is_described() -> None:
    assert set(STATUSES.values()) <= set(MEANINGS)


@pytest.mark.parametrize("status", sorted(MEANINGS))
def test_help_names_every_status(status: int) -> None:
    shown = " ".join(pipeplan("--help").out.split())
    assert f"{status} {MEANINGS[status].partition(':')[0]}" in shown
    assert EPILOG.startswith("Exit status: 0 done")
