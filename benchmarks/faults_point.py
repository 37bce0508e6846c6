"""One point of `benchmarks.faults`: a run in which one rank is killed, stopped or slowed down, and its result."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file

from benchmarks.faults_work import CHECKPOINT_EVERY, STEPS, arguments, job_for, plan_for, reads_folder
from pipeplan.documents.files import dump, plan_document
from pipeplan.documents.plan import Plan
from pipeplan.programs.instructions import Checkpoint, Forward
from pipeplan.programs.program import Program
from pipeplan.programs.text import format_instruction
from tests.worker_agent.runtime.recorded import reads_of
from worker_agent.runtime.status import Status, read_status

Action = Literal["kill", "stop", "slow"]
Phase = Literal["start-up", "steady", "drain", "checkpoint"]
ACTIONS: tuple[Action, ...] = ("kill", "stop", "slow")
PHASES: tuple[Phase, ...] = ("start-up", "steady", "drain", "checkpoint")
LIMIT_S = {"kill": 1.0, "stop": 15.0}
"""The time within which the failed rank must be named."""

_PATIENCE_S, _START_UP_S, _WRITE_S, _LONGEST_STOP_S = 120.0, 2.5, 0.02, 2.0
_NAMED = re.compile(r"rank (\d+) \(stage")
_PROGRESS = re.compile(r"step \d+ of \d+, ")
_AGAIN = re.compile(r"starting again from step (\d+)")
_PLACED = re.compile(r" (while it started|at (?:its end|\S+) after \d+ of \d+ steps); log: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The action, the rank and the time: at an instruction of the rank, or so long after its start (`delay_s`)."""

    number: int
    schedule: str
    action: Action
    phase: Phase
    rank: int
    instruction: int
    delay_s: float
    restarts: bool

    def __str__(self) -> str:
        return f"{self.action} rank {self.rank}, {self.phase}, {self.schedule}"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The observations: where the rank was struck, the seconds until it was named, and everything that is wrong."""

    place: str = ""
    naming_s: float | None = None
    total_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


def draw(number: int, schedule: str, action: Action, phase: Phase, seed: int) -> Point:
    """The point of a number, from the seed."""
    chance = random.Random(f"{seed} {number}")
    program = program_of(plan_for(schedule))
    rank = chance.randrange(len(program.streams))
    where = {"start-up": [-1]} | {p: places(program, rank, p) for p in PHASES[1:]}
    if not where[phase]:  # replicas but the first write no checkpoints
        phase = "steady"
    lengths = {"start-up": _START_UP_S, "checkpoint": _WRITE_S}
    return Point(
        number=number,
        schedule=schedule,
        action=action,
        phase=phase,
        rank=rank,
        instruction=chance.choice(where[phase]),
        delay_s=chance.uniform(0.0, lengths.get(phase, 0.002)),
        restarts=chance.random() < 0.75,
    )


def program_of(plan: Plan) -> Program:
    """The ranks' program."""
    return job_for(plan, Path("/run")).program()


def places(program: Program, rank: int, phase: Phase) -> list[int]:
    """The instructions of a rank that belong to a phase: the drain begins after its last forward."""
    stream = program.streams[rank]
    indices = range(len(stream.instructions))
    last = max(i for i in indices if isinstance(stream.instructions[i], Forward))
    if phase == "checkpoint":
        found = [i for i in indices if isinstance(stream.instructions[i], Checkpoint)]
        return found if stream.replica == 0 else []
    return [i for i in indices if (i > last) == (phase == "drain")]


