"""The pages that are made of the code: `python -m tests.house.pages` writes them anew.

docs/cli.md of the commands, docs/decisions/README.md of the decisions, and docs/figures of the commands on the pages of
`FIGURED`.
"""

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeplan.cli.reference import written
from tests.pipeplan.cli.commands import pipeplan

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DECISIONS = DOCS / "decisions"
GENERATED = ("cli.md", "client.md")
"""Pages that are made of code: their code blocks are signatures and usages."""

FIGURED = ("concepts.md", "cost-model.md")
"""Pages with figures that the simulator draws."""

INDEX = """# Decisions

What was hard to decide and still stands, a page each: context, decision, consequences, alternatives. At most 40 pages:
a new one replaces or extends those that it changes. Numbers are never given twice; a missing number was folded into
another page, or no longer stands. `python -m tests.house.pages` writes this list.

| | |
|---|---|
{rows}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """A fenced block of a page."""

    page: str
    language: str
    text: str

    @property
    def commands(self) -> tuple[str, ...]:
        """The lines of a shell's block, without comments; a line that ends in a backslash goes on."""
        joined = self.text.replace("\\\n", " ")
        split = (shlex.split(line, comments=True) for line in joined.splitlines())
        return tuple(shlex.join(words) for words in split if words)


def pages() -> list[Path]:
    """README and everything in docs/ but the decisions."""
    return [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def fences(path: Path) -> Iterator[Fence]:
    """The fenced blocks of a page, in order."""
    text = path.read_text(encoding="utf-8")
    pattern = r"^( *)```([a-z]*)\n(.*?)^\1```$"
    for indent, language, body in re.findall(pattern, text, flags=re.MULTILINE | re.DOTALL):
        lines = "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))
        yield Fence(page=path.name, language=language, text=lines)


def index() -> str:
    """docs/decisions/README.md."""
    titles = {}
    for path in sorted(DECISIONS.glob("[0-9]*.md")):
        number, _, title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").partition(": ")
        titles[number] = f"| [{number}]({path.name}) | {title} |"
    return INDEX.format(rows="\n".join(titles.values()))


def figures() -> dict[str, str]:
    """Every figure, and the command that draws it."""
    commands = [command for page in FIGURED for fence in fences(DOCS / page) for command in fence.commands]
    return {shlex.split(command)[-1]: command for command in commands if "--svg" in command}


if __name__ == "__main__":
    os.chdir(ROOT)
    (DOCS / "cli.md").write_text(written(), encoding="utf-8")
    (DECISIONS / "README.md").write_text(index(), encoding="utf-8")
    (DOCS / "figures").mkdir(exist_ok=True)
    for figure in figures().values():
        ended = pipeplan(*shlex.split(figure)[1:])
        if ended.status:
            raise SystemExit(ended.err)
