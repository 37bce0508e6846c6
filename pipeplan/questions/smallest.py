"""Smallest: the fewest devices of a cluster on which a model trains at a given throughput.

The search goes through the sub-clusters: the first devices of a cluster, where these form a cluster.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.errors import LEAST_AMOUNT, InvalidInputError, require, require_amount
from pipeplan.planners.problem import Planner, PlanningProblem

Progress = Callable[[int, int], None]
"""Called with the number of answered questions, and the total."""

_ROUNDING = 1e-9


def sub_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """The sub-clusters by their number of devices: 1, 2, ... within a server, then whole servers, and so on outwards.

    Raises InvalidInputError for devices of several types, because the first devices do not represent all.
    """
    names = [device.name for device in cluster.types]
    require(len(names) == 1, "cluster.groups", "must be of one type for this question", names)
    cluster = replace(cluster, groups=())
    yield replace(cluster, levels=(replace(cluster.levels[0], size=1),))
    for outermost, level in enumerate(cluster.levels):
        inside = cluster.levels[:outermost]
        for size in range(2, level.size + 1):
            yield replace(cluster, levels=(*inside, replace(level, size=size)))


def sub_cluster(cluster: Cluster, devices: int) -> Cluster:
    """The sub-cluster with `devices` devices. Raises InvalidInputError if there is none."""
    sizes = []
    for smaller in sub_clusters(cluster):
        if smaller.devices == devices:
            return smaller
        sizes.append(smaller.devices)
    shown = ", ".join(map(str, sizes[:16])) + (", ..." if len(sizes) > 16 else "")
    raise InvalidInputError("devices", f"must be whole units of a level of the cluster: {shown}", devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestStep:
    """A number of devices, and the throughput of their best plan or why there is none.

    The throughput is the played one, None if the plan was not played: the closed form's is then used instead.
    """

    devices: int
    sizes: tuple[int, ...]
    throughput_samples_per_s: float | None = None
    closed_form_samples_per_s: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """The fewest devices that reach the throughput, their plan, and what the next smaller sub-cluster gives.

    If no sub-cluster reaches it, `plan` is None and `fastest` comes nearest. `skipped` counts the sub-clusters that
    have too few devices for the blocks' compute alone.
    """

    throughput_samples_per_s: float
    devices: int | None
    plan: Plan | None
    next_fewer: SmallestStep | None
    fastest: SmallestStep | None
    tried: tuple[SmallestStep, ...]
    skipped: int


def rate(plan: Plan) -> float:
    """The throughput by which plans are judged: the played one, or the closed form's if there is none."""
    played = plan.throughput_samples_per_s
    return plan.closed_form.throughput_samples_per_s if played is None else played


def _of_a_device_s(problem: PlanningProblem) -> Iterator[tuple[int, float]]:
    """Microbatch sizes, and the seconds of one device that does nothing but compute: no plan takes less.

    A backward right after its forward may be shorter (`Overheads`). For an engine, devices may share blocks.
    """
    profile = problem.profile
    share = min(profile.overheads.backward_after_forward, 1.0)
    for size in profile.microbatch_sizes:
        yield size, sum(block.forward_s + share * block.backward_s for block in profile.at(size))
    for form in profile.forms if problem.options.engine is not None else ():
        for size in form.microbatch_sizes:
            every = [form.kinds[kind].at(size) for kind in form.blocks]
            yield size, form.form.devices * sum(block.forward_s + block.backward_s for block in every)


def smallest(
    problem: PlanningProblem,
    planner: Planner,
    throughput_samples_per_s: float,
    progress: Progress = lambda done, total: None,
) -> Smallest:
    """Asks for every sub-cluster, the smallest first, until a best plan reaches the throughput.

    Exact with every planner: nothing is bisected, because a planner that uses all devices may be slower with more of
    them. Only those sub-clusters are skipped whose devices could not reach the throughput by computing alone.
    """
    require_amount("throughput", throughput_samples_per_s, positive=True)
    problem = problem.corrected
    clusters = list(sub_clusters(problem.cluster))
    most = max(size / max(seconds, LEAST_AMOUNT) for size, seconds in _of_a_device_s(problem))
    enough = [cluster for cluster in clusters if cluster.devices * most >= throughput_samples_per_s * (1 - _ROUNDING)]

    tried: list[SmallestStep] = []
    found: Plan | None = None
    fewer: SmallestStep | None = None
    for done, cluster in enumerate(enough):
        progress(done, len(enough))
        step, plan = _step(problem, planner, cluster)
        if plan is not None and rate(plan) >= throughput_samples_per_s:
            found, before = plan, clusters.index(cluster) - 1
            if tried:
                fewer = tried[-1]
            elif before >= 0:  # it was skipped
                fewer, _ = _step(problem, planner, clusters[before])
        tried.append(step)
        if found is not None:
            break

    if not tried:
        tried.append(_step(problem, planner, clusters[-1])[0])
    return Smallest(
        throughput_samples_per_s=throughput_samples_per_s,
        devices=None if found is None else tried[-1].devices,
        plan=found,
        next_fewer=fewer,
        fastest=max(tried, key=_judged) if found is None else None,
        tried=tuple(tried),
        skipped=len(clusters) - len(enough),
    )


def _judged(step: SmallestStep) -> float:
    """The step's `rate`; 0 if it has no plan."""
    return step.throughput_samples_per_s or step.closed_form_samples_per_s or 0.0


def _step(problem: PlanningProblem, planner: Planner, cluster: Cluster) -> tuple[SmallestStep, Plan | None]:
    """The planner's answer for a sub-cluster. A refusal is an answer too, unless it concerns the whole cluster."""
    sizes = tuple(level.size for level in cluster.levels)
    try:
        answer = planner(replace(problem, cluster=cluster))
    except InvalidInputError as error:
        if len(sizes) == len(problem.cluster.levels) and sizes[-1] == problem.cluster.levels[-1].size:
            raise
        return SmallestStep(devices=cluster.devices, sizes=sizes, reason=str(error)), None
    if isinstance(answer, Infeasible):
        return SmallestStep(devices=cluster.devices, sizes=sizes, reason=answer.reasons[0].detail), None
    step = SmallestStep(
        devices=cluster.devices,
        sizes=sizes,
        throughput_samples_per_s=answer.throughput_samples_per_s,
        closed_form_samples_per_s=answer.closed_form.throughput_samples_per_s,
    )
    return step, answer
