"""Locked: a plan that is pinned with everything that it was made from, and whether its inputs have changed since.

A `Lock` needs no service: it holds the plan, the question, and the documents of the question, all with their hashes.
`moved_on` compares the lock with today's documents, which may be the same, and asks the planner again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from pipeplan.calibration.observed import costs_of
from pipeplan.documents.calibration import Calibration
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.engines import OUR_RUNTIME
from pipeplan.documents.identity import canonical_json, content_id, text_id
from pipeplan.documents.names import STRICT
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError, require_amount
from pipeplan.planners.complete import play, play_again, same_play
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.questions.changes import differences, flat, profile_changes

SCHEMA_VERSION = 1
"""The version of the lock's document."""

MOST_CHANGES = 30
"""The most lines of one finding's difference."""

TOLERANCE, GAIN = 0.05, 0.02
"""The default thresholds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedQuestion:
    """The request for the plan, with its documents."""

    planner: str
    batch_size: int
    options: Options
    profile: Profile
    other_profiles: tuple[Profile, ...] = ()
    cluster: Cluster
    calibration: Calibration | None = None

    __pydantic_config__: ClassVar = STRICT

    @property
    def problem(self) -> PlanningProblem:
        """The problem for planners. Raises InvalidInputError for documents that do not match."""
        return PlanningProblem(
            profile=self.profile,
            cluster=self.cluster,
            batch_size=self.batch_size,
            options=self.options,
            other_profiles=self.other_profiles,
            calibration=self.calibration,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A pinned plan: `ids` are the recorded hashes of its documents, by kind.

    `alias` is the name that pointed at it. `derived` holds the derived values in the plan's document: its depth, its
    price.
    """

    alias: str | None
    ids: Mapping[str, str | None]
    plan: Plan
    asked: LockedQuestion
    derived: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockFinding:
    """One finding of the check: whether it `holds`, `detail` with how or what is wrong, and `changes`, the lines of a
    diff.
    """

    what: str
    holds: bool
    detail: str
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The smallest changes that count, as fractions: of measured times and speeds, and of a better throughput."""

    tolerance: float = TOLERANCE
    gain: float = GAIN

    def __post_init__(self) -> None:
        require_amount("tolerance", self.tolerance)
        require_amount("gain", self.gain)


def ids_of(plan: Plan, asked: LockedQuestion) -> dict[str, str | None]:
    """The hashes of a lock's documents, by kind."""
    found: dict[str, str | None] = {"plan_id": content_id(plan), "profile_id": content_id(asked.profile)}
    for number, other in enumerate(asked.other_profiles, 1):
        found[f"other_profile_id_{number}"] = content_id(other)
    calibration = asked.calibration
    question = {"planner": asked.planner, "batch_size": asked.batch_size, "options": asked.options}
    return found | {
        "question_id": text_id(canonical_json(question)),
        "cluster_id": content_id(asked.cluster),
        "calibration_id": None if calibration is None else content_id(calibration),
    }


def whole(lock: Lock, derived: Mapping[str, object]) -> LockFinding:
    """Whether the lock is as it was written: its hashes must be those of its documents, and these the plan's.

    `derived` holds the values that a document derives from such a plan today. The price is played again.
    """
    plan, now = lock.plan, ids_of(lock.plan, lock.asked)
    if "question_id" not in lock.ids:  # of a lock from before there was one
        del now["question_id"]
    changes = differences(lock.ids, now)
    of_plan = {name: getattr(plan, name) for name in ("profile_id", "cluster_id", "calibration_id")}
    changes += differences(of_plan, {name: now[name] for name in of_plan}, prefix="plan.")
    changes += differences(lock.derived, {name: derived.get(name) for name in lock.derived}, prefix="plan.")
    again = play_again(plan)
    if again is not None and (plan.simulated is None or not same_play(again, plan.simulated)):
        changes.append(f"~ plan, played again: {again.throughput_samples_per_s:.6g} samples/s")
    detail = "not as it was written: what it says -> what its documents give" if changes else "as it was written"
    return LockFinding(what="lock", holds=not changes, detail=detail, changes=tuple(changes))


