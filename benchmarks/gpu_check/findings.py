"""Findings: the results of a part of the check, in a file that is complete after every step, whatever ends the part."""

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Case = Callable[[], Mapping[str, Any]]
"""Returns its figures; any error except NotRunError is a failure."""


class NotRunError(Exception):
    """A case has nothing to run: says why."""


@dataclass(slots=True, kw_only=True)
class Found:
    """Figures and seconds by case, failures with their tracebacks, what was left out and why, and the cases to come.

    `done` says that the part came to its end.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    to_come: list[str] = field(default_factory=list)
    done: bool = False


class Findings:
    """The interface for a part: `short` asks for the short form, `seconds` is its time."""

    def __init__(self, path: Path, *, seconds: float, short: bool) -> None:
        self.short = short
        self._path = path
        self._end_s = time.monotonic() + seconds
        self._found = Found()
        self._write()

    @property
    def seconds_left(self) -> float:
        """Of the part's time."""
        return self._end_s - time.monotonic()

    def run(self, cases: Mapping[str, Case]) -> bool:
        """Runs cases one after another; returns whether all ran and passed.

        A case that fails does not stop the others.
        """
        complete = True
        self._found.to_come = list(cases)
        for name, case in cases.items():
            if self.seconds_left <= 0:
                self.leave_out(name, "the part's share of the time was spent")
                passed = False
            else:
                passed = self._passes(name, case)
            self._found.to_come.remove(name)
            self._write()
            complete = complete and passed
        return complete

    def leave_out(self, what: str, why: str) -> None:
        """Records what is not run."""
        self._found.left_out.append({"what": what, "why": why})
        print(f"  {what}: left out, {why}", flush=True)
        self._write()

    def fail(self, case: str, error: BaseException) -> None:
        """Records a failure."""
        text = "".join(traceback.format_exception(error))
        self._found.failures.append({"case": case, "error": f"{type(error).__name__}: {error}", "traceback": text})
        print(f"  {case}: FAILED, {type(error).__name__}: {error}", flush=True)
        self._write()

    def end(self) -> None:
        """Records that the part came to its end."""
        self._found.done = True
        self._write()

    def _passes(self, name: str, case: Case) -> bool:
        start_s = time.monotonic()
        try:
            figures = dict(case())
            json.dumps(figures, allow_nan=False)
        except NotRunError as reason:
            self.leave_out(name, str(reason))
            return False
        except Exception as error:  # whatever a case raises is a finding, and the next case still runs
            self.fail(name, error)
            return False
        self._found.figures[name] = figures
        self._found.seconds[name] = round(time.monotonic() - start_s, 3)
        print(f"  {name}: {self._found.seconds[name]:.1f} s{_brief(figures)}", flush=True)
        return True

    def _write(self) -> None:
        aside = self._path.with_suffix(".part")
        aside.write_text(json.dumps(asdict(self._found)), encoding="utf-8")
        aside.replace(self._path)


def read_found(path: Path) -> Found:
    """A part's findings so far; none if it has not begun."""
    return Found(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else Found()


def _brief(figures: Mapping[str, Any]) -> str:
    """The first figures, for a line."""
    plain = [(name, value) for name, value in figures.items() if isinstance(value, int | float | str)]
    texts = ((name, f"{value:.4g}" if isinstance(value, float) else value) for name, value in plain[:5])
    return "".join(f", {name} {text}" for name, text in texts)
