"""Runs whose streams are repeated and whose middle is not recorded end bit for bit like those of whole streams."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeplan.calibration.samples import MeasuredRun
from pipeplan.documents.plan import Plan
from pipeplan.programs.repeating import Repeating
from pipeplan.programs.text import format_instruction
from pipeplan.simulation.predict import predict, program_of
from tests.schedules import STASHING, V_SHAPED
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import train, train_on_replicas
from tests.worker_agent.runtime.test_executor import DATA, MODEL, RATE, SEED, checkpoint_weights, distance
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.measured import RunMeasurements, compute_spread, last_batches, read_batches

STEPS = 20


def job_of(plan: Plan, out: Path, **options: Any) -> RunJob:
    """So many steps, of which the first and the last few are recorded, with checkpoints amid them."""
    job = RunJob(
        plan=plan,
        model=MODEL,
        data=DATA,
        steps=STEPS,
        seed=SEED,
        learning_rate=RATE,
        checkpoint_every=6,
        recorded_batches=1,
        out=str(out),
        device="cpu",
    )
    return replace(job, **options)


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("naive", {}),
        ("gpipe", {"recompute": True}),
        ("1f1b", {"split_backward": True}),
        ("pipedream-2bw", {"optimizer": "adam"}),
        ("pipedream", {}),
        ("pipedream-vertical-sync", {"recompute": True}),
        ("zb-h1", {}),
        ("1f1b-interleaved", {"chunks": 2}),
        *((schedule, {"chunks": 2}) for schedule in sorted(V_SHAPED)),
    ],
)
def test_weights_of_repeated_streams_equal_the_single_process_reference(
    schedule: str, options: dict[str, Any], tmp_path: Path
) -> None:
    cuts = (0, 1, 2, 3, 4) if options.get("chunks") else (0, 2, 4)
    plan = make_plan(schedule, cuts, microbatches=1 if schedule in STASHING else 4, **options)
    job = job_of(plan, tmp_path)
    assert all(isinstance(stream.instructions, Repeating) for stream in job.program().streams)
    results = run_ranks(job)
    reference = train(plan, MODEL, DATA, steps=STEPS, seed=SEED, learning_rate=RATE)
    assert distance(checkpoint_weights(tmp_path, STEPS), reference) < 1e-11
    whole = program_of(plan, batches=STEPS, checkpoint_every=6)
    for result, stream in zip(results, whole.streams, strict=True):
        texts = [format_instruction(i) for i in stream.instructions]
        first, last = result.first_instructions, len(result.lane.instructions) - result.first_instructions
        assert 0 < first + last < len(texts)
        assert list(result.lane.instructions) == texts[:first] + texts[-last:]
        assert len(read_batches(job.directory.batches(result.lane.rank))) == STEPS


def test_pipedream_on_unequal_replicas_runs_long(tmp_path: Path) -> None:
    plan = make_plan("pipedream", (0, 1, 4), replicas=(2, 1), microbatches=1)
    run_ranks(job_of(plan, tmp_path))
    reference = train_on_replicas(plan, MODEL, DATA, minibatches=2 * STEPS, seed=SEED, learning_rate=RATE)
    assert distance(checkpoint_weights(tmp_path, STEPS), reference) < 1e-12


def test_a_long_run_resumed_amid_its_steps_ends_bit_for_bit_like_the_whole_one(tmp_path: Path) -> None:
    plan = make_plan("pipedream-2bw", (0, 2, 4), optimizer="adam")
    run_ranks(job_of(plan, tmp_path / "whole"))
    run_ranks(job_of(plan, tmp_path / "stopped", steps=6))
    run_ranks(job_of(plan, tmp_path / "stopped", first_step=6))
    whole, resumed = (checkpoint_weights(tmp_path / name, STEPS) for name in ("whole", "stopped"))
    assert distance(whole, resumed) == 0.0


def test_the_spread_of_compute_is_that_of_the_parts_medians() -> None:
    """Single slow batches do not count, a slow eighth does; fewer than three batches a part say too little."""
    busy_s = np.full(80, 2.0)
    busy_s[::10] = 9.0
    assert compute_spread(busy_s) == 0.0
    busy_s[40:50] = 2.5
    assert compute_spread(busy_s) == pytest.approx(0.25)
    assert compute_spread(busy_s[:23]) is None
    assert compute_spread(np.zeros(80)) is None


def test_what_is_not_recorded_is_summed_up(tmp_path: Path) -> None:
    """The summary of a run of which little is recorded is that of all of its batches; its timeline is in one piece."""
    plan = make_plan("1f1b", (0, 2, 4))
    job = job_of(plan, tmp_path, steps=40)
    results = run_ranks(job)
    measured = RunMeasurements(job, results)
    window = measured.window
    assert window is not None
    assert measured.recorded() == {"first_batches": window, "last_batches": window, "left_out": 40 - 2 * window}
    assert len(measured.losses) == 40
    assert measured.timeline().batches == window
    assert measured.ends.batches == 2 * window
    summary, ends = measured.summary(), measured.ends
    assert summary.makespan_s == ends.makespan_s
    for of_all, recorded in zip(summary.lanes, ends.lanes, strict=True):
        assert of_all.busy_s > recorded.busy_s > 0
        assert of_all.peak_memory_bytes == recorded.peak_memory_bytes
    assert all(rank.compute_spread is not None for rank in measured.ranks())
    measured.write_steps(tmp_path / "steps.csv", before=tmp_path / "none.csv")
    rows = list(csv.DictReader((tmp_path / "steps.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(1, 41))
    assert json.dumps([float(row["loss"]) for row in rows]) == json.dumps(list(measured.losses))

    before = tmp_path / "before.csv"
    before.write_text("step,loss\n1,0.5\n2,0.25\n3,0.125\n")
    resumed = RunMeasurements(replace(job, first_step=2, steps=42), results)
    resumed.write_steps(tmp_path / "resumed.csv", before=before)
    lines = (tmp_path / "resumed.csv").read_text().splitlines()
    assert lines[1:3] == ["1,0.5", "2,0.25"], "the steps that led to the checkpoint stay"
    assert [line.split(",")[0] for line in lines[1:]] == [str(step) for step in range(1, 43)]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream-2bw", "zb-v"])
def test_the_last_batches_of_a_timeline_are_whole(schedule: str) -> None:
    cuts, chunks = ((0, 1, 2, 3, 4), 2) if schedule in V_SHAPED else ((0, 2, 4), 1)
    plan = make_plan(schedule, cuts, chunks=chunks)
    timeline = predict(plan, batches=9)
    for batches in (1, 4, 9):
        last = last_batches(timeline, batches)
        MeasuredRun(plan=plan, timeline=last)  # which counts the updates
        for lane, whole in zip(last.lanes, timeline.lanes, strict=True):
            assert list(lane.events()) == list(whole.events())[-len(lane.instructions) :]
        assert (last.lanes == timeline.lanes) == (batches == 9)
