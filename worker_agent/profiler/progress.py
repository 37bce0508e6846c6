"""Progress: a file that the first rank adds a line to at every step, and the launcher follows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from worker_agent.polling import polling

OnProgress = Callable[[int, int, str], None]
"""Called with the steps done, all steps, and what is being done."""

_INTERVAL_S = 0.2


class ProgressWriter:
    """Counts steps; on the ranks after the first it says nothing."""

    def __init__(self, path: Path, *, rank: int, total: int) -> None:
        self._path = path if rank == 0 else None
        self._total = total
        self._done = 0

    def say(self, message: str) -> None:
        """What is being done now."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{self._done} {self._total} {message}\n")

    def step(self, message: str) -> None:
        """One step more is done, and what comes now."""
        self._done += 1
        self.say(message)


@contextmanager
def following(path: Path, on_progress: OnProgress) -> Iterator[None]:
    """Calls `on_progress` whenever the file has a new last line, from a thread of its own."""
    seen = ""

    def report() -> None:
        nonlocal seen
        line = _last_line(path)
        if line and line != seen:
            seen = line
            done, total, message = line.split(" ", 2)
            on_progress(int(done), int(total), message)

    try:
        with polling(report, _INTERVAL_S, name="progress"):
            yield
    finally:
        report()


def _last_line(path: Path) -> str:
    """The last whole line; empty where there is none yet."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return lines[-1] if lines else ""
