"""Turns: contenders in processes of their own, all started before the first round, that work one after the other.

What one contender allocates or leaves running is not in another's figures, and what else the machine does falls on all
of them alike. The chance layout of a process's memory changes its speed by a few percent for its whole life; contenders
can therefore be started several times.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import IO

import torch.distributed as dist

_RANK, _RANKS, _STORE = "TURNS_RANK", "TURNS_RANKS", "TURNS_STORE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a contender took: wall and processor seconds of all its ranks, a round; peak resident bytes by rank."""

    wall_s: tuple[float, ...]
    processor_s: tuple[float, ...]
    resident_bytes: tuple[int, ...]


def take_turns(commands: Mapping[str, Sequence[str]], *, ranks: int, rounds: int, starts: int = 1) -> dict[str, Found]:
    """Runs `python -m COMMAND` on so many ranks for each contender; every one works in each of the rounds.

    A round before the first does not count. With several `starts` all of that again, with new processes in
    another order; of their peaks the median counts. Raises RuntimeError if a contender ends early.
    """
    names = list(commands)
    orders = [names[first:] + names[:first] for first in (start % len(names) for start in range(starts))]
    found = [_once({name: commands[name] for name in order}, ranks, rounds) for order in orders]
    return {
        name: Found(
            wall_s=tuple(wall_s for once in found for wall_s in once[name].wall_s),
            processor_s=tuple(processor_s for once in found for processor_s in once[name].processor_s),
            resident_bytes=tuple(map(median_low, zip(*(once[name].resident_bytes for once in found), strict=True))),
        )
        for name in commands
    }


def _once(commands: Mapping[str, Sequence[str]], ranks: int, rounds: int) -> dict[str, Found]:
    with ExitStack() as stack:
        contenders = {name: stack.enter_context(_Contender(name, command, ranks)) for name, command in commands.items()}
        rows: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for number in range(rounds + 1):
            for name, contender in contenders.items():
                row = contender.work()
                if number > 0:
                    rows[name].append(row)
        return {
            name: Found(
                wall_s=tuple(wall_s for wall_s, _ in rows[name]),
                processor_s=tuple(processor_s for _, processor_s in rows[name]),
                resident_bytes=contender.end(),
            )
            for name, contender in contenders.items()
        }


def ratio(own: Sequence[float], peer: Sequence[float]) -> float:
    """The median over the rounds of own / peer."""
    return median(a / b for a, b in zip(own, peer, strict=True))


class _Contender:
    """The processes of one contender."""

    def __init__(self, name: str, command: Sequence[str], ranks: int) -> None:
        self._name = name
        self._folder = tempfile.TemporaryDirectory()
        self._processes = [self._start(command, rank, ranks) for rank in range(ranks)]

    def __enter__(self) -> "_Contender":
        for process in self._processes:
            self._read(process)  # it is ready
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._folder.cleanup()

    def work(self) -> tuple[float, float]:
        """One round: wall seconds from its start to its last rank's end, processor seconds of all ranks."""
        start_s = time.monotonic()
        for process in self._processes:
            self._write(process, "work")
        done = [self._read(process) for process in self._processes]
        return max(end_s for end_s, _ in done) - start_s, sum(processor_s for _, processor_s in done)

    def end(self) -> tuple[int, ...]:
        """Ends the processes; returns their peak resident bytes, by rank."""
        for process in self._processes:
            self._write(process, "end")
        return tuple(int(self._read(process)[0]) for process in self._processes)

    def _start(self, command: Sequence[str], rank: int, ranks: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {_RANK: str(rank), _RANKS: str(ranks), _STORE: str(Path(self._folder.name, "store"))},
        )

    def _write(self, process: subprocess.Popen[str], word: str) -> None:
        print(word, file=process.stdin, flush=True)

    def _read(self, process: subprocess.Popen[str]) -> list[float]:
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            raise RuntimeError(f"{self._name} ended early")
        words: list[float] = json.loads(line)
        return words


class Turn:
    """A rank's side. It is made once everything is imported, and joins the contender's ranks in a process group."""

    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ[_RANK]), int(os.environ[_RANKS])
        self._answers: IO[str] = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # other output is not an answer
        self._worked = False
        self._processor_s = 0.0
        store = f"file://{os.environ[_STORE]}"
        dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=self.ranks)

    def take(self) -> bool:
        """Says that the work of a round is done, or before the first that all is ready; waits for the next one.

        False after the last: there is nothing more to do.
        """
        self._answer(time.monotonic(), time.process_time() - self._processor_s)
        word = sys.stdin.readline()
        self._processor_s = time.process_time()
        return word == "work\n"

    def end(self) -> None:
        """Says what the process took at its peak, and ends it."""
        status = Path("/proc/self/status").read_text()  # getrusage would count the process that this one came from
        peak_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        self._answer(peak_kib * 1024)
        os._exit(0)

    def _answer(self, *numbers: float) -> None:
        print(json.dumps(numbers), file=self._answers, flush=True)
