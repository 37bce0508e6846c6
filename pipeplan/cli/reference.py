"""Reference: docs/cli.md, from the commands themselves: `python -m pipeplan.cli.reference > docs/cli.md`.

Both commands are found through the package's metadata: the library does not import the worker.
"""

import re
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from typing import Any

from typer.main import get_command

from pipeplan.cli.app import build_app

_OPENING = """# The commands

<!-- Written by `python -m pipeplan.cli.reference > docs/cli.md`: edit the commands' docstrings and help texts. -->

`pipeplan` plans, and asks a service. `pipeplan-agent` measures and runs on a node. With `--json` a command prints one
JSON document on standard output; logs and progress go to standard error. [Exit statuses](ci.md#exit-statuses) are the
same for all commands. Terms: [glossary](glossary.md).
"""


def written() -> str:
    """The whole reference."""
    parts = [_OPENING]
    apps = {"pipeplan": build_app()}
    for entry in distribution("pipeplan").entry_points:
        if entry.group == "console_scripts" and entry.name == "pipeplan-agent":
            entry.load()
            apps[entry.name] = sys.modules[entry.module].app
    for name, app in apps.items():
        root = get_command(app)
        commands = list(_commands(name, root, root.make_context(name, [], resilient_parsing=True)))
        parts.append(f"## {name}\n\n{_help(root)}\n")
        heads = [(path, _help(command).partition("\n")[0]) for path, command, _ in commands]
        parts.append("\n".join(f"- [`{path}`](#{path.replace(' ', '-')}): {head}" for path, head in heads))
        parts.append("")
        parts += [_section(path, command, context) for path, command, context in commands]
    return "\n".join(parts)


def _commands(path: str, group: Any, context: Any) -> Iterator[tuple[str, Any, Any]]:
    """Every command that runs something, with its full name and the context of its help."""
    for name, command in group.commands.items():
        within = command.make_context(name, [], parent=context, resilient_parsing=True)
        if hasattr(command, "commands"):
            yield from _commands(f"{path} {name}", command, within)
        else:
            yield f"{path} {name}", command, within


def _section(path: str, command: Any, context: Any) -> str:
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"### {path}\n\n```text\n{path} {usage}\n```\n\n{_help(command)}\n"]
    records = (one.get_help_record(context) for one in command.params)
    shown = [(names, says) for names, says in filter(None, records) if names != "--help"]
    if shown:
        rows = (f"| `{_cell(names)}` | {_cell(says)} |" for names, says in shown)
        lines.append("| option | |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(lines)


def _help(command: Any) -> str:
    return str(command.help or "").partition("\f")[0].strip()


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


if __name__ == "__main__":
    sys.stdout.write(written())
