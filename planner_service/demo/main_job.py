"""Main job: the demo's steps, as a user of the REST API would: profile, plan with every planner, run the best.

The service and the agent are separate processes, which always end with the demo.
"""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pipeplan.client.client import Client
from pipeplan.client.operations import PlanAnswer
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.documents.profile import Profile
from pipeplan.errors import PipeplanError, RunFailedError
from pipeplan.planners.problem import Options
from pipeplan.protocol.jobs import Job, ProfileTask, RunTask
from pipeplan.protocol.plans import PlanRequest
from pipeplan.simulation.report import RunReport

OPTIMIZER: Final = "adam"
PROCESSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The settings of the main job. A microbatch size is measured for `profile_s`; `steps`: minimum and maximum."""

    model: str
    data: str
    microbatch_sizes: tuple[int, ...]
    profile_s: float = 1.0
    batch_size: int
    learning_rate: float
    steps: tuple[int, int]


SMALL_GPT2 = Workload(
    model="hf:gpt2?n_layer=6&n_embd=192&n_head=6&vocab_size=256&n_positions=128&attn_pdrop=0&embd_pdrop=0&resid_pdrop=0",
    data="worker_agent.models.text:standard_library?sequence_length=128",
    microbatch_sizes=(1, 2, 4, 8),
    batch_size=32,
    learning_rate=0.001,
    steps=(30, 120),
)
"""The demo's: the loss visibly falls, and the demo ends."""

QUESTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("pipedream", {}),
    ("pipedream-2bw", {}),
    ("pipedream-2bw", {"schedule": "pipedream-2bw", "stages": 2}),
    ("pipedream-2bw", {"schedule": "1f1b", "stages": 2}),
    ("gpipe", {}),
)
"""The requests to the planners: each for its best plan, 2BW's also for two stages without and with a flush. PipeDream's
planner takes the largest microbatches.
"""

_READY = "pipeplan serves "
"""The beginning of the line that the service prints once it answers."""

_START_S = 60.0
_STOP_S = 15.0

OnProgress = Callable[[str, int, int, str], None]
"""Called with the phase, the units done, their total, and the current unit."""


class DemoProcess:
    """A process, and the lines that it printed on standard error.

    It does not inherit the settings of other services.
    """

    def __init__(self, name: str, arguments: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("PIPEPLAN_")},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._last = ""
        threading.Thread(target=self._read, name=name, daemon=True).start()

    def next_line(self, timeout_s: float) -> str:
        """The next line. Raises PipeplanError if the process ends instead, or prints nothing for this time."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise PipeplanError(f"the {self.name} did not start within {timeout_s:.0f} s; log: {self.log}") from None
        if line is None:
            raise self._ended()
        return line

    def require_running(self) -> None:
        """Raises PipeplanError with the process's last output if it has ended."""
        if self._process.poll() is not None:
            raise self._ended()

    def stop(self) -> None:
        """Asks the process to end, and kills it if it does not."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ended(self) -> PipeplanError:
        status = self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        said = f": {self._last.removeprefix('error: ')}" if self._last else ""
        return PipeplanError(f"the {self.name} {how}{said}")

    def _read(self) -> None:
        assert self._process.stderr is not None  # it is a pipe
        with self._process.stderr as said, self.log.open("w", encoding="utf-8") as log:
            for line in said:
                log.write(line)
                log.flush()
                self._last = line.strip() or self._last
                self._lines.put(line.strip())
        self._lines.put(None)


@contextmanager
def service(folder: Path, port: int) -> Iterator[tuple[DemoProcess, str]]:
    """A service with a database of its own in the folder, and its URL."""
    database = f"sqlite:///{folder / 'pipeplan.sqlite3'}"
    options = ["--port", str(port), "--database", database, "--exit-with-parent"]
    options += ["--log-format", "human", "--log-level", "warning"]
    child = DemoProcess("service", ["planner_service", "serve", *options], folder / "service.log")
    try:
        line = child.next_line(_START_S)
        while not line.startswith(_READY):
            line = child.next_line(_START_S)
        yield child, line.removeprefix(_READY)
    finally:
        child.stop()


@contextmanager
def agent(folder: Path, url: str) -> Iterator[DemoProcess]:
    """An agent of that service on this machine."""
    options = ["--url", url, "--name", "demo", "--work-dir", str(folder / "agent"), "--drain-s", "0"]
    options.append("--exit-with-parent")
    child = DemoProcess("agent", ["worker_agent", "start", *options], folder / "agent.log")
    try:
        child.next_line(_START_S)
        yield child
    finally:
        child.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoCandidate:
    """One planner's answer; `plan_id` is None if no plan fits."""

    planner: str
    plan_id: str | None
    answer: Plan | Infeasible
    solve_time_s: float

    @property
    def throughput_samples_per_s(self) -> float:
        """The prediction of the instruction streams; 0 if no plan fits, or it was not played."""
        return (self.answer.throughput_samples_per_s or 0.0) if isinstance(self.answer, Plan) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutcome:
    """Everything that the demo found out. `chosen` and `report` are None where no plan fits."""

    profile_id: str
    cluster_id: str
    profile: Profile
    cluster: Cluster
    batch_size: int
    candidates: tuple[DemoCandidate, ...]
    chosen: DemoCandidate | None = None
    run_id: str | None = None
    report: RunReport | None = None

    @property
    def plan(self) -> Plan | None:
        """The chosen plan."""
        answer = self.chosen.answer if self.chosen else None
        return answer if isinstance(answer, Plan) else None

    @property
    def nearest_miss(self) -> str:
        """Why the first planner's closest configuration does not fit; empty if a plan fits."""
        reasons = [c.answer.reasons[0] for c in self.candidates if isinstance(c.answer, Infeasible)]
        return f"{reasons[0].rule}: {reasons[0].detail}" if reasons else ""


