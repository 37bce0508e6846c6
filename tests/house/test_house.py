"""The house as a whole: how its rooms are cut, and what the front door loads."""

import ast
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pipeplan

ROOT = Path(__file__).parents[2]
PACKAGES = ("pipeplan", "planner_service", "worker_agent")


@cache
def modules() -> dict[Path, ast.Module]:
    """Every module of ours, read."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.as_posix())
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_files_are_cut_no_finer_than_a_thought() -> None:
    lines = [len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in modules()]
    assert statistics.median(lines) >= 120
    assert max(lines) <= 420


def test_at_most_a_third_of_the_private_functions_is_called_once() -> None:
    """What is called once and names no idea belongs where it is called. What is handed on as a value needs its name."""
    private, once = 0, []
    for path, module in modules().items():
        uses: Counter[str] = Counter()
        calls = {node.func for node in ast.walk(module) if isinstance(node, ast.Call)}
        handed_on = set()
        for node in ast.walk(module):
            if isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                uses[name] += 1
                handed_on |= set() if node in calls else {name}
        for node in ast.walk(module):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_") and not node.name.startswith("__"):
                private += 1
                once += [f"{path}:{node.name}"] if uses[node.name] <= 1 and node.name not in handed_on else []
    assert len(once) <= private / 3, f"{len(once)} of {private}: {once}"


def in_a_process_of_its_own(program: str) -> str:
    """What a program prints that starts with nothing imported."""
    ended = subprocess.run((sys.executable, "-c", program), cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


HEAVY = "{'pydantic', 'httpx', 'typer', 'rich', 'ortools', 'torch', 'fastapi', 'sqlalchemy'} & set(sys.modules)"


def test_the_front_door_gives_every_name_and_loads_none_before_it_is_used() -> None:
    assert in_a_process_of_its_own(f"import sys, pipeplan; print({HEAVY} or 'nothing')") == "nothing"
    assert in_a_process_of_its_own("import sys, pipeplan; print('numpy' in sys.modules)") == "False"
    planning = "from pipeplan import Cluster, Plan, Profile, predict, simulate, solve"
    assert in_a_process_of_its_own(f"import sys; {planning}; print({HEAVY} or 'nothing')") == "nothing"
    for name in pipeplan.__all__:
        assert getattr(pipeplan, name).__name__ == name
    assert set(pipeplan.__all__) <= set(dir(pipeplan))


def test_the_front_door_has_no_other_names() -> None:
    program = "import pipeplan\ntry: pipeplan.Bogus\nexcept AttributeError as error: print(error)"
    assert in_a_process_of_its_own(program) == "module 'pipeplan' has no attribute 'Bogus'"
