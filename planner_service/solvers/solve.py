"""Solve: the planners by name, and the one function that asks them."""

from dataclasses import replace

from planner_service.core.errors import require
from planner_service.core.identity import content_id
from planner_service.core.plan import Answer, Plan
from planner_service.core.planner.gpipe import gpipe
from planner_service.core.planner.pipedream import pipedream
from planner_service.core.planner.problem import Planner, Problem
from planner_service.core.planner.two_bw import two_bw

PLANNERS: dict[str, Planner] = {"pipedream": pipedream, "pipedream-2bw": two_bw, "gpipe": gpipe}


def solve(planner: str, problem: Problem) -> Answer:
    """The planner's answer to the problem as its calibration corrects it, with the ids of what was given.

    Raises InvalidInputError for a planner that does not exist, or what it cannot be asked.
    """
    require(planner in PLANNERS, "planner", f"must be one of {', '.join(PLANNERS)}", planner)
    answer = PLANNERS[planner](problem.corrected)
    if problem.calibration is None or not isinstance(answer, Plan):
        return answer
    return replace(
        answer,
        profile_id=content_id(problem.profile),
        cluster_id=content_id(problem.cluster),
        calibration_id=content_id(problem.calibration),
    )
