"""Run files: what a run's folder tells others: the plan, its measured timeline, and the report."""

import json
from pathlib import Path

from pipeplan.calibration.samples import MeasuredRun
from pipeplan.documents.files import parse, read, read_text
from pipeplan.documents.plan import Plan
from pipeplan.errors import InvalidInputError
from pipeplan.programs.timeline import Timeline
from pipeplan.simulation.report import RankReport

PLAN, TIMELINE, REPORT = "plan.json", "timeline.json", "run.json"


def read_run(folder: Path) -> MeasuredRun:
    """The run in a folder that `pipeplan-agent run` wrote. Raises InvalidInputError, which names the file."""
    try:
        plan, timeline = read(Plan, folder / PLAN), read(Timeline, folder / TIMELINE)
        ranks = _ranks(folder / REPORT)
        of_devices = tuple(rank.device_memory for rank in ranks if rank.device_memory is not None)
        return MeasuredRun(
            plan=plan,
            timeline=timeline,
            peak_resident_bytes=tuple(rank.peak_resident_bytes for rank in ranks),
            device_memory=of_devices if len(of_devices) == len(ranks) else (),
        )
    except InvalidInputError as error:
        if str(folder) in f"{error.field} {error.value}":
            raise
        raise InvalidInputError(f"{folder}: {error.field}", error.rule, error.value) from error


def _ranks(path: Path) -> list[RankReport]:
    """Every process's part of the report, by rank."""
    try:
        ranks = [parse(RankReport, rank) for rank in json.loads(read_text(path))["ranks"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(str(path), "must be the report of a run", str(error)) from error
    return sorted(ranks, key=lambda rank: rank.rank)
