"""Sweep: the best plan for each of several values of a quantity that a user may vary."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.errors import InvalidInputError, require, require_count, require_one_of
from pipeplan.planners.problem import Planner, PlanningProblem
from pipeplan.questions.smallest import Progress, sub_cluster

VARIED = ("batch-size", "devices", "bandwidth", "memory")
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
    """A row for every value; if the planner refuses a value, the row says why.

    Raises InvalidInputError if the planner cannot be asked for any of them.
    """
    require_one_of(VARIED, "over", over)
    require(len(values) > 0, "over", "must name at least one value", over)
    problem = problem.corrected
    rows: list[SweepRow] = []
    errors: list[InvalidInputError] = []
    for done, value in enumerate(values):
        progress(done, len(values))
        try:
            answer = planner(_varied(problem, over, value))
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


def _varied(problem: PlanningProblem, over: str, value: float) -> PlanningProblem:
    """The problem with another value for one of `VARIED`, which errors name."""
    cluster = problem.cluster
    rule = "must be of one type to vary its memory"
    require(over != "memory" or not cluster.groups, "cluster.groups", rule, "groups")
    try:
        match over:
            case "batch-size":
                return replace(problem, batch_size=_whole(over, value))
            case "devices":
                return replace(problem, cluster=sub_cluster(cluster, _whole(over, value)))
            case "bandwidth":
                *inside, outermost = cluster.levels
                levels = (*inside, replace(outermost, bandwidth_bytes_per_s=value))
                return replace(problem, cluster=replace(cluster, levels=levels))
            case _:
                device = replace(cluster.device, memory_bytes=_whole(over, value))
                return replace(problem, cluster=replace(cluster, device=device))
    except InvalidInputError as error:
        raise InvalidInputError(over, error.rule, value) from error


def _whole(field: str, value: float) -> int:
    require(float(value).is_integer(), field, "must be a whole number", value)
    require_count(field, int(value))
    return int(value)
