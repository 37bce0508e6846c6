"""Verify: whether a plan is what it says, by the numbers that it holds, without searching again."""

from dataclasses import dataclass, replace

from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Plan
from pipeplan.errors import PipeplanError
from pipeplan.planners.complete import SIMULATED_INSTRUCTIONS, play
from pipeplan.planners.pipedream.certificate import check_certificate
from pipeplan.planners.problem import PlanningProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at: `holds`, and in `detail` how, or what is wrong."""

    what: str
    holds: bool
    detail: str


def verify(plan: Plan, problem: PlanningProblem) -> tuple[Finding, ...]:
    """What the plan says of where it comes from, of its streams, and of its optimality. It is proven if all hold.

    `problem` is the one that was planned for, with its options. The optimality is that of the plan's own certificate;
    one without a witness is no proof that can be checked without searching again.
    """
    return (_origin(plan, problem), _played(plan), _optimal(plan, problem))


def _origin(plan: Plan, problem: PlanningProblem) -> Finding:
    ids = {
        "profile": (plan.profile_id, content_id(problem.profile)),
        "cluster": (plan.cluster_id, content_id(problem.cluster)),
        "calibration": (plan.calibration_id, problem.calibration and content_id(problem.calibration)),
    }
    others = [
        f"the plan's {name} is {its or 'none'}, this is {given or 'none'}"
        for name, (its, given) in ids.items()
        if its != given
    ]
    return Finding(
        what="origin", holds=not others, detail="; ".join(others) or "made from this profile and this cluster"
    )


def _played(plan: Plan) -> Finding:
    within = plan.simulated.added_within if plan.simulated else None
    simulated = play(replace(plan, simulated=None), instructions=within or SIMULATED_INSTRUCTIONS)
    if simulated is not None and within is not None:
        simulated = replace(simulated, added_within=within)
    if simulated is None:
        holds = plan.simulated is None
        detail = "its streams are too long to be played"
        if not holds:
            detail += ", yet it holds what they gave when played"
        return Finding(what="play", holds=holds, detail=detail)
    if plan.simulated is None:
        given = simulated.throughput_samples_per_s
        detail = f"it does not hold what its streams give: played, {given:.6g} samples/s"
        return Finding(what="play", holds=False, detail=detail)
    now, then = simulated.throughput_samples_per_s, plan.simulated.throughput_samples_per_s
    if simulated != plan.simulated:
        return Finding(
            what="play", holds=False, detail=f"played, its streams give {now:.6g} samples/s; it says {then:.6g}"
        )
    return Finding(what="play", holds=True, detail=f"played again, its streams give the same {now:.6g} samples/s")


def _optimal(plan: Plan, problem: PlanningProblem) -> Finding:
    held = plan.certificate
    if held is None or held.method != "machines needed":
        detail = "the plan holds no numbers that prove it" if held is None else f"by {held.method}: {held.claim}"
        return Finding(what="optimality", holds=False, detail=detail)
    try:
        check_certificate(plan, problem.corrected)
    except PipeplanError as error:
        return Finding(what="optimality", holds=False, detail=str(error))
    if held.gap > 1e-9:
        return Finding(what="optimality", holds=True, detail=f"at most {held.gap:.2%} from the optimum")
    return Finding(what="optimality", holds=True, detail=f"no plan has a {held.quantity} below {held.bound:.6g}")