class Run:
    """The running command, with its output and the times of the lines."""

    def __init__(self, plan: Plan, out: Path, *options: str) -> None:
        self.out = out
        self.plan = plan
        plan_file = out.with_name(out.name + ".plan.json")
        plan_file.write_text(dump(plan_document(plan)))
        command = [sys.executable, "-m", "worker_agent", *arguments(plan_file, out), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def status(self, rank: int) -> Status | None:
        """A rank's current instruction."""
        return read_status(self.out / "ranks" / f"rank-{rank}.status")

    def process_of(self, rank: int) -> int | None:
        """The process of a rank, among the command's children."""
        for child in _children(self.process.pid):
            with suppress(OSError):
                if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
                    return child
        return None

    def end(self) -> int:
        """Waits for its end; the exit status."""
        code = self.process.wait(_PATIENCE_S)
        self._reader.join()
        return code

    def until(self, condition: Callable[[], bool]) -> bool:
        """Waits for a condition; False if the command ended, or took too long, before."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                return condition()
            time.sleep(0.0002)
        return True

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if _PROGRESS.match(line) is None:
                self.lines.append((time.monotonic(), line.strip()))


def undisturbed(schedule: str, folder: Path) -> Path:
    """The folder of an undisturbed run."""
    out = folder / f"undisturbed-{schedule.replace(', ', '-')}"
    run = Run(plan_for(schedule), out)
    code = run.end()
    if code != 0 or wrong_reads(run, 0):
        raise RuntimeError(f"{schedule} fails by itself: {run.lines}, {wrong_reads(run, 0)}")
    return out


def strike(point: Point, whole: Path, folder: Path) -> Outcome:
    """Runs the point; `whole` is the folder of the undisturbed run."""
    begun_s, outcome = time.monotonic(), Outcome()
    plan, out = plan_for(point.schedule), folder / f"point-{point.number}"
    run = Run(plan, out, *(("--max-restarts", "1") if point.restarts else ()))
    with _always_ended(run):
        process = _aim(run, point)
        if process is None:
            outcome.wrong.append(f"never got to its point: {run.lines}")
            return outcome
        before = finished_checkpoints(out)
        ranks = [p for r in range(plan.workers) if (p := run.process_of(r)) is not None]
        outcome.place = _act(run, point, process)
        struck_s = time.monotonic()
        if point.action == "slow":
            _continue_slowly(run, point, process)
            _check_unharmed(run, outcome)
        else:
            _check_named(run, point, struck_s, ranks, outcome)
            _check_goes_on(run, point, before, outcome)
        outcome.wrong += different(whole, out)
    outcome.total_s = time.monotonic() - begun_s
    return outcome


def _aim(run: Run, point: Point) -> int | None:
    """The process of the rank, once it has reached the point."""
    status = run.out / "ranks" / f"rank-{point.rank}.status"
    if point.phase == "start-up":
        reached = run.until(lambda: run.process_of(point.rank) is not None)
    else:
        reached = run.until(status.exists) and run.until(
            lambda: (now := run.status(point.rank)) is not None and now.instruction >= point.instruction
        )
    if not reached:
        return None
    time.sleep(point.delay_s)
    return run.process_of(point.rank)


def _act(run: Run, point: Point, process: int) -> str:
    """Strikes; returns where the rank was."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL if point.action == "kill" else signal.SIGSTOP)
    now = run.status(point.rank)
    if now is None or now.instruction < 0:
        return "start"
    stream = program_of(run.plan).streams[point.rank]
    return format_instruction(stream.instructions[now.instruction])


def _continue_slowly(run: Run, point: Point, process: int) -> None:
    """Continues it and stops it again, for ever shorter moments of life, as long as it runs."""
    chance = random.Random(point.number)
    for _ in range(8):
        time.sleep(chance.uniform(0.1, _LONGEST_STOP_S))
        _signal(process, signal.SIGCONT)
        time.sleep(chance.uniform(0.02, 0.3))
        if run.process.poll() is not None or _gone(process):
            break
        _signal(process, signal.SIGSTOP)
    _signal(process, signal.SIGCONT)


def _check_unharmed(run: Run, outcome: Outcome) -> None:
    code = run.end()
    if code != 0 or run.lines:
        outcome.wrong.append(f"a slow rank ended the run: {code} {run.lines}")
    outcome.wrong += wrong_reads(run, 0)


def _check_named(run: Run, point: Point, struck_s: float, ranks: list[int], outcome: Outcome) -> None:
    """The first line must name the rank and its place; all ranks of that time must be gone."""
    if not run.until(lambda: bool(run.lines)):
        if run.end() == 0 and _through(run, point):
            return  # it was struck after its last report
        outcome.wrong.append("nobody was named")
        return
    at_s, line = run.lines[0]
    outcome.naming_s = at_s - struck_s
    named = _NAMED.search(line)
    if named is None or int(named.group(1)) != point.rank:
        outcome.wrong.append(f"not the culprit: {line}")
    if _PLACED.search(line) is None:
        outcome.wrong.append(f"no place: {line}")
    if outcome.naming_s > LIMIT_S[point.action]:
        outcome.wrong.append(f"named after {outcome.naming_s:.1f} s")
    left = [rank for rank in ranks if not _gone(rank)]
    if left:
        outcome.wrong.append(f"processes left: {left}")


def _through(run: Run, point: Point) -> bool:
    return (run.out / "ranks" / f"rank-{point.rank}.result.json").exists()


def _check_goes_on(run: Run, point: Point, before: list[int], outcome: Outcome) -> None:
    """Restarts by itself, or by hand, from the newest whole checkpoint; nothing may be left out or done twice."""
    if not run.lines:
        return
    if point.restarts:
        code = run.end()
        again = [found for _, line in run.lines if (found := _AGAIN.search(line))]
        first_step = int(again[0].group(1)) if len(again) == 1 else -1
    else:
        if run.end() != 1 or len(run.lines) != 1:
            outcome.wrong.append(f"exit status {run.process.returncode}, {run.lines}")
        whole = finished_checkpoints(run.out)
        if STEPS in whole:  # everything is done except the report
            return
        run = Run(run.plan, run.out, "--resume")
        code, first_step = run.end(), max(whole, default=0)
    if code != 0:
        outcome.wrong.append(f"did not go on: {run.lines}")
        return
    if first_step < max((step for step in before if step < STEPS), default=0):
        outcome.wrong.append(f"went back to step {first_step}, with {before} there")
    outcome.wrong += wrong_reads(run, first_step)


def finished_checkpoints(out: Path) -> list[int]:
    """The steps with a manifest."""
    return sorted(int(path.parent.name.split("-")[1]) for path in out.glob("checkpoints/step-*/manifest.json"))


def wrong_reads(run: Run, first_step: int) -> list[str]:
    """Whether the run's last processes read every microbatch from a step on once, in order, and no others."""
    wrong = []
    for stream in program_of(run.plan).streams:
        read = _read_by(run, stream.rank)
        replicas = run.plan.stages[stream.stage].replicas
        a_batch = run.plan.batch_size // run.plan.microbatch_size
        due = [k for k in range(first_step * a_batch, STEPS * a_batch) if k % replicas == stream.replica]
        if read is not None and read != due:
            wrong.append(f"rank {stream.rank} read {read[:3]}...{read[-3:]}, not {due[:3]}...{due[-3:]}")
    return wrong


def _read_by(run: Run, rank: int) -> list[int] | None:
    status = run.status(rank)
    return [] if status is None else reads_of(reads_folder(run.out), status.process)


def different(whole: Path, out: Path) -> list[str]:
    """Names of tensors in the last checkpoint, optimizer's states among them, that are not those of the other run."""
    found = []
    for file in sorted((whole / "checkpoints" / f"step-{STEPS}").glob("stage-*")):
        if file.suffix not in (".safetensors", ".state"):
            continue
        other = out / "checkpoints" / f"step-{STEPS}" / file.name
        if not other.exists():
            return [f"no {other}"]
        expected, tensors = load_file(file), load_file(other)
        same = expected.keys() == tensors.keys() and all(torch.equal(expected[n], tensors[n]) for n in expected)
        if not same:
            found.append(f"{file.name} differs")
    return found


@contextmanager
def _always_ended(run: Run) -> Iterator[None]:
    """Leaves no process of the command behind, whatever happens."""
    try:
        yield
    finally:
        for process in (*_children(run.process.pid), run.process.pid):
            if run.process.poll() is None:
                _signal(process, signal.SIGKILL)
        run.end()


def _children(process: int) -> list[int]:
    with suppress(OSError):
        tasks = Path(f"/proc/{process}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def _signal(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def _gone(process: int) -> bool:
    return not Path(f"/proc/{process}").exists()


assert STEPS % CHECKPOINT_EVERY == 0
