"""Locked: a plan that is pinned with everything that it was made from, and whether its inputs have changed since.

A `Lock` needs no service: it holds the plan, the question, and the documents of the question, all with their hashes.
`moved_on` compares the lock with today's documents, which may be the same, and asks the planner again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import groupby
from typing import Any, ClassVar

from pipeplan.calibration.observed import costs_of
from pipeplan.documents.calibration import Calibration
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.engines import OUR_RUNTIME
from pipeplan.documents.identity import canonical_json, content_id, text_id
from pipeplan.documents.names import STRICT
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError, require_amount
from pipeplan.planners.complete import play, play_again
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve

SCHEMA_VERSION = 1
"""Of the lock's document."""

MOST_CHANGES = 30
"""The most lines of one finding's difference."""

TOLERANCE, GAIN = 0.05, 0.02
"""The thresholds unless others are given."""

_MEASURED = ("_s", "_per_s", "_efficiency", "_factor", "_reserve", "_per_byte")
"""How the names of amounts end that differ a little between two measurements; others are counted."""

_LEFT_ASIDE = ("method", "spread", "forward_spread_s", "backward_spread_s")
"""How a profile was measured, and how steadily: not what it says of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedQuestion:
    """What the planner was asked when the plan was made, with the documents."""

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
        """It as planners take it. Raises InvalidInputError for documents that do not go together."""
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
    """A plan that is pinned: `ids` are the hashes of its documents, by what they are, as they were written down.

    `alias` is the name that pointed at it. `derived` is what the document says beside the plan: its depth, its price.
    """

    alias: str | None
    ids: Mapping[str, str | None]
    plan: Plan
    asked: LockedQuestion
    derived: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockFinding:
    """One thing that was looked at: `holds`, `detail` says how or what is wrong, `changes` are lines of a diff."""

    what: str
    holds: bool
    detail: str
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """From when on a change counts: of measured times and speeds, and of a better plan's throughput, as fractions."""

    tolerance: float = TOLERANCE
    gain: float = GAIN

    def __post_init__(self) -> None:
        require_amount("tolerance", self.tolerance)
        require_amount("gain", self.gain)


def ids_of(plan: Plan, asked: LockedQuestion) -> dict[str, str | None]:
    """The hashes of a lock's documents, by what they are."""
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
    """Whether the lock is as it was written: its hashes are those of its documents, which are the plan's.

    `derived` is what a document says today beside such a plan. Its price is played again.
    """
    plan, now = lock.plan, ids_of(lock.plan, lock.asked)
    if "question_id" not in lock.ids:  # of a lock from before there was one
        del now["question_id"]
    changes = _differences("", lock.ids, now)
    of_plan = {name: getattr(plan, name) for name in ("profile_id", "cluster_id", "calibration_id")}
    changes += _differences("plan.", of_plan, {name: now[name] for name in of_plan})
    changes += _differences("plan.", lock.derived, {name: derived.get(name) for name in lock.derived})
    again = play_again(plan)
    if again is not None and again != plan.simulated:
        changes.append(f"~ plan, played again: {again.throughput_samples_per_s:.6g} samples/s")
    detail = "not as it was written: what it says -> what its documents give" if changes else "as it was written"
    return LockFinding(what="lock", holds=not changes, detail=detail, changes=tuple(changes))


def moved_on(lock: Lock, now: LockedQuestion, thresholds: Thresholds) -> tuple[LockFinding, ...]:
    """Whether the blocks, the cluster or the calibration have changed, and whether there is a better plan now."""
    then, tolerance = lock.asked, thresholds.tolerance
    pairs = list(zip((then.profile, *then.other_profiles), (now.profile, *now.other_profiles), strict=False))
    blocks = [line for before, after in pairs for line in _profile_changes(before, after, tolerance)]
    counts = [len(each.other_profiles) + 1 for each in (then, now)]
    blocks += [f"~ profiles: {counts[0]} -> {counts[1]}"] if counts[0] != counts[1] else []
    cluster = _differences("", *(dict(_flat(each.cluster)) for each in (then, now)), tolerance=tolerance)
    calibrations = [None if each.calibration is None else content_id(each.calibration) for each in (then, now)]
    calibration = _differences("", {"calibration_id": calibrations[0]}, {"calibration_id": calibrations[1]})
    return (
        _compared("blocks", blocks),
        _compared("cluster", cluster),
        _compared("calibration", calibration),
        _better_plan(lock, now, thresholds.gain),
    )


