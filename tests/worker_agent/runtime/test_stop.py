"""A signal ends a run with a checkpoint after one batch on all ranks, from which it goes on bit for bit."""

import json
import os
import shlex
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeplan.programs.instructions import (
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    SendActivation,
    SendGradient,
    StartReduce,
)
from pipeplan.programs.program import Program
from pipeplan.simulation.predict import program_of
from tests.processes import free_port
from tests.schedules import SCHEDULES, STASHING, chunks_of
from tests.waiting import wait_until
from tests.worker_agent.commands import AGENT, finish
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.test_executor import checkpoint_weights
from tests.worker_agent.runtime.test_run_command import DATA, MLP, SLEEP, command, rank_process, steps_of
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.resume import resumed
from worker_agent.runtime.stop import batches_ahead, closes_batch

SLOW = f"{SLEEP}&forward_s=0.002&backward_s=0.004"
ENDLESS = 5000

SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("pipedream-2bw", {"replicas": 2}),
    ("1f1b", {"replicas": 2, "checkpoint_every": 1}),
    ("pipedream", {"replicas": (1, 2)}),
    ("pipedream", {"replicas": (2, 1)}),
    ("pipedream-vertical-sync", {}),
    ("data-parallel-asp", {"replicas": 3}),
    ("data-parallel", {"replicas": 2}),
    ("gpipe", {}),
    ("zb-h1", {}),
    ("1f1b-interleaved", {}),
    ("zb-v", {}),
]


def job_of(schedule: str, out: Path, *, checkpoint_every: int = 0, **shape: Any) -> RunJob:
    """A run that is long enough to be ended."""
    chunks = chunks_of(schedule)
    cuts = (0, 4) if schedule.startswith("data-parallel") else (0, 2, 4) if chunks == 1 else (0, 1, 2, 3, 4)
    microbatches = 1 if schedule in STASHING or schedule.startswith("data-parallel") else 4
    plan = make_plan(schedule, cuts, microbatches=microbatches, chunks=chunks, optimizer="adam", **shape)
    return RunJob(
        plan=plan,
        model=MLP,
        data=DATA,
        steps=ENDLESS,
        seed=3,
        checkpoint_every=checkpoint_every,
        recorded_batches=1,
        out=str(out),
        device="cpu",
    )


