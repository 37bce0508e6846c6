"""docs/security.md keeps its word: the tests that it names are there, and no text becomes code anywhere."""

import ast
import re
from pathlib import Path

from pipeplan.protocol.tokens import DAY_S, DEFAULT_LIFE_S
from planner_service.access.auth import KNOWN_FOR_S
from planner_service.access.service import SESSION_S
from planner_service.platform.connections import HEAD_BYTES, HEAD_S, MAX_PIPELINED, OTHER_CONNECTIONS, UNREAD_BODY_S
from planner_service.platform.middleware import MAX_HEADER_BYTES, MAX_HEADERS, MAX_PARAMETERS, MAX_TARGET_BYTES
from planner_service.platform.settings import Settings

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")

EVALUATING = {"eval", "exec", "compile", "__import__"}
"""Functions that make code of texts."""

RUNNING = {
    ("os", "system"),
    ("os", "popen"),
    ("yaml", "load"),
    ("marshal", "loads"),
    ("pickle", "loads"),
    ("torch", "load"),
}
"""Functions of modules that do, or may."""

OWN_PROCESSES = {
    "planner_service/platform/processes/child.py",
    "planner_service/platform/processes/pool.py",
    "worker_agent/engine/channel.py",
}
"""Where processes of ours exchange pickles with each other: the last lines of docs/security.md."""


def test_every_test_that_the_table_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", DOCUMENT))
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    defined = {name for source in sources for name in re.findall(r"^def (test_\w+)\(", source, re.MULTILINE)}
    assert len(named) > 50
    assert named <= defined, sorted(named - defined)


def test_every_threat_has_what_stops_it_and_a_test() -> None:
    table = DOCUMENT.partition("## Threats")[2]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ") and "threat |" not in line]
    assert len(rows) >= 20
    assert all(len(row) == 3 and row[1].strip() and "`test_" in row[2] for row in rows)


def test_the_numbers_are_those_of_the_program() -> None:
    settings = Settings()
    assert f"for {KNOWN_FOR_S:g} seconds" in DOCUMENT
    assert f"after {DEFAULT_LIFE_S // DAY_S} days" in DOCUMENT
    assert f"at most {SESSION_S // 3600} hours" in DOCUMENT
    assert f"| {settings.failed_tokens_per_min:g} | an address's tokens" in DOCUMENT
    assert f"| {settings.body_timeout_s:g} | for a body" in DOCUMENT
    assert f"| {HEAD_BYTES // 1024} KiB, {HEAD_S:g} s | for a request's head" in DOCUMENT
    assert f"| {HEAD_BYTES // 1024} KiB | between two bytes of a body" in DOCUMENT
    connections = settings.event_streams + OTHER_CONNECTIONS
    assert f"| `PIPEPLAN_EVENT_STREAMS` + {OTHER_CONNECTIONS} | {connections} | connections" in DOCUMENT
    assert f"| {MAX_PIPELINED} | requests that wait" in DOCUMENT
    assert f"| {UNREAD_BODY_S:g} s | for the rest of a body" in DOCUMENT
    sizes = f"{MAX_HEADERS} headers of {MAX_HEADER_BYTES // 1024} KiB together (431), an address of"
    assert f"{sizes} {MAX_TARGET_BYTES // 1024} KiB (414) with {MAX_PARAMETERS} parameters (422)" in DOCUMENT


def test_nothing_makes_code_out_of_texts() -> None:
    """Neither the service nor an agent evaluates, unpickles or hands to a shell what others send."""
    found = []
    for package in ("pipeplan", "planner_service", "worker_agent"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            calls = [
                node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
            ]
            found += [f"{name}:{call.lineno}" for call in calls if _is_dangerous(call, name)]
    assert found == []


def _is_dangerous(call: ast.Call, name: str) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id in EVALUATING
    if any(keyword.arg == "shell" and getattr(keyword.value, "value", True) for keyword in call.keywords):
        return True
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        called = (call.func.value.id, call.func.attr)
        return called in RUNNING | {("pickle", "load")} and not (called[0] == "pickle" and name in OWN_PROCESSES)
    return False