def plan_changes(then: Plan, now: Plan) -> tuple[str, ...]:
    """What two plans do differently, as lines of a diff."""
    return tuple(_differences("", _facts(then), _facts(now)))


def _compared(what: str, changes: Sequence[str]) -> LockFinding:
    shown = [*changes[:MOST_CHANGES]]
    if len(changes) > MOST_CHANGES:
        shown.append(f"... and {len(changes) - MOST_CHANGES} more")
    detail = f"changed since the plan was locked, {len(changes)} in all" if changes else "as when the plan was locked"
    return LockFinding(what=what, holds=not changes, detail=detail, changes=tuple(shown))


def _better_plan(lock: Lock, now: LockedQuestion, gain: float) -> LockFinding:
    """Asks the planner again; the locked plan is played with today's costs, where its own can be computed again."""
    what = "better plan"
    try:
        found = solve(now.planner, now.problem)
    except InvalidInputError as error:  # the documents of today do not go together, or not with the options
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
    """The locked plan with the costs of other documents, played; None where its costs cannot be computed again."""
    plan, then, after = lock.plan, lock.asked.problem.corrected, now.problem.corrected
    alike = len(after.profile.blocks) == plan.stages[-1].stop and after.cluster.devices == then.cluster.devices
    one_type = len(then.cluster.types) == len(after.cluster.types) == 1
    if not (alike and one_type and plan.engine == OUR_RUNTIME):
        return None
    if plan.microbatch_size not in after.profile.microbatch_sizes:
        return None
    if costs_of(plan, then.profile, then.cluster) != plan.costs:
        return None  # it was asked for with options that its costs depend on, and that a plan does not hold
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


def _profile_changes(then: Profile, now: Profile, tolerance: float) -> list[str]:
    """Lines for blocks that are new, gone or different, then for all else; equal changes of neighbours are one line."""
    if then == now:
        return []
    before, after = ({block.name: block for block in profile.blocks} for profile in (then, now))
    lines = []
    for name, block in before.items():
        if name not in after:
            lines.append((name, "-", f"{block.weight_bytes} weight_bytes"))
        else:
            values = [dict(_flat(each)) for each in (block, after[name])]
            found = _differences("", *values, tolerance=tolerance)
            lines += [(name, "~", "; ".join(line.removeprefix("~ ") for line in found))] if found else []
    lines += [(name, "+", f"{after[name].weight_bytes} weight_bytes") for name in after if name not in before]

    shown = []
    for (sign, change), names in groupby(lines, key=lambda line: line[1:]):
        named = [name for name, _, _ in names]
        alike = named[0] if len(named) == 1 else f"{named[0]} ... {named[-1]} ({len(named)} blocks)"
        shown.append(f"{sign} {alike}: {change}")
    kept = [[name for name in each if name in before and name in after] for each in (before, after)]
    shown += ["~ order of the blocks"] if kept[0] != kept[1] else []
    rest = [{name: value for name, value in _flat(each) if not name.startswith("blocks.")} for each in (then, now)]
    return shown + _differences("", *rest, tolerance=tolerance)


def _differences(
    prefix: str, then: Mapping[str, object], now: Mapping[str, object], *, tolerance: float = 0.0
) -> list[str]:
    """A line for each value that differs; of measured amounts by more than the tolerance."""
    lines = []
    for name in [*then, *(name for name in now if name not in then)]:
        before, after = then.get(name), now.get(name)
        if before == after or (name.endswith(_MEASURED) and _near(before, after, tolerance)):
            continue
        percent = ""
        if isinstance(before, int | float) and isinstance(after, int | float) and before:
            percent = f" ({100 * (after / before - 1):+.1f} %)"
        lines.append(f"~ {prefix}{name}: {_shown(before)} -> {_shown(after)}{percent}")
    return lines


def _near(before: object, after: object, tolerance: float) -> bool:
    if not isinstance(before, int | float) or not isinstance(after, int | float):
        return False
    return abs(after - before) <= tolerance * abs(before)


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """The plain values of a document by their paths; measurements by their microbatch size."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in _LEFT_ASIDE and inner is not None and inner != ():
                yield from _flat(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, tuple) and value and is_dataclass(value[0]):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{path}.{getattr(inner, 'microbatch_size', index)}")
    else:
        yield path, value
