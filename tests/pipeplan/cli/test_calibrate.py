"""`pipeplan calibrate`, and what `solve` makes of its calibration."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pipeplan.calibration.samples import MeasuredRun
from pipeplan.documents.calibration import Calibration
from pipeplan.documents.files import dump, plan_document, read
from pipeplan.documents.identity import content_id
from pipeplan.programs.timeline_document import timeline_document
from tests.pipeplan.calibration.measured import CLUSTER, PROFILE, executed, network, plan_for, scaled
from tests.pipeplan.cli.commands import pipeplan

HIDDEN = (scaled((1.3,) * 6, (0.8,) * 6, instruction_s=3e-4), network(5e5, 3e-4))


def write_run(folder: Path, run: MeasuredRun, *, on_gpus: bool = False) -> Path:
    """What `pipeplan-agent run` leaves."""
    folder.mkdir()
    ranks = [
        {
            "rank": lane.rank,
            "stage": lane.stage,
            "replica": lane.replica,
            "peak_memory_bytes": lane.peak_memory_bytes,
            "peak_resident_bytes": lane.peak_memory_bytes + 2**20,
        }
        | ({"device_memory": on_a_gpu(lane.peak_memory_bytes)} if on_gpus else {})
        for lane in run.timeline.lanes
    ]
    (folder / "plan.json").write_text(dump(plan_document(run.plan)))
    (folder / "timeline.json").write_text(dump(timeline_document(run.timeline)))
    (folder / "run.json").write_text(json.dumps({"plan_id": content_id(run.plan), "ranks": ranks}))
    return folder


def on_a_gpu(tensor_bytes: int) -> dict[str, int]:
    """What a process took that kept a quarter of its allocator's memory in reserve."""
    return {"allocated_bytes": tensor_bytes, "reserved_bytes": 4 * tensor_bytes // 3, "context_bytes": 2**19}


@pytest.fixture
def files(tmp_path: Path) -> tuple[str | Path, ...]:
    (tmp_path / "P.json").write_text(dump(asdict(PROFILE)))
    (tmp_path / "C.json").write_text(dump(asdict(CLUSTER)))
    return ("--profile", tmp_path / "P.json", "--cluster", tmp_path / "C.json")


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str | Path, ...]:
    shapes = (("gpipe", (2, 4, 6), 1), ("1f1b", (3, 6), 1))
    folders = [
        write_run(tmp_path / schedule, executed(plan_for(schedule, stops, replicas), HIDDEN))
        for schedule, stops, replicas in shapes
    ]
    return ("--run", folders[0], "--run", folders[1])


def test_of_gpus_the_devices_memory_is_shown_and_not_the_hosts(tmp_path: Path, files: tuple[str | Path, ...]) -> None:
    folder = write_run(tmp_path / "run", executed(plan_for("1f1b", (3, 6), 1), HIDDEN), on_gpus=True)
    ended = pipeplan("calibrate", *files, "--run", folder)
    assert ended.status == 0
    assert re.search(r"beside the tensors +0 B +512 KiB", ended.out)
    assert re.search(r"allocator's reserve +0 +0.25", ended.out)


def test_terms_and_errors_before_and_after_are_shown(
    files: tuple[str | Path, ...], runs: tuple[str | Path, ...]
) -> None:
    ended = pipeplan("calibrate", *files, *runs)
    assert ended.status == 0
    cells = [re.split(r" {2,}", line.strip()) for line in ended.out.splitlines()]
    rows = {name: tuple(values) for name, *values in cells}
    assert rows["forward, by block"][:2] == ("1", "1.300 to 1.300")
    assert rows["µs an instruction"][:2] == ("100", "300")
    assert rows["network level 0"][:2] == ("0.001 GB/s, 100 µs", "0.0005 GB/s, 300 µs")
    assert rows["beside the tensors"][:2] == ("0 B", "1 MiB")
    assert rows["gpipe"][-2:] == ("-1.8 %", "-0.0 %")
    assert rows["1f1b"][-2:] == ("-2.5 %", "-0.0 %")


def test_a_calibration_is_one_document_in_the_file_and_on_standard_output(
    files: tuple[str | Path, ...], runs: tuple[str | Path, ...], tmp_path: Path
) -> None:
    ended = pipeplan("calibrate", *files, *runs, "--json", "-o", tmp_path / "CAL.json")
    assert ended.status == 0
    assert ended.document == json.loads((tmp_path / "CAL.json").read_text())
    again = pipeplan("calibrate", *files, *runs[2:], *runs[:2], "--json")
    assert again.out == ended.out


def test_a_plan_says_which_calibration_it_used_and_keeps_the_originals_ids(
    files: tuple[str | Path, ...], runs: tuple[str | Path, ...], tmp_path: Path
) -> None:
    pipeplan("calibrate", *files, *runs, "-o", tmp_path / "CAL.json")
    asked: tuple[Any, ...] = ("solve", *files, "--planner", "pipedream-2bw", "--batch-size", "4", "--json")
    plain = pipeplan(*asked).document
    corrected = pipeplan(*asked, "--calibration", tmp_path / "CAL.json").document
    assert corrected["calibration_id"] == content_id(read(Calibration, tmp_path / "CAL.json"))
    assert plain["calibration_id"] is None
    for field in ("profile_id", "cluster_id", "model", "batch_size"):
        assert corrected[field] == plain[field]
    assert corrected["costs"] != plain["costs"]
    assert corrected["costs"][0]["instruction_s"] == pytest.approx(3e-4)


def test_a_run_of_another_profile_is_refused(
    files: tuple[str | Path, ...], runs: tuple[str | Path, ...], tmp_path: Path
) -> None:
    (tmp_path / "P.json").write_text(dump(asdict(HIDDEN[0])))
    ended = pipeplan("calibrate", *files, *runs)
    assert (ended.status, ended.out) == (2, "")
    assert "runs.0.plan.profile_id: must be the profile's" in ended.err


def test_a_folder_without_a_run_is_refused_by_the_file_that_is_missing(
    files: tuple[str | Path, ...], tmp_path: Path
) -> None:
    ended = pipeplan("calibrate", *files, "--run", tmp_path)
    assert (ended.status, ended.out) == (2, "")
    assert "there is no plan.json, got '" in ended.err


def test_a_report_that_is_none_is_refused(files: tuple[str | Path, ...], runs: tuple[str | Path, ...]) -> None:
    Path(runs[1], "run.json").write_text("[]")
    ended = pipeplan("calibrate", *files, *runs)
    assert ended.status == 2
    assert "run.json: must be the report of a run" in ended.err


def test_a_calibration_for_another_device_is_refused(
    files: tuple[str | Path, ...], runs: tuple[str | Path, ...], tmp_path: Path
) -> None:
    pipeplan("calibrate", *files, *runs, "-o", tmp_path / "CAL.json")
    document = json.loads((tmp_path / "CAL.json").read_text()) | {"device": "another"}
    (tmp_path / "CAL.json").write_text(json.dumps(document))
    ended = pipeplan("solve", *files, "--planner", "gpipe", "--batch-size", "4", "--calibration", tmp_path / "CAL.json")
    assert ended.status == 2
    assert "calibration.device: must be the profile's" in ended.err
