"""Sweep: the best plan for one value after the other of what a user may vary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.errors import InvalidInputError, require, require_count
from pipeplan.planners.problem import Planner, PlanningProblem
from pipeplan.questions.smallest import Progress, sub_cluster


def _with_batch_size(problem: PlanningProblem, value: float) -> PlanningProblem:
    return replace(problem, batch_size=_whole("batch-size", value))


def _with_devices(problem: PlanningProblem, value: float) -> PlanningProblem:
    return replace(problem, cluster=sub_cluster(problem.cluster, _whole("devices", value)))


def _with_bandwidth(problem: PlanningProblem, value: float) -> PlanningProblem:
    *inside, outermost = problem.cluster.levels
    levels = (*inside, replace(outermost, bandwidth_bytes_per_s=value))
    return replace(problem, cluster=replace(problem.cluster, levels=levels))


def _with_memory(problem: PlanningProblem, value: float) -> PlanningProblem:
    device = replace(problem.cluster.device, memory_bytes=_whole("memory", value))
    require(not problem.cluster.groups, "cluster.groups", "must be of one type to vary its memory", "groups")
    return replace(problem, cluster=replace(problem.cluster, device=device))


VARIED: dict[str, Callable[[PlanningProblem, float], PlanningProblem]] = {
    "batch-size": _with_batch_size,
    "devices": _with_devices,
    "bandwidth": _with_bandwidth,
    "memory": _with_memory,
}
"""Samples of a batch, the cluster's first devices, bytes a second of its outermost level, bytes of a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """A value, and the best plan for it; or why there is none."""

    value: float
    plan: Plan | None = None
    reason: str | None = None


def sweep(
    problem: PlanningProblem,
    planner: Planner,
    over: str,
    values: Sequence[float],
    progress: Progress = lambda done, total: None,
) -> tuple[SweepRow, ...]:
    """A row a value. What the planner cannot be asked for one value is that row's reason.

    Raises InvalidInputError if it cannot be asked for any.
    """
    require(over in VARIED, "over", f"must be one of {', '.join(VARIED)}", over)
    require(len(values) > 0, "over", "must name at least one value", over)
    problem = problem.corrected
    rows: list[SweepRow] = []
    errors: list[InvalidInputError] = []
    for done, value in enumerate(values):
        progress(done, len(values))
        try:
            answer = planner(VARIED[over](problem, value))
        except InvalidInputError as error:
            errors.append(error)
            rows.append(SweepRow(value=value, reason=str(error)))
            continue
        if isinstance(answer, Infeasible):
            rows.append(SweepRow(value=value, reason=answer.reasons[0].detail))
        else:
            rows.append(SweepRow(value=value, plan=answer))
    if len(errors) == len(values):
        raise errors[0]
    return tuple(rows)


def _whole(field: str, value: float) -> int:
    require(float(value).is_integer(), field, "must be a whole number", value)
    require_count(field, int(value))
    return int(value)
