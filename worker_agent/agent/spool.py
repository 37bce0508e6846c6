"""Spool: reports to be sent to the service, a file each. Neither the service's absence nor the agent's end loses one.

    spool/00000001732193000000000000-<report id>.json     written to another file, flushed, renamed: never incomplete
    spool/refused/...                                     reports that the service refuses, each with the reason

A report is removed once the service has accepted it. If the answer is lost, the report is sent again under the same
id, and the service handles the repetition as the first.
"""

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipeplan.documents.files import dump, parse, read_text
from pipeplan.documents.names import STRICT
from pipeplan.errors import ConflictError, InvalidInputError, LeaseLostError, NotFoundError, PipeplanError
from pipeplan.protocol.jobs import AgentResult, Completion, Failure, Lease

Send = Callable[[str, str], object]
"""Posts a body to a path. Raises the error that the service reports."""

Log = Callable[[str], None]
REFUSED_KEPT = 100
_TOO_LARGE = "answered 413"
_REFUSALS = (LeaseLostError, ConflictError, NotFoundError, InvalidInputError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpooledReport:
    """A body to post, its path, and its job."""

    job_id: str
    path: str
    body: str

    __pydantic_config__: ClassVar = STRICT


def completion(lease: Lease, result: AgentResult, report_id: str) -> SpooledReport:
    return _report(lease, "complete", Completion(token=lease.token, report_id=report_id, result=result))


def failure(lease: Lease, error: str, report_id: str, *, retry: bool = False) -> SpooledReport:
    return _report(lease, "fail", Failure(token=lease.token, report_id=report_id, error=error, retry=retry))


def new_report_id() -> str:
    return secrets.token_hex(16)


class Spool:
    """A folder of reports, delivered in the order in which they were added."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last = 0

    def add(self, report: SpooledReport, report_id: str) -> None:
        """Stores a report: once this returns, the report survives a crash of the machine."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._last = max(self._last + 1, time.time_ns())
        path = self._folder / f"{self._last:026d}-{report_id}.json"
        aside = path.with_suffix(".part")
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # it holds a lease's token
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(dump(report))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        renamed = os.open(self._folder, os.O_RDONLY)  # the new name is also on the disk once the folder is flushed
        try:
            os.fsync(renamed)
        finally:
            os.close(renamed)

    def pending(self) -> list[Path]:
        """The reports that the service has not accepted yet, the oldest first."""
        return sorted(self._folder.glob("*.json"))

    def deliver(self, send: Send, log: Log) -> bool:
        """Sends the pending reports. Returns whether all are delivered; the others wait for the next delivery.

        It puts a report aside, with the reason, if the service will never accept it: another agent has the job, or the
        job is gone.
        """
        for path in self.pending():
            try:
                report = parse(SpooledReport, read_text(path))
            except InvalidInputError as error:
                self._refuse(path, f"unreadable: {error}", log)
                continue
            try:
                send(report.path, report.body)
            except _REFUSALS as error:
                self._refuse(path, f"job {report.job_id}: {error}", log)
            except PipeplanError as error:
                if _TOO_LARGE in str(error):
                    self._refuse(path, f"job {report.job_id}: {error}", log)
                    continue
                log(f"job {report.job_id}: its report waits: {error}")
                return False
            else:
                path.unlink()
        return True

    def _refuse(self, path: Path, reason: str, log: Log) -> None:
        aside = self._folder / "refused"
        aside.mkdir(exist_ok=True)
        (aside / f"{path.stem}.reason").write_text(reason + "\n", encoding="utf-8")
        path.replace(aside / path.name)
        for old in sorted(aside.iterdir())[: -2 * REFUSED_KEPT]:
            old.unlink()
        log(f"{reason} (kept in {aside})")


def _report(lease: Lease, verb: str, content: Completion | Failure) -> SpooledReport:
    return SpooledReport(job_id=lease.job.id, path=f"/v1/jobs/{lease.job.id}/{verb}", body=content.model_dump_json())
