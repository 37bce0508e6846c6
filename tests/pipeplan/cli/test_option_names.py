"""Errors of the command line name the option as it is typed, and a file's field by its own name."""

import json
from pathlib import Path

import pytest
import typer.main

from pipeplan.cli.app import build_app
from tests.pipeplan.cli.commands import Ended, cluster_document, pipeplan, profile_document, write

ALWAYS = {"--planner": "gpipe", "--batch-size": "8"}

WRONG: dict[str, tuple[str, ...]] = {
    "--cluster": ("missing.json",),
    "--batch-size": ("0",),
    "--profile": ("missing.json",),
    "--model": ("nonsense",),
    "--sequence-length": ("64",),
    "--dtype": ("bfloat16",),
    "--precision": ("int8", "--model", "hf:gpt2"),
    "--no-cache": (),
    "--planner": ("magic",),
    "--calibration": ("missing.json",),
    "--output": ("missing/plan.json",),
    "--microbatch-size": ("0",),
    "--schedule": ("zigzag",),
    "--stages": ("9",),
    "--chunks": ("0",),
    "--no-recompute": ("--planner", "pipedream"),
    "--recompute-unit": ("layer",),
    "--synchronisation": ("never",),
    "--synchronous": ("--schedule", "pipedream"),
    "--memory": ("magic",),
    "--optimizer": ("adma",),
    "--recompute-factor": ("nan",),
    "--safe-batch": ("--planner", "pipedream"),
    "--semantics": ("fast",),
    "--compression-ratio": ("0",),
    "--straight": (),
    "--fewer-machines": (),
    "--cuts": ("some",),
    "--force-cut": ("0",),
    "--forbid-cut": ("-1",),
    "--two-bp": (),
    "--two-bp-half-way": (),
    "--engine": ("torch",),
    "--tensor": ("0",),
    "--context": ("0",),
    "--expert": ("0",),
    "--expert-tensor": ("2",),
    "--data": ("0",),
    "--sharding": ("some",),
    "--offload": ("all",),
    "--replicate": ("0",),
    "--graphs": (),
    "--a2a-overlap": (),
    "--offload-share": ("0",),
    "--time-limit-s": ("-1",),
}
"""By option, a wrong value, or a right one with other options that it contradicts."""

NEVER_WRONG = {"--json", "--explain", "--as-if", "--help", "--master-weights", "--sequence-parallel"}


def _solve(folder: Path, option: str, *values: str, profile: str | None = None) -> Ended:
    given = ALWAYS | {"--cluster": str(write(folder / "cluster.json", cluster_document()))}
    if "--model" not in (option, *values):
        given["--profile"] = profile or str(write(folder / "profile.json", profile_document(4)))
    rest = [word for name, value in given.items() if name != option for word in (name, value)]
    return pipeplan("solve", *rest, option, *values)


@pytest.mark.parametrize("option", WRONG)
def test_a_wrong_option_of_solve_is_named_as_it_is_typed(option: str, tmp_path: Path) -> None:
    ended = _solve(tmp_path, option, *WRONG[option])
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith(f"error: {option}: "), ended.err


def test_every_option_of_solve_is_tried() -> None:
    command = typer.main.get_command(build_app("solve")).commands["solve"]  # type: ignore[attr-defined]
    for parameter in command.params:
        names = {*parameter.opts, *parameter.secondary_opts}
        assert names & (WRONG.keys() | NEVER_WRONG), names


def test_a_files_field_keeps_its_name_though_an_option_has_it_too(tmp_path: Path) -> None:
    for field, value in (("dtype", "int8"), ("memory", "all")):
        profile = tmp_path / "wrong.json"
        profile.write_text(json.dumps(profile_document(4) | {field: value}))
        ended = _solve(tmp_path, "--batch-size", "8", profile=str(profile))
        assert ended.err.startswith(f"error: {profile}: {field}: "), ended.err


def test_commands_of_a_service_name_their_options_too() -> None:
    ended = pipeplan("plan", "list", "--sort", "speed", "--url", "http://127.0.0.1:9")
    assert ended.status == 2 and ended.err.startswith("error: --sort: ")