@pytest.mark.each_case
@pytest.mark.parametrize(("schedule", "shape"), SHAPES)
def test_all_ranks_stop_after_one_batch_and_go_on_bit_for_bit(
    schedule: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    job = job_of(schedule, tmp_path / "out", **shape)
    job.directory.ranks.mkdir(parents=True)
    job.directory.stop.write_text(str(int(signal.SIGTERM)))
    (step,) = {result.stop_step for result in run_ranks(job)}
    assert step is not None and 0 < step < ENDLESS
    job.directory.stop.unlink()
    going_on = resumed(replace(job, steps=step + 4, checkpoint_every=step + 4))
    assert (going_on.first_step, going_on.stop_step) == (step, None)
    run_ranks(going_on)
    whole = job_of(schedule, tmp_path / "whole", **shape)
    run_ranks(replace(whole, steps=step + 4, checkpoint_every=step + 4))
    left, right = (checkpoint_weights(Path(each.out), step + 4) for each in (job, whole))
    assert left.keys() == right.keys()
    assert all((left[name] == right[name]).all() for name in left)


@pytest.mark.parametrize(
    ("schedule", "replicas", "depth"),
    [
        *[(name, (1, 1), 2) for name in sorted(SCHEDULES) if not name.startswith("data-parallel")],
        *[(name, (3,), 1) for name in sorted(SCHEDULES) if name.startswith("data-parallel")],
        *[(name, shape, len(shape)) for name in sorted(STASHING) for shape in ((2, 1), (1, 2), (1,) * 4, (3, 2, 1))],
        *[("pipedream-2bw", shape, len(shape)) for shape in ((2, 2), (1,) * 4, (3, 3, 3))],
    ],
)
def test_no_rank_gets_further_ahead_of_the_one_that_decides_than_is_reckoned(
    schedule: str, replicas: tuple[int, ...], depth: int, tmp_path: Path
) -> None:
    chunks = chunks_of(schedule)
    stages = depth * chunks
    microbatches = 1 if schedule in STASHING or depth == 1 else 4
    plan = make_plan(
        schedule,
        tuple(range(stages + 1)),
        replicas=replicas * chunks,
        microbatches=microbatches,
        chunks=chunks,
    )
    job = RunJob(plan=plan, model=MLP, data=DATA, steps=ENDLESS, out=str(tmp_path))
    ahead = batches_ahead(job)
    program = program_of(plan, batches=30)
    decider = next(stream.rank for stream in program.streams if (stream.stage, stream.replica) == (0, 0))
    for batch in range(5, 9):
        assert max(begun(program, decider, batch)) <= batch + ahead
    assert (ahead == 0) == program.schedule.flushes


def begun(program: Program, halted: int, batch: int) -> list[int]:
    """How many batches each rank completes while one stands still before a batch."""
    updates = {s.rank: program.schedule.updates_a_batch(program.pipeline, s.stage) for s in program.streams}
    done, closed = Counter[int](), Counter[int]()
    sent, reduced = Counter[Any](), Counter[Any]()
    moves = True
    while moves:
        moves = False
        for stream in program.streams:
            rank = stream.rank
            while done[rank] < len(stream.instructions) and not (rank == halted and closed[rank] == batch):
                instruction = stream.instructions[done[rank]]
                mates = [s for s in program.streams if s.stage == stream.stage]
                match instruction:
                    case SendActivation(microbatch=k, peer=peer) | SendGradient(microbatch=k, peer=peer):
                        sent[rank, peer, k, type(instruction).__name__, instruction.chunk] += 1
                    case RecvActivation(microbatch=k, peer=peer) | RecvGradient(microbatch=k, peer=peer):
                        name = type(instruction).__name__.replace("Recv", "Send")
                        if not any(key[:4] == (peer, rank, k, name) for key in sent):
                            break
                    case StartReduce(version=version, source=source) if source in (None, rank):
                        reduced[rank, version, instruction.chunk] += 1
                    case ReduceGradients(version=version, source=source):
                        reduced[rank, version, instruction.chunk] += source in (None, rank)
                        needed = [source] if source is not None else [mate.rank for mate in mates]
                        if not all(reduced[each, version, instruction.chunk] for each in needed):
                            break
                done[rank] += 1
                moves = True
                closed[rank] += closes_batch(instruction, updates[rank], program.pipeline.chunks)
    return [closed[stream.rank] for stream in program.streams]


@contextmanager
def started(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The command as a process."""
    with subprocess.Popen([*AGENT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def measured(out: Path, steps: int) -> bool:
    """Whether the run's file shows so many steps while the run goes on."""
    return (out / "steps.csv").exists() and len(steps_of(out)) >= steps


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("number", "status", "whom"),
    [
        (signal.SIGTERM, 143, ("launcher", "rank 0", "rank 1")),
        (signal.SIGTERM, 143, ("launcher",)),
        (signal.SIGTERM, 143, ("rank 1",)),
        (signal.SIGINT, 130, ("launcher",)),
        (signal.SIGUSR1, 143, ("launcher", "launcher")),
    ],
)
def test_a_signal_leaves_a_checkpoint_and_a_sentence_with_the_command_that_goes_on(
    number: signal.Signals, status: int, whom: tuple[str, ...], tmp_path: Path
) -> None:
    """Slurm and systemd send it to all processes; an agent sends SIGUSR1."""
    plan, out = make_plan("pipedream-2bw", (0, 2, 4), optimizer="adam"), tmp_path / "out"
    arguments = command(plan, tmp_path, "--checkpoint-every", "1000", "--lr", "0.01", "-q", model=SLOW, steps=ENDLESS)
    with started(arguments) as process:
        wait_until(lambda: measured(out, 2))
        ranks = [rank_process(process.pid, rank) for rank in (0, 1)]
        pids = {"launcher": process.pid, "rank 0": ranks[0], "rank 1": ranks[1]}
        for each in whom:
            os.kill(pids[each], number)
        _, stderr = process.communicate()
    assert process.returncode == status, stderr
    report = json.loads((out / "run.json").read_text())
    step = report["step"]
    assert (report["state"], report["checkpoint"]) == ("interrupted", step)
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{step}"]
    assert steps_of(out) == list(range(1, step + 1))
    *_, last = stderr.splitlines()
    name = "SIGINT" if number == signal.SIGINT else "SIGTERM"
    how = f"error: ended by {name} after step {step} of {ENDLESS}, with a checkpoint; to go on: "
    assert last.startswith(how)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    _, *told = shlex.split(last.removeprefix(how))
    assert {"--learning-rate", "--quiet", "--resume"} <= {*told}
    again = finish([*(str(step + 2) if word == str(ENDLESS) else word for word in told), "--json"])
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["first_step"] == step


def test_a_second_signal_ends_a_run_at_once(tmp_path: Path) -> None:
    stuck = "tests.worker_agent.runtime.faulty:hangs?after=9"
    with started(command(make_plan("1f1b", (0, 2, 4)), tmp_path, model=stuck, steps=ENDLESS)) as process:
        out = tmp_path / "out"
        wait_until(lambda: measured(out, 2))
        ranks = [rank_process(process.pid, rank) for rank in (0, 1)]
        process.send_signal(signal.SIGTERM)
        wait_until((out / "ranks" / "stop").exists)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate()
    assert process.returncode == 143, stderr
    assert "error: ended at once by a second signal, SIGTERM; to go on: pipeplan-agent run " in stderr
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    report = json.loads((out / "run.json").read_text())
    assert (report["state"], report["step"]) == ("interrupted", 2)


@pytest.mark.parametrize("signalled", [1])
def test_a_signal_to_one_of_two_nodes_stops_both_after_the_same_batch(signalled: int, tmp_path: Path) -> None:
    where = ["--nodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    plan = make_plan("1f1b", (0, 2, 4), optimizer="adam")
    given = command(plan, tmp_path, *where, model=SLOW, steps=ENDLESS)
    with started([*given, "--node-rank", "1"]) as second, started([*given, "--node-rank", "0"]) as first:
        wait_until(lambda: measured(tmp_path / "out", 2))
        os.kill((first, second)[signalled].pid, signal.SIGTERM)
        ended = [process.communicate()[1] for process in (first, second)]
    assert (first.returncode, second.returncode) == (143, 143), ended
    step = json.loads((tmp_path / "out" / "run.json").read_text())["step"]
    for node, stderr in enumerate(ended):
        last = stderr.splitlines()[-1]
        assert last.startswith(f"error: ended by SIGTERM after step {step} of {ENDLESS}, with a checkpoint; to go on: ")
        assert f" --node-rank {node} " in last and last.endswith(" --resume")