def moved_on(lock: Lock, now: LockedQuestion, thresholds: Thresholds) -> tuple[LockFinding, ...]:
    """Whether the blocks, the cluster or the calibration have changed, and whether there is a better plan now."""
    then, tolerance = lock.asked, thresholds.tolerance
    pairs = list(zip((then.profile, *then.other_profiles), (now.profile, *now.other_profiles), strict=False))
    blocks = [line for before, after in pairs for line in profile_changes(before, after, tolerance)]
    counts = [len(each.other_profiles) + 1 for each in (then, now)]
    blocks += [f"~ profiles: {counts[0]} -> {counts[1]}"] if counts[0] != counts[1] else []
    cluster = differences(*(dict(flat(each.cluster)) for each in (then, now)), tolerance=tolerance)
    calibrations = [None if each.calibration is None else content_id(each.calibration) for each in (then, now)]
    calibration = differences({"calibration_id": calibrations[0]}, {"calibration_id": calibrations[1]})
    return (
        _compared("blocks", blocks),
        _compared("cluster", cluster),
        _compared("calibration", calibration),
        _better_plan(lock, now, thresholds.gain),
    )


def plan_changes(then: Plan, now: Plan) -> tuple[str, ...]:
    """The differences of two plans, as lines of a diff."""
    return tuple(differences(_facts(then), _facts(now)))


def _compared(what: str, changes: Sequence[str]) -> LockFinding:
    shown = [*changes[:MOST_CHANGES]]
    if len(changes) > MOST_CHANGES:
        shown.append(f"... and {len(changes) - MOST_CHANGES} more")
    detail = f"changed since the plan was locked, {len(changes)} in all" if changes else "as when the plan was locked"
    return LockFinding(what=what, holds=not changes, detail=detail, changes=tuple(shown))


def _better_plan(lock: Lock, now: LockedQuestion, gain: float) -> LockFinding:
    """Asks the planner again. The locked plan is played with today's costs, if its own costs can be computed again."""
    what = "better plan"
    try:
        found = solve(now.planner, now.problem)
    except InvalidInputError as error:  # today's documents do not match each other, or the options
        detail = f"the planner {now.planner} cannot be asked any more: {error}"
        return LockFinding(what=what, holds=False, detail=detail)
    if isinstance(found, Infeasible):
        reasons = tuple(f"! {reason.rule}: {reason.detail}" for reason in found.reasons)
        return LockFinding(what=what, holds=False, detail="no plan fits any more", changes=reasons)
    plan, of_today = lock.plan, ""
    if now != lock.asked:
        repriced = _repriced(lock, now)
        of_today = ", as it was then" if repriced is None else ", with today's costs"
        plan = plan if repriced is None else repriced
    before, after = plan.throughput_samples_per_s, found.throughput_samples_per_s
    if before is None or after is None:
        before, after = plan.closed_form.throughput_samples_per_s, found.closed_form.throughput_samples_per_s
        of_today += ", by the closed form"
    detail = f"the locked plan gives {before:.6g} samples/s{of_today}; the planner {now.planner} finds {after:.6g}"
    holds = after <= before * (1.0 + gain)
    detail += "" if holds else f", {100 * (after / before - 1):+.1f} %"
    return LockFinding(what=what, holds=holds, detail=detail, changes=() if holds else plan_changes(lock.plan, found))


def _repriced(lock: Lock, now: LockedQuestion) -> Plan | None:
    """The locked plan with the costs of other documents, played; None if its costs cannot be computed again."""
    plan, then, after = lock.plan, lock.asked.problem.corrected, now.problem.corrected
    alike = len(after.profile.blocks) == plan.stages[-1].stop and after.cluster.devices == then.cluster.devices
    one_type = len(then.cluster.types) == len(after.cluster.types) == 1
    if not (alike and one_type and plan.engine == OUR_RUNTIME):
        return None
    if plan.microbatch_size not in after.profile.microbatch_sizes:
        return None
    if costs_of(plan, then.profile, then.cluster) != plan.costs:
        return None  # its costs depend on options of its request that a plan does not hold
    repriced = replace(plan, costs=costs_of(plan, after.profile, after.cluster))
    return replace(repriced, simulated=play(repriced))


def _facts(plan: Plan) -> dict[str, object]:
    stages = " ".join(f"{stage.start}-{stage.stop - 1}x{stage.replicas}" for stage in plan.stages)
    recomputing = [number for number, stage in enumerate(plan.stages) if stage.recompute]
    names = ("planner", "planner_version", "schedule", "microbatch_size", "microbatches", "batch_size", "chunks")
    facts: dict[str, object] = {name: getattr(plan, name) for name in names}
    facts |= {"split_backward": plan.split_backward, "engine": plan.engine, "sharding": plan.sharding}
    facts |= {"stages (blocks x replicas)": stages, "recomputing stages": recomputing}
    facts |= {name: value for name, value in plan.degrees.items() if name != "virtual_stages"}
    facts["samples/s"] = plan.throughput_samples_per_s
    return facts
