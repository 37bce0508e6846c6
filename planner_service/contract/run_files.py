"""Run files: what a run's folder tells others: the plan, its measured timeline, and the report."""

import json
from pathlib import Path

from planner_service.contract.documents import parse, read, read_text
from planner_service.core.calibrate.samples import MeasuredRun
from planner_service.core.errors import InvalidInputError
from planner_service.core.plan import Plan
from planner_service.core.report import RankReport
from planner_service.core.timeline import Timeline

PLAN, TIMELINE, REPORT = "plan.json", "timeline.json", "run.json"


def read_run(folder: Path) -> MeasuredRun:
    """The run in a folder that `pipeplan-agent run` wrote. Raises InvalidInputError, which names the file."""
    try:
        return MeasuredRun(
            plan=read(Plan, folder / PLAN),
            timeline=read(Timeline, folder / TIMELINE),
            peak_resident_bytes=_peak_resident_bytes(folder / REPORT),
        )
    except InvalidInputError as error:
        if str(folder) in f"{error.field} {error.value}":
            raise
        raise InvalidInputError(f"{folder}: {error.field}", error.rule, error.value) from error


def _peak_resident_bytes(path: Path) -> tuple[int, ...]:
    """Every process's, by rank, from the report."""
    try:
        ranks = [parse(RankReport, rank) for rank in json.loads(read_text(path))["ranks"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(str(path), "must be the report of a run", str(error)) from error
    return tuple(rank.peak_resident_bytes for rank in sorted(ranks, key=lambda rank: rank.rank))
