"""The GPU check in its short form: every part runs or says why not, and nothing that a part does stops the others."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check.overhead import idle_share
from benchmarks.gpu_check.session import PARTS

TORCH_ALONE = Path(__file__).parent / "torch_alone"
PARTS_OF_OURS = "tests.benchmarks.parts"


def check(out: Path, *arguments: str, path: tuple[Path, ...] = ()) -> tuple[int, dict[str, Any], str]:
    """Exit status, the file's document, and what was printed."""
    root = str(Path.cwd())
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(out / "found.json"), "--short", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), root]), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    return done.returncode, json.loads((out / "found.json").read_text()), done.stdout + done.stderr


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The parts."""
    return {part["name"]: part for part in document["parts"]}


@pytest.mark.campaign
def test_every_part_runs_with_torch_numpy_and_safetensors_alone(tmp_path: Path) -> None:
    status, document, printed = check(tmp_path, path=(TORCH_ALONE,))
    assert status == 0, printed
    parts = by_name(document)
    assert list(parts) == [part.name for part in PARTS]
    assert all(part["status"] == "passed" and not part["failures"] for part in parts.values()), printed
    assert all(part["figures"] or part["left_out"] for part in parts.values())
    assert all(each["why"] for part in parts.values() for each in part["left_out"])
    assert document["passed"] is True
    assert document["versions"]["torch"]
    assert document["versions"]["optional"]["pydantic"] is None
    assert document["device"]["name"] == "CPU"
    require_figures(parts)


def require_figures(parts: dict[str, dict[str, Any]]) -> None:
    """What each part is there for."""
    assert parts["schedules"]["figures"]["1f1b resumed"]["resumed_difference"] == 0.0
    assert all(figures["difference"] < 1e-10 for figures in parts["schedules"]["figures"].values())
    assert [each["what"] for each in parts["nccl"]["left_out"]] == ["NCCL"]
    for model in ("gpt2", "llama"):
        assert "benchmarks.gpu_check.blocks" in parts[model]["figures"]["profile"]["model"]
        run = parts[model]["figures"]["run, chosen"]
        assert min(run[kind]["batch_s"] for kind in ("predicted", "measured", "estimated")) > 0
        assert run["memory_predicted_to_measured"] == pytest.approx(1, rel=0.05)
        assert run["measured"].keys() >= {"allocated_bytes", "reserved_bytes", "device_bytes"}
    constants = parts["constants"]["figures"]["datasheet constants"]
    assert min(constants["memory_bandwidth_bytes_per_s"], constants["launch_s"], *constants["flops_per_s"].values()) > 0
    rows = parts["constants"]["figures"]["kernels beside their estimates"]
    assert all(each["measured_s"] > 0 for kind in ("products", "attention") for each in rows[kind].values())
    executor = parts["executor"]["figures"]["tiny blocks, fused"]
    assert executor.keys() == {"executor", "by_hand", "added", "device", "by_hand_device"}
    assert 0 <= executor["device"]["idle_fraction"] <= 1
    assert parts["copies"]["figures"]["to the device"]["pageable 4096"]["bytes_per_s"] > 0
    assert parts["compile"]["figures"]["gpt2 layer"]["compiling_s"] > 0


@pytest.mark.campaign
def test_transformers_is_used_where_it_is_installed(tmp_path: Path) -> None:
    status, document, printed = check(tmp_path, "--only", "gpt2")
    assert status == 0, printed
    assert by_name(document)["gpt2"]["figures"]["profile"]["model"].startswith("hf:gpt2?")


def test_a_part_that_fails_is_reported_with_its_traceback_and_stops_no_other(tmp_path: Path) -> None:
    names = [f"{PARTS_OF_OURS}:{name}" for name in ("fails", "is_broken", "dies", "gives_no_number", "passes")]
    status, document, printed = check(tmp_path, "--only", *(word for name in names for word in ("--part", name)))
    assert status == 1
    assert document["passed"] is False
    parts = by_name(document)
    assert [parts[name]["status"] for name in names] == ["failed"] * 4 + ["passed"]
    failing, broken, dying, nameless, _ = (parts[name] for name in names)
    assert failing["figures"] == {"before": {"figure": 1.5}, "after": {"figure": 2.5}}
    assert failing["failures"][0]["case"] == "failing"
    assert "in fail\n" in failing["failures"][0]["traceback"]
    assert "ValueError: injected on purpose" in failing["failures"][0]["traceback"]
    assert "RuntimeError: broken on purpose" in broken["failures"][0]["traceback"]
    assert "SIGKILL" in dying["why"]
    assert dying["figures"] == {"before": {"figure": 1.5}}
    assert [each["what"] for each in dying["left_out"]] == ["dying", "after"]
    assert "ValueError" in nameless["failures"][0]["error"]
    assert "failing: FAILED, ValueError: injected on purpose" in printed


@pytest.mark.campaign
def test_a_part_that_hangs_is_cut_off_and_what_it_had_found_is_kept(tmp_path: Path) -> None:
    names = [f"{PARTS_OF_OURS}:{name}" for name in ("hangs", "passes")]
    words = [word for name in names for word in ("--part", name)]
    status, document, _ = check(tmp_path, "--seconds", "20", "--only", *words)
    assert status == 1
    hanging, passing = (by_name(document)[name] for name in names)
    assert hanging["status"] == "cut off"
    assert hanging["figures"] == {"before": {"figure": 1.5}}
    assert [each["what"] for each in hanging["left_out"]] == ["hanging", "after"]
    assert passing["status"] == "passed"


def test_idle_time_is_what_no_span_covers() -> None:
    """-- 0..2, 1..3 and 6..8, of eight: three are idle."""
    found = idle_share([(6.0, 8.0), (0.0, 2.0), (1.0, 3.0)])
    assert found["idle_fraction"] == pytest.approx(3 / 8)
    assert found["busy_s"] == pytest.approx(5e-6)
