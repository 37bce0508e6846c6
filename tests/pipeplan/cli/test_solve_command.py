"""`pipeplan solve --planner exact`: several profiles, cuts, and what stands on which output."""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from pipeplan.cli.solve import sentence
from pipeplan.planners.problem import SearchProgress
from tests.pipeplan.builders import Cell
from tests.pipeplan.cli.commands import pipeplan, write
from tests.pipeplan.planners.exact.mixed import Gpu, mixed_problem


def test_a_profile_for_each_type_of_device_makes_a_plan(tmp_path: Path) -> None:
    problem = mixed_problem([Cell()] * 6, [Gpu(name="fast"), Gpu(name="slow", slowness=2.0)])
    profiles = [
        write(tmp_path / f"{profile.device.name}.json", asdict(profile))
        for profile in (problem.profile, *problem.other_profiles)
    ]
    cluster = write(
        tmp_path / "cluster.json",
        {
            "groups": [{"device": {"name": name, "memory_bytes": 10**15}, "count": 1} for name in ("fast", "slow")],
            "levels": [{"size": 2, "bandwidth_bytes_per_s": 1e9}],
        },
    )
    asked = ["--cluster", cluster, "--planner", "exact", "--batch-size", 8, "--stages", 2, "--json"]
    both = [argument for profile in profiles for argument in ("--profile", profile)]
    done = pipeplan("solve", *both, *map(str, asked))
    assert done.status == 0
    assert done.err == ""
    assert [stage["device"] for stage in done.document["stages"]] in (["fast", "slow"], ["slow", "fast"])
    assert done.document["certificate"]["method"] == "best bound first"
    published = pipeplan("solve", *both, *map(str, asked), "--semantics", "paper")
    assert published.document["certificate"]["method"] == "recurrence over devices"
    missing = pipeplan("solve", "--profile", profiles[0], *map(str, asked))
    assert missing.status == 2
    assert "must be one profile for each type of device, fast, slow" in missing.err


@pytest.mark.campaign
def test_or_tools_is_imported_by_the_planner_that_needs_it_only() -> None:
    loaded = "import sys, pipeplan.cli.app; raise SystemExit('ortools' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0


def test_progress_is_a_sentence() -> None:
    progress = SearchProgress(best_s=0.5, bound_s=0.25, open_shapes=3, spent=1.25, limit=20.0)
    assert sentence(progress) == "best 2 samples/s, no plan beyond 4; 3 combinations open, 1.2 of 20 s"
    before = SearchProgress(best_s=None, bound_s=0.0, open_shapes=3, spent=0.0, limit=20.0)
    assert sentence(before) == "best none yet; 3 combinations open, 0.0 of 20 s"
