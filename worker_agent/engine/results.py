"""Results and failures: a rank's last records, in files that the launcher gathers."""

import ast
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pipeplan.documents.identity import canonical_json
from pipeplan.documents.names import STRICT
from pipeplan.documents.profile import DeviceMemory
from pipeplan.documents.records import read_record
from pipeplan.errors import InvalidInputError, PipeplanError, RunFailedError
from pipeplan.programs.timeline_document import LaneDocument
from worker_agent.engine.cores import CoresUsed
from worker_agent.models.spec import described


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """One rank's measurements: its lane, totals over its batches, its largest resident size, its GPU's memory.

    The lane of a long run holds only the first and the last batches. `first_instructions` is the index at which the
    last ones begin; 0 if the lane holds all batches. `busy_s` are seconds of compute, `processor_s` the processor time
    in them (None: not known). `deferred_share` is p2's share of the split backwards in the lane (None: there are none).
    `first_processor_s` is the processor time from the start to the end of each of the first batches.
    `cores`: the use of the node's cores meanwhile. `reads_memory_of`: the ranks of its node that it has messages from
    by reading their memory (`same_node`). `stop_step`: the last step of a run that a signal has ended. The figures of
    each batch are in a file of their own (`batches`).
    """

    lane: LaneDocument
    first_instructions: int
    busy_s: float
    peak_memory_bytes: int | None
    peak_resident_bytes: int
    device_memory: DeviceMemory | None = None
    processor_s: float | None = None
    deferred_share: float | None = None
    first_processor_s: tuple[float, ...] = ()
    cores: CoresUsed | None = None
    reads_memory_of: tuple[int, ...] = ()
    stop_step: int | None = None

    __pydantic_config__: ClassVar = STRICT

    @property
    def off_processor_fraction(self) -> float | None:
        """The share of the compute time in which the process was not on a processor."""
        if self.processor_s is None or self.busy_s <= 0:
            return None
        return max(1.0 - self.processor_s / self.busy_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """Why one rank gave up: wrong input, an error of its own, or the loss of a peer that it waited for.

    "diverged" is an error as well: a number of the training is not finite.

    A rank that "hung" did not give up by itself: the launcher ended it.
    """

    kind: Literal["input", "error", "diverged", "peer", "hung"]
    message: str
    field: str | None = None
    rule: str | None = None
    value: str | None = None

    __pydantic_config__: ClassVar = STRICT


class DivergedError(RunFailedError):
    """The training has come to a loss, a gradient, a weight or a state that is not finite."""


def failure_of(error: BaseException, *, peer: bool = False) -> RankFailure:
    """The failure that an error means for its process. `peer` says that it comes from the loss of another rank."""
    if isinstance(error, InvalidInputError):
        value = repr(error.value)
        return RankFailure(kind="input", message=str(error), field=error.field, rule=error.rule, value=value)
    message = str(error) if isinstance(error, PipeplanError) else described(error)
    diverged = isinstance(error, DivergedError)
    return RankFailure(kind="peer" if peer else "diverged" if diverged else "error", message=message)


_RESERVE_BYTES = 8192


def reserve(path: Path) -> None:
    """Reserves disk space for a rank's result or failure: the failure may be that the disk is full."""
    _aside(path).write_bytes(b" " * _RESERVE_BYTES)


def write(path: Path, content: RankResult | RankFailure) -> None:
    """Writes a rank's result or failure, whole or not at all, into the reserved space. Raises RunFailedError."""
    aside = _aside(path)
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT)
        with os.fdopen(descriptor, "wb") as file:
            file.write(canonical_json(content).encode())
            file.truncate()
        aside.replace(path)
    except OSError as error:
        raise RunFailedError(f"cannot write {path}: {error}") from error


def _aside(path: Path) -> Path:
    return path.with_suffix(".part")


def invalid_input(failure: RankFailure) -> InvalidInputError:
    """The error that a rank found in its input."""
    try:
        value = ast.literal_eval(failure.value or "None")
    except (ValueError, SyntaxError):
        value = failure.value
    return InvalidInputError(failure.field or "run", failure.rule or failure.message, value)


def read_result(path: Path) -> RankResult | None:
    """A rank's measurements; None if it did not finish."""
    return read_record(RankResult, path.read_bytes()) if path.exists() else None


def read_failure(path: Path) -> RankFailure | None:
    """Why a rank gave up; None if it did not say."""
    return read_record(RankFailure, path.read_bytes()) if path.exists() else None
