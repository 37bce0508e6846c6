"""Results: checks and packs agents' reports at a job's end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeplan.documents.identity import content_id
from pipeplan.errors import require
from pipeplan.protocol.jobs import Completion, PartResult, parse_completion
from planner_service.jobs.gangs import Hold

Packers = Mapping[str, Callable[[Any], Any]]
"""By kind of job, the function that packs its results (`kinds.packers`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedReport:
    """A completion with its result as it is stored. `result_id` is the hash of the result's content."""

    token: str
    report_id: str | None
    kind: str
    result_id: str
    kept: object


def read(packers: Packers, content: bytes) -> PackedReport:
    """The report that a body holds. Raises InvalidInputError."""
    return report_of(packers, parse_completion(content))


def report_of(packers: Packers, completion: Completion) -> PackedReport:
    """Packs a completion; a large one takes seconds. Raises InvalidInputError for a result that cannot be shown."""
    result = completion.result
    return PackedReport(
        token=completion.token,
        report_id=completion.report_id,
        kind=result.kind,
        result_id=content_id(result.model_dump(mode="json")),
        kept=result if isinstance(result, PartResult) else packers[result.kind](result),
    )


def require_whole(hold: Hold, kind: str) -> None:
    """Raises InvalidInputError unless the result is of the job's kind and comes from the holder that must report it."""
    require(kind == hold.job.task.kind, "result.kind", f"must be {hold.job.task.kind}", kind)
    first = hold.member is None or hold.member.node_rank == 0
    require(first, "result.kind", "must be part: node rank 0 has the result", kind)