def main_job(
    client: Client, agent: DemoProcess, on_progress: OnProgress, *, training_s: float, workload: Workload = SMALL_GPT2
) -> DemoOutcome:
    """Does the main job against a service with one agent. Raises PipeplanError in one sentence."""
    model, data, sizes = workload.model, workload.data, workload.microbatch_sizes
    task = ProfileTask(
        model=model,
        data=data,
        microbatch_sizes=sizes,
        optimizer=OPTIMIZER,
        devices=PROCESSES,
        seconds=workload.profile_s,
    )
    measured = _finished(client, agent, task, "profiling", on_progress)
    profile_id, cluster_id = str(measured.profile_id), str(measured.cluster_id)

    found: dict[object, DemoCandidate] = {}  # by plan: several requests may have the same answer
    for number, (planner, chosen) in enumerate(QUESTIONS):
        on_progress("planning", number, len(QUESTIONS), planner)
        if planner == "pipedream":
            chosen = chosen | {"microbatch_size": max(sizes)}
        answer: PlanAnswer = client.create_plan(
            PlanRequest(
                profile_id=profile_id,
                cluster_id=cluster_id,
                planner=planner,
                batch_size=workload.batch_size,
                options=Options(optimizer=OPTIMIZER, **chosen),
            )
        )
        found[answer.plan_id or number] = DemoCandidate(
            planner=planner, plan_id=answer.plan_id, answer=answer.answer, solve_time_s=answer.solve_time_s
        )
    on_progress("planning", len(QUESTIONS), len(QUESTIONS), "done")
    candidates = tuple(found.values())
    planned = DemoOutcome(
        profile_id=profile_id,
        cluster_id=cluster_id,
        profile=client.profile(profile_id),
        batch_size=workload.batch_size,
        cluster=client.cluster(cluster_id),
        candidates=candidates,
    )
    best = max(candidates, key=lambda candidate: candidate.throughput_samples_per_s)
    if not isinstance(best.answer, Plan) or best.plan_id is None:
        return planned

    # As many steps as the time for training allows, within the bounds.
    fewest, most = workload.steps
    steps = int(min(max(training_s * best.throughput_samples_per_s / best.answer.batch_size, fewest), most))
    rate = workload.learning_rate
    training = RunTask(plan_id=best.plan_id, model=model, data=data, steps=steps, learning_rate=rate)
    run = client.run(str(_finished(client, agent, training, "training", on_progress).run_id))
    return replace(planned, chosen=best, run_id=run.id, report=run.report)


def _finished(
    client: Client, agent: DemoProcess, task: ProfileTask | RunTask, phase: str, on_progress: OnProgress
) -> Job:
    """The job once it has succeeded. Raises RunFailedError with its reason, or that of the agent's end."""
    job = client.enqueue_job(task)

    def tell(job: Job) -> None:
        if job.progress is not None:
            on_progress(phase, job.progress.done, job.progress.total, job.progress.message)

    ended = client.wait_for_job(job.id, on_progress=tell, while_waiting=agent.require_running)
    if ended.state != "succeeded":
        raise RunFailedError(f"{phase} {ended.state}: {ended.error or 'no reason was given'}")
    return ended
