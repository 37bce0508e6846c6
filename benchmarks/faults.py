"""Faults at random points: `python -m benchmarks.faults [--points 100] [--seed 0] [--first 0] [--parallel 2]`.

At seeded points (schedule, rank, phase, instruction) a rank of a real run is killed (-9), stopped (SIGSTOP), or slowed
down (stopped and continued, again and again). The culprit must be named, a killed one within 1 s, a stopped one within
15 s, a slow one never; no process may be left; the run must end, by `--max-restarts` or `--resume`, with the weights,
optimizer states and buffers of an undisturbed run, bit for bit, having read every microbatch after its checkpoint once.
The exit status is 1 if anything was otherwise.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks.faults_point import ACTIONS, PHASES, Action, Outcome, Point, draw, strike, undisturbed
from benchmarks.faults_work import SCHEDULES

MIX: tuple[Action, ...] = ("kill", "kill", "stop", "kill", "slow")
"""The actions, in turn."""

Done = list[tuple[Point, Outcome]]


def points(count: int, seed: int, first: int = 0) -> list[Point]:
    """A number of points: every action meets every phase, and both meet every schedule in turn."""
    return [
        draw(n, SCHEDULES[(n + n // 20) % 5], MIX[n % 5], PHASES[(n + n // 4) % 4], seed)
        for n in range(first, first + count)
    ]


def campaign(chosen: Sequence[Point], folder: Path, parallel: int) -> Done:
    """Tries all points, some at a time, and reports each result."""
    whole = {name: undisturbed(name, folder) for name in sorted({point.schedule for point in chosen})}
    begun_s = time.monotonic()
    done: Done = []

    def one(point: Point) -> None:
        outcome = strike(point, whole[point.schedule], folder)
        done.append((point, outcome))
        named = f"named in {outcome.naming_s:.2f} s" if outcome.naming_s is not None else "-"
        print(
            f"[{len(done)}/{len(chosen)}, {time.monotonic() - begun_s:.0f} s] {point.number}: {point}"
            f" at {outcome.place}: {named}, {'; '.join(outcome.wrong) or 'right'}",
            file=sys.stderr,
            flush=True,
        )

    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(one, chosen))
    return done


def table(done: Done) -> str:
    """One line for each action and phase."""
    lines = [
        "| | struck in | points | naming s, median | largest | wrong |",
        "|---|---|---|---|---|---|",
    ]
    for action in ACTIONS:
        for phase in PHASES:
            outcomes = [outcome for point, outcome in done if (point.action, point.phase) == (action, phase)]
            if outcomes:
                lines.append(_line(action, phase, outcomes))
    return "\n".join(lines)


def _line(action: str, phase: str, outcomes: Sequence[Outcome]) -> str:
    times = [outcome.naming_s for outcome in outcomes if outcome.naming_s is not None]
    named = (f"{median(times):.2f}", f"{max(times):.2f}") if times else ("", "")
    wrong = sum(1 for outcome in outcomes if outcome.wrong)
    return f"| {action} | {phase} | {len(outcomes)} | {named[0]} | {named[1]} | {wrong} |"


def main() -> None:
    """Prints one line for each point on standard error, and the table."""
    parser = argparse.ArgumentParser(description="Kills, stops and slows ranks at random points of real runs.")
    parser.add_argument("--points", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first point")
    parser.add_argument("--parallel", type=int, default=2, help="points that are tried at once")
    parser.add_argument("--keep", type=Path, help="a folder in which the runs stay")
    given = parser.parse_args()
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        done = campaign(points(given.points, given.seed, given.first), folder, given.parallel)
    print(table(done))
    wrong = sum(1 for _, outcome in done if outcome.wrong)
    print(f"\n{len(done)} points in {time.monotonic() - begun_s:.0f} s, {wrong} of them with something wrong")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
