"""Solvers' processes: bounded, replaced when they end, ended when nobody needs them, and never in anybody's way."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from pipeplan.documents.identity import canonical_json
from pipeplan.documents.plan import Answer
from pipeplan.errors import InvalidInputError, SolverError, UnavailableError
from pipeplan.planners.problem import Observer, PlanningProblem, SearchProgress, unobserved
from pipeplan.planners.solve import solve
from pipeplan.protocol.plans import PlanRequest
from planner_service.overview.openapi import CLUSTER, PROFILE
from planner_service.plans.questions import Answered, PlannerQuestion, Posed
from planner_service.plans.solver import FunctionSolver, SolverPool, SolverTicket, solver_pool, solver_process
from planner_service.platform.processes.pool import WorkerProcess
from tests.waiting import PATIENCE_S, wait_until

PROBLEM = PlanningProblem(profile=PROFILE, cluster=CLUSTER, batch_size=16)
POSED = Posed(
    request=PlanRequest(profile_id="p", cluster_id="c", planner="auto", batch_size=16),
    profile=canonical_json(PROFILE),
    cluster=canonical_json(CLUSTER),
)
MEMORY_BYTES = 2**30
_Process = WorkerProcess[PlannerQuestion, SearchProgress, Answered]


def _ask(pool: SolverPool, planner: str, observe: Observer = unobserved) -> SolverTicket:
    return pool.submit(PlannerQuestion(planner=planner, pose=POSED.problem), observe)


@pytest.fixture
def pool() -> Iterator[SolverPool]:
    """One process at a time, whose planners may misbehave."""
    made = solver_pool(lambda: solver_process(MEMORY_BYTES, "tests.planner_service.odd_solver"), solvers=1, queue=1)
    yield made
    made.close()


def test_a_process_answers_what_the_planner_answers_here(pool: SolverPool) -> None:
    answered = _ask(pool, "pipedream-2bw").future.result(PATIENCE_S)
    assert answered.answer == solve("pipedream-2bw", PROBLEM)
    assert answered.solve_time_s > 0


def test_what_a_planner_raises_arrives_as_it_was(pool: SolverPool) -> None:
    with pytest.raises(InvalidInputError) as caught:
        _ask(pool, "best").future.result(PATIENCE_S)
    assert (caught.value.field, caught.value.value) == ("planner", "best")
    assert _ask(pool, "gpipe").future.result(PATIENCE_S).answer == solve("gpipe", PROBLEM)


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("planner", "sentence"),
    [
        ("crash", "ended with status 1 and gave no answer"),
        ("killed", "most likely the machine ran out of memory"),
        ("greedy", "needed more memory than the 1,073,741,824 bytes"),
    ],
)
def test_a_process_that_ends_is_an_error_in_a_sentence_and_the_next_question_is_answered(
    pool: SolverPool, planner: str, sentence: str
) -> None:
    with pytest.raises(SolverError, match=sentence):
        _ask(pool, planner).future.result(PATIENCE_S)
    assert _ask(pool, "talkative").future.result(PATIENCE_S).answer == solve("pipedream-2bw", PROBLEM)


def test_progress_is_heard_and_a_cancelled_search_ends_with_its_process() -> None:
    started: list[_Process] = []

    def start() -> _Process:
        started.append(solver_process(MEMORY_BYTES, "tests.planner_service.odd_solver"))
        return started[-1]

    pool = solver_pool(start, solvers=1, queue=0)
    heard: list[SearchProgress] = []
    ticket = _ask(pool, "endless", heard.append)
    wait_until(lambda: bool(heard))
    ticket.cancel()
    with pytest.raises(UnavailableError, match="stopped"):
        ticket.future.result(PATIENCE_S)
    assert not started[0].alive
    assert _ask(pool, "gpipe").future.result(PATIENCE_S).answer == solve("gpipe", PROBLEM)
    assert len(started) == 2
    pool.close()
    assert not started[1].alive


def test_more_than_may_wait_are_refused_and_a_question_that_waits_can_be_taken_back(pool: SolverPool) -> None:
    at_work, waiting = _ask(pool, "endless"), _ask(pool, "gpipe")
    with pytest.raises(UnavailableError, match="1 plans are being made and 1 wait") as caught:
        _ask(pool, "gpipe")
    assert caught.value.retry_after_s >= 1
    waiting.cancel()
    with pytest.raises(CancelledError):
        waiting.future.result(PATIENCE_S)
    in_its_place = _ask(pool, "gpipe")
    at_work.cancel()
    assert in_its_place.future.result(PATIENCE_S).answer == solve("gpipe", PROBLEM)


def test_closing_ends_every_search_and_takes_no_more() -> None:
    pool = solver_pool(lambda: solver_process(MEMORY_BYTES, "tests.planner_service.odd_solver"), solvers=1, queue=1)
    tickets = [_ask(pool, "endless"), _ask(pool, "endless")]
    pool.close()
    for ticket in tickets:
        with pytest.raises((UnavailableError, CancelledError)):
            ticket.future.result(PATIENCE_S)
    with pytest.raises(UnavailableError, match="stopping"):
        _ask(pool, "gpipe")


def test_solvers_start_when_they_are_needed_are_used_again_and_end_when_idle() -> None:
    started: list[FunctionSolver] = []

    def start() -> FunctionSolver:
        started.append(FunctionSolver(lambda planner, problem: solve(planner, problem)))
        return started[-1]

    pool = solver_pool(start, solvers=2, queue=0, idle_s=0.05)
    assert started == []
    for _ in range(2):
        _ask(pool, "gpipe").future.result(PATIENCE_S)
        wait_until(lambda: pool.is_idle)
    wait_until(lambda: not any(solver.alive for solver in started))
    _ask(pool, "gpipe").future.result(PATIENCE_S)
    assert started[-1].alive
    pool.close()


def test_many_threads_share_few_solvers() -> None:
    at_once, most, lock = 0, 0, threading.Lock()

    def count(planner: str, problem: PlanningProblem) -> Answer:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        answer = solve(planner, problem)
        with lock:
            at_once -= 1
        return answer

    pool = solver_pool(lambda: FunctionSolver(count), solvers=2, queue=20)
    tickets = [_ask(pool, "gpipe") for _ in range(20)]
    answers = [ticket.future.result(PATIENCE_S).answer for ticket in tickets]
    pool.close()
    assert answers == [solve("gpipe", PROBLEM)] * 20
    assert most <= 2


def test_the_service_loads_neither_the_solver_nor_its_libraries() -> None:
    program = "import sys, planner_service.app; print([name for name in ('ortools', 'pandas') if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_a_solver_ends_with_whoever_started_it() -> None:
    program = (
        "from planner_service.plans.solver import solver_process; import time; "
        "solver = solver_process(0); print(solver.pid, flush=True); time.sleep(1000)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    wait_until(lambda: subprocess.run(["ps", "-o", "stat=", "-p", str(child)], capture_output=True).stdout == b"")
