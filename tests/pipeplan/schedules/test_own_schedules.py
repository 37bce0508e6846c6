"""Schedules of others: the page's own one is checked, simulated, planned for and run; unknown names go nowhere."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from pipeplan.documents.files import save
from pipeplan.documents.plan import Plan, Worker
from pipeplan.errors import InvalidInputError, ScheduleError
from pipeplan.planners.complete import play
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.programs.check import check
from pipeplan.programs.footprint import footprints
from pipeplan.programs.instructions import Backward, Forward, Instruction, Update
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules import registry
from pipeplan.schedules.one_f_one_b import alternate
from pipeplan.schedules.registry import BUILT_IN, build, register, schedule_named
from pipeplan.simulation.predict import long_program_of, predict, program_of
from tests.pipeplan.builders import Cell, cluster, profile

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
CODE = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "waves.py" in block)
MODEL, DATA = "preset:mlp?width=8&depth=4", "preset:regression?width=8"
CHAIN = profile([Cell(weight_bytes=4, output_bytes=4, activation_bytes=4)] * 4, sizes=(1, 2))


def run(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One of our commands in a folder."""
    module = {"pipeplan": "pipeplan.cli.app", "pipeplan-agent": "worker_agent.cli"}[program]
    command = [sys.executable, "-c", f"from {module} import main; main()", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's schedule is, with a profile and a cluster beside it."""
    made = tmp_path_factory.mktemp("own")
    (made / "waves.py").write_text(CODE, encoding="utf-8")
    save(CHAIN, made / "profile.json")
    save(cluster((2, 1.0e9)), made / "cluster.json")
    return made


@pytest.fixture(scope="module")
def waves() -> Iterator[Schedule]:
    """The page's schedule in this process, under its name."""
    space: dict[str, Any] = {"__name__": "waves"}
    exec(CODE, space)
    yield register(space["Waves"]())
    registry._KNOWN.pop("waves")


def test_the_page_shows_thirty_lines_or_so() -> None:
    assert len(CODE.splitlines()) <= 32


@pytest.mark.parametrize(("depth", "microbatches"), [(1, 1), (2, 4), (3, 5), (4, 8)])
def test_its_streams_keep_the_laws(waves: Schedule, depth: int, microbatches: int) -> None:
    program = build(waves, Pipeline(replicas=(2,) * depth, microbatches=microbatches, batches=3))
    check(program)
    most = [max(h.in_flight for h in footprints(stream.instructions, recompute=False)) for stream in program.streams]
    counted = [waves.in_flight(depth=depth, stage=s.stage, microbatches=microbatches) for s in program.streams]
    assert most == counted == [-(-microbatches // 2)] * len(program.streams)


def test_a_batch_too_long_to_be_counted_is_refused(waves: Schedule) -> None:
    options = Options(schedule="waves", stages=2, microbatch_size=1)
    problem = PlanningProblem(profile=CHAIN, cluster=cluster((2, 1.0e9)), batch_size=2**31 - 1, options=options)
    with pytest.raises(InvalidInputError, match=r"microbatches: must be at most 16384 .* no formula for in_flight"):
        solve("pipedream-2bw", problem)


def test_it_is_planned_for_and_its_long_runs_are_what_it_generates(waves: Schedule) -> None:
    options = Options(schedule="waves", stages=2, microbatch_size=1)
    problem = PlanningProblem(profile=CHAIN, cluster=cluster((2, 1.0e9)), batch_size=8, options=options)
    plan = solve("pipedream-2bw", problem)
    assert isinstance(plan, Plan) and plan.schedule == "waves" and plan.simulated is not None
    flushed = solve("pipedream-2bw", replace(problem, options=replace(options, schedule="1f1b")))
    assert isinstance(flushed, Plan) and flushed.simulated is not None
    assert plan.closed_form.throughput_samples_per_s == flushed.closed_form.throughput_samples_per_s
    assert plan.simulated.throughput_samples_per_s < flushed.simulated.throughput_samples_per_s
    long = [list(stream.instructions) for stream in long_program_of(plan, batches=20).streams]
    assert long == [list(stream.instructions) for stream in program_of(plan, batches=20).streams]


@pytest.mark.campaign
def test_from_the_command_line_it_is_simulated_planned_for_and_run(folder: Path) -> None:
    own = ("--schedule", "waves:Waves")
    played = run(folder, "pipeplan", "simulate", *own, "--stages", "2", "--microbatches", "4", "--json")
    assert played.returncode == 0, played.stderr
    assert json.loads(played.stdout)["schedule"] == "waves"
    assert json.loads(played.stdout)["in_flight"] == [2, 2]
    asked = ("--planner", "pipedream-2bw", "--profile", "profile.json", "--cluster", "cluster.json")
    few = ("--batch-size", "4", "--stages", "2", "--microbatch-size", "1")
    planned = run(folder, "pipeplan", "solve", *own, *asked, *few, "--json", "-o", "plan.json")
    assert planned.returncode == 0, planned.stderr
    run_it = ("pipeplan-agent", "run", "--model", MODEL, "--data", DATA, "--steps", "3", "--json", "--quiet")
    unnamed = run(folder, *run_it, "--plan", "plan.json", "--out", "unnamed")
    assert unnamed.returncode == 2
    assert "schedule: must be one of naive" in unnamed.stderr and "'waves'" in unnamed.stderr
    ended = run(folder, *run_it, *own, "--plan", "plan.json", "--out", "own")
    assert ended.returncode == 0, ended.stderr
    plain = json.loads((folder / "plan.json").read_text()) | {"schedule": "gpipe"}
    (folder / "gpipe.json").write_text(json.dumps(plain))
    other = run(folder, *run_it, "--plan", "gpipe.json", "--out", "gpipe")
    assert other.returncode == 0, other.stderr
    losses = [json.loads(one.stdout)["losses"] for one in (ended, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert json.loads(ended.stdout)["schedule"] == "waves"


class Late(Schedule):
    """A schedule that says that it flushes, and does not."""

    name = "late"
    source = "a test"
    flushes = True

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """The update stands in the middle of the batch."""
        for batch in pipeline.batch_range():
            numbers = pipeline.microbatches_of(worker, batch)
            yield from (Forward(k, batch) for k in numbers)
            yield Update(batch + 1)
            yield from (Backward(k, batch) for k in numbers)


class Midway(Late):
    """Updates after half of the batch, whose other half then runs on the new version and counts for nothing."""

    name = "midway"

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """Nothing is in flight at the update."""
        for batch in pipeline.batch_range():
            for place, k in enumerate(pipeline.microbatches_of(worker, batch)):
                version = batch + (place >= pipeline.microbatches // 2)
                yield Forward(k, version)
                yield Backward(k, version)
                if place == pipeline.microbatches // 2 - 1:
                    yield Update(batch + 1)


class Mixed(Schedule):
    """1F1B without a flush on the newest weights: a batch's gradients are of two versions, and some would be lost."""

    name = "mixed"
    source = "a test"

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """Each forward is on the newest version that there is."""
        numbers = [k for batch in pipeline.batch_range() for k in pipeline.microbatches_of(worker, batch)]
        newest, used = 0, dict[int, int]()
        for k, forward in alternate(numbers, pipeline.in_flight_limit(worker.stage)):
            if forward:
                used[k] = newest
                yield Forward(k, newest)
                continue
            yield Backward(k, used[k])
            if k % pipeline.microbatches == 0:
                newest += 1
                yield Update(newest)

    def versions_behind(self, pipeline: Pipeline, stage: int) -> int:
        """One."""
        del pipeline, stage
        return 1


class Delayed(Schedule):
    """A batch after the other, each on the weights before the newest."""

    name = "delayed"
    source = "a test"

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """Batch t runs on version t - 1."""
        for batch in pipeline.batch_range():
            for k in pipeline.microbatches_of(worker, batch):
                yield Forward(k, max(batch - 1, 0))
                yield Backward(k, max(batch - 1, 0))
            yield Update(batch + 1)

    def versions_behind(self, pipeline: Pipeline, stage: int) -> int:
        """One."""
        del pipeline, stage
        return 1

    def weight_versions(self, held: int) -> int:
        """The newest and the one before it."""
        return held + 1


class Stale(Delayed):
    """The same, which claims a flush: it would be taken for one that trains as one process does."""

    name = "stale"
    flushes = True


class Plain(Schedule):
    """GPipe's order, which claims nothing."""

    name = "plain"
    source = "a test"

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """All forwards, then all backwards."""
        return schedule_named("gpipe").compute(pipeline, worker)


@pytest.mark.parametrize(("schedule", "late"), [(Plain(), 0), (Delayed(), 1)])
def test_how_late_gradients_are_is_counted_where_nothing_is_claimed(schedule: Schedule, late: int) -> None:
    pipeline = Pipeline(replicas=(2, 2), microbatches=4)
    build(schedule, replace(pipeline, batches=4))  # both keep all laws
    assert (schedule.updates_late(pipeline), schedule.synchronous) == (late, not late)


class Modest(Schedule):
    """GPipe's order, which claims to hold one microbatch."""

    name = "modest"
    source = "a test"
    flushes = True

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """All forwards, then all backwards."""
        return schedule_named("gpipe").compute(pipeline, worker)

    def in_flight(self, *, depth: int, stage: int, microbatches: int) -> int:
        """Not true."""
        del depth, stage, microbatches
        return 1


@pytest.mark.parametrize(
    ("schedule", "law"),
    [
        (Late(), "rank 0 at U1: microbatches .* are in flight"),
        (Midway(), "rank 0 at U1: it must be made of all gradients of its own microbatches and of no others"),
        (Mixed(), r"rank 0 at U2: its gradients must be of one weight version, and are of \[0, 1\]"),
        (Stale(), r"rank 0 at U2: its gradients must be of version 1, and are of \[0\]"),
        (Modest(), "schedule modest: in_flight is claimed to be 1 on stage 0, and its stream holds 4"),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else "",
)
def test_a_broken_law_is_found_before_any_play_plan_or_run(schedule: Schedule, law: str) -> None:
    with pytest.raises(ScheduleError, match=law):
        build(schedule, Pipeline(replicas=(1, 1), microbatches=4, batches=3))


def _plan() -> Plan:
    options = Options(schedule="1f1b", stages=2, microbatch_size=1)
    problem = PlanningProblem(profile=CHAIN, cluster=cluster((2, 1.0e9)), batch_size=8, options=options)
    plan = solve("pipedream-2bw", problem)
    assert isinstance(plan, Plan)
    return replace(plan, schedule="bogus")


@pytest.mark.parametrize(
    "take",
    [
        lambda: schedule_named("bogus"),
        lambda: build("bogus", Pipeline(replicas=(1,), microbatches=1)),
        lambda: Options(schedule="bogus"),
        lambda: program_of(_plan(), batches=1),
        lambda: long_program_of(_plan(), batches=100),
        lambda: predict(_plan(), batches=1),
        lambda: play(_plan()),
    ],
)
def test_no_path_takes_an_unknown_name(take: Callable[[], object]) -> None:
    """`in_flight("bogus")` was once 1."""
    with pytest.raises(InvalidInputError, match=r"schedule: must be one of naive, .*, got 'bogus'"):
        take()


@pytest.mark.parametrize(
    ("reference", "rule"),
    [
        (":Waves", "must name a class as package.module:Class"),
        (".waves:Waves", "must name a class as package.module:Class"),
        ("no_such_module:Waves", "must name a class that can be imported"),
        ("json:NoSuchClass", "must name a class that can be imported"),
        ("json:JSONDecoder", "must name a subclass of pipeplan.programs.schedule.Schedule"),
        ("pipeplan.programs.schedule:Schedule", "must name a schedule that has a name, a source and a method compute"),
    ],
)
def test_a_reference_to_something_else_is_refused(reference: str, rule: str) -> None:
    with pytest.raises(InvalidInputError, match=f"schedule: {rule}"):
        registry.schedule_asked(reference)


def test_a_name_that_is_taken_is_refused() -> None:
    class Another(Late):
        """Takes a name of ours."""

        name = "1f1b"

    with pytest.raises(InvalidInputError, match="schedule: must have a name of its own"):
        register(Another())
    assert schedule_named("1f1b").name == "1f1b"


def test_an_installed_schedule_is_known_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(name="late", value="tests.pipeplan.schedules.test_own_schedules:Late", group=registry.GROUP)
    monkeypatch.setattr(registry, "installed", lambda: (entry,))
    assert registry.schedule_names()[: len(BUILT_IN)] == BUILT_IN
    assert registry.schedule_names()[-1] == "late"
    assert schedule_named("late").name == "late"
    registry._KNOWN.pop("late")
