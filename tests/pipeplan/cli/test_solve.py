"""`pipeplan solve`: one document on standard output, and exit statuses that scripts rely on."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan.documents.files import parse_plan
from tests.pipeplan.cli.commands import Ended, cluster_document, pipeplan, pipeplan_process, profile_document, write


def solve(folder: Path, *arguments: str, devices: int = 2, memory_bytes: int = 10**9, blocks: int = 2) -> Ended:
    profile = write(folder / "profile.json", profile_document(blocks))
    cluster = write(folder / "cluster.json", cluster_document(devices, memory_bytes))
    return pipeplan("solve", "--profile", profile, "--cluster", cluster, *arguments)


def test_json_is_one_document_with_all_that_scripts_read(tmp_path: Path) -> None:
    ended = solve(tmp_path, "--planner", "pipedream-2bw", "--batch-size", "8", "--json")
    assert (ended.status, ended.err) == (0, "")
    document = ended.document
    assert document["planner"] == "pipedream-2bw"
    assert document["feasible"] is True
    assert document.keys() >= {
        "stages",
        "depth",
        "width",
        "microbatch_size",
        "microbatches",
        "schedule",
        "time_per_microbatch_s",
        "throughput_samples_per_s",
        "bubble_fraction",
        "optimal_in_flight",
        "alternatives",
        "solve_time_s",
    }
    assert document["stages"][0].keys() >= {"start", "stop", "replicas", "recompute", "time_s", "memory_bytes"}


def test_the_written_document_is_the_printed_one_and_a_plan(tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    ended = solve(
        tmp_path, "--planner", "gpipe", "--batch-size", "8", "--microbatch-size", "1", "--json", "-o", str(output)
    )
    assert ended.out == output.read_text(encoding="utf-8")
    assert parse_plan(ended.out).schedule == "gpipe"


def test_without_json_tables_and_a_picture_are_shown(tmp_path: Path) -> None:
    ended = solve(
        tmp_path,
        "--planner", "pipedream-2bw", "--schedule", "1f1b", "--no-recompute", "--batch-size", "8",
    )  # fmt: skip
    assert ended.status == 0
    for text in ("samples/s", "Stage", "closed form: ", "played over 3 batches", "not played: at most", "stage 0  F1"):
        assert text in ended.out


def test_the_unit_of_recomputation_is_asked_for_and_shown(tmp_path: Path) -> None:
    asked = ("--planner", "pipedream-2bw", "--stages", "1", "--recompute", "--batch-size", "8", "--recompute-unit")
    for unit, shown in (("block", "by block"), ("stage", "yes")):
        output = tmp_path / f"{unit}.json"
        document = solve(tmp_path, *asked, unit, "--json", "-o", str(output), blocks=3).document
        assert {stage.get("recompute_unit", "stage") for stage in document["stages"]} == {unit}
        assert {stage.recompute_unit for stage in parse_plan(output.read_text(encoding="utf-8")).stages} == {unit}
        lines = solve(tmp_path, *asked, unit, blocks=3).out.splitlines()
        row = next(line for line in lines if line.startswith("0      0-2"))
        assert f" {shown} " in row
        files = ("--profile", str(tmp_path / "profile.json"), "--cluster", str(tmp_path / "cluster.json"))
        checked = pipeplan("check", str(output), *files, *asked[2:], unit)
        assert (checked.status, "proven" in checked.out) == (0, True)


def test_the_price_is_the_played_one_and_the_closed_forms_figures_stand_beside_it(tmp_path: Path) -> None:
    asked = ("--planner", "pipedream-2bw", "--schedule", "1f1b", "--no-recompute", "--batch-size", "8")
    document = solve(tmp_path, *asked, "--json").document
    simulated, form = document["simulated"], document["closed_form"]
    assert form.keys() == {"cost_model", "time_per_microbatch_s", "throughput_samples_per_s", "bubble_fraction"}
    assert form["cost_model"] == document["cost_model"]
    for name in ("throughput_samples_per_s", "bubble_fraction"):
        assert document[name] == simulated[name]
    seconds = form["time_per_microbatch_s"] * form["throughput_samples_per_s"] / simulated["throughput_samples_per_s"]
    assert document["time_per_microbatch_s"] == seconds
    assert simulated["throughput_samples_per_s"] != form["throughput_samples_per_s"]

    played, closed_form = (f"{of['throughput_samples_per_s']:,.4g} samples/s, bubble " for of in (simulated, form))
    line = solve(tmp_path, *asked).out.splitlines()[1]
    assert line.startswith(played)
    assert f"; closed form: {closed_form}" in line
    published = solve(tmp_path, *asked, "--semantics", "paper", "--json").document
    for other in published["alternatives"]:
        assert other["throughput_samples_per_s"] is None
    assert any(other["closed_form_samples_per_s"] for other in published["alternatives"])
    assert all(other.get("closed_form_samples_per_s") is None for other in document["alternatives"])


def test_times_too_short_to_divide_by_are_refused(tmp_path: Path) -> None:
    """A throughput of infinity ended in a traceback."""
    document = profile_document()
    for block in document["blocks"]:
        for measured in block["measurements"]:
            measured |= {"forward_s": 1e-320, "backward_s": 0}
    profile = write(tmp_path / "profile.json", document)
    cluster = write(tmp_path / "cluster.json", cluster_document())
    asked = ("--planner", "pipedream-2bw", "--batch-size", "8", "--json")
    ended = pipeplan("solve", "--profile", profile, "--cluster", cluster, *asked)
    assert (ended.status, ended.out) == (2, "")
    assert "profile.blocks: must take some time together" in ended.err


def test_memory_below_a_gibibyte_is_shown_in_smaller_units(tmp_path: Path) -> None:
    asked = ("--planner", "gpipe", "--batch-size", "8", "--microbatch-size", "1")
    profile = write(tmp_path / "profile.json", profile_document(2, weight_bytes=5 * 2**20))
    cluster = write(tmp_path / "cluster.json", cluster_document())
    ended = pipeplan("solve", "--profile", profile, "--cluster", cluster, *asked)
    # Weights and gradients of 5 MiB each, and a few bytes of activations. Stages that are alike share a row.
    assert ended.out.count("10 MiB") == 2
    assert "0-1" in ended.out
    assert "GiB" not in ended.out


def test_an_infeasible_problem_exits_3_with_stage_and_bytes_in_document_and_words(tmp_path: Path) -> None:
    ended = solve(
        tmp_path, "--planner", "pipedream", "--batch-size", "2", "--microbatch-size", "1", "--json", memory_bytes=3000
    )
    assert ended.status == 3
    document = ended.document
    assert document["feasible"] is False
    # Two stages, the first with two minibatches: 2 versions of 1000 bytes, 2 x 50 of activations, and gradients of
    # 1000 in place of 50, and five messages of 10 under way.
    assert (document["reasons"][0]["stage"], document["reasons"][0]["missing_bytes"]) == (0, 50 + 5 * 10)
    assert "stage 0 misses 100 B" in ended.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--planner", "magic", "--batch-size", "8"), "--planner: must be one of pipedream"),
        (("--planner", "gpipe", "--batch-size", "8", "--force-cut", "0"), "--force-cut: must be a whole number of"),
        (("--planner", "gpip", "--batch-size", "8"), "gpipe, exact, auto (near: gpipe), got 'gpip'"),
        (("--planner", "gpipe", "--batch-size", "8", "--optimizer", "adma"), "adamw (near: adam, adamw), got 'adma'"),
        (("--planner", "gpipe", "--batch-size", "8", "--schedule", "1fb1"), "(near: 1f1b), got '1fb1'"),
        (("--planner", "gpipe", "--batch-size", "0"), "--batch-size: must be a whole number of at least 1, got 0"),
        (("--planner", "gpipe", "--batch-size", "-4"), "--batch-size: must be a whole number of at least 1, got -4"),
        (
            ("--planner", "gpipe", "--batch-size", "1" + 400 * "0"),
            "--batch-size: must be at most 9223372036854775807, got",
        ),
        (
            ("--planner", "gpipe", "--batch-size", "8", "--stages", "9"),
            "--stages: must not exceed the number of blocks",
        ),
        (("--planner", "pipedream", "--batch-size", "8"), "--microbatch-size"),
        (("--planner", "pipedream-2bw", "--batch-size", "7", "--microbatch-size", "2"), "--batch-size: must be a mult"),
        (("--planner", "gpipe", "--batch-size", "8", "--recompute-factor", "nan"), "--recompute-factor: must be a fin"),
        (("--planner", "gpipe", "--batch-size", "8", "--recompute-unit", "layer"), "--recompute-unit: must be one of"),
        (
            ("--planner", "gpipe", "--batch-size", "8", "--recompute-unit", "block", "--memory", "paper"),
            "--recompute-unit: must be stage with memory paper",
        ),
        (("--planner", "gpipe", "--batch-size", "8", "--memory", "magic"), "--memory: must be one of training, paper"),
    ],
)
def test_wrong_input_exits_2_with_one_sentence(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    ended = solve(tmp_path, *arguments)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert message in ended.err


def test_a_file_that_is_wrong_is_named_with_the_field(tmp_path: Path) -> None:
    profile = write(tmp_path / "profile.json", profile_document(2, colour="red"))
    cluster = write(tmp_path / "cluster.json", cluster_document())
    ended = pipeplan("solve", "--profile", profile, "--cluster", cluster, "--planner", "gpipe", "--batch-size", "2")
    assert ended.status == 2
    assert f"{profile}: blocks.0.colour: is not a known key" in ended.err
    missing = pipeplan(
        "solve", "--profile", tmp_path / "none.json", "--cluster", cluster, "--planner", "gpipe", "--batch-size", "2"
    )
    assert missing.status == 2
    assert "must be a file that can be read" in missing.err


def test_the_installed_command_ends_as_the_application_does(tmp_path: Path) -> None:
    profile = write(tmp_path / "profile.json", profile_document())
    small = write(tmp_path / "small.json", cluster_document(memory_bytes=10))
    asked = ("--planner", "gpipe", "--batch-size", "2", "--json")
    infeasible = pipeplan_process("solve", "--profile", profile, "--cluster", small, *asked)
    assert infeasible.status == 3
    assert infeasible.document["feasible"] is False
    wrong = pipeplan_process("solve", "--profile", profile, "--cluster", profile, *asked)
    assert (wrong.status, wrong.out) == (2, "")
    assert wrong.err.startswith("error: ")
    assert "Traceback" not in wrong.err


def test_the_command_line_does_not_load_what_planning_does_not_need() -> None:
    """Start-up: torch, the service's stack and rich are loaded by those who use them."""
    heavy = ("torch", "fastapi", "sqlalchemy", "uvicorn", "transformers")
    script = f"import sys, pipeplan.cli.app; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
