"""Sub-clusters: the first devices of a cluster that are a cluster themselves.

Smallest: the fewest devices of a cluster on which a model trains at a given throughput.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.errors import LEAST_AMOUNT, InvalidInputError, require, require_amount
from pipeplan.planners.problem import Planner, PlanningProblem


def sub_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """By their number of devices: 1, 2, ... within a server, then whole servers, and so on outwards.

    Raises InvalidInputError for devices of several types, of which no first ones stand for all.
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
    """The one with so many devices. Raises InvalidInputError if there is none."""
    sizes = []
    for smaller in sub_clusters(cluster):
        if smaller.devices == devices:
            return smaller
        sizes.append(smaller.devices)
    shown = ", ".join(map(str, sizes[:16])) + (", ..." if len(sizes) > 16 else "")
    raise InvalidInputError("devices", f"must be whole units of a level of the cluster: {shown}", devices)


Progress = Callable[[int, int], None]
"""Told how many of how many are done."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestStep:
    """So many devices, and what their best plan gives; or why there is none."""

    devices: int
    sizes: tuple[int, ...]
    throughput_samples_per_s: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """The least devices that reach the throughput, their plan, and what the next fewer give.

    Without a plan no part of the cluster reaches it, and `fastest` is what comes nearest. `skipped` sub-clusters are
    too few devices for the mere work of the blocks.
    """

    throughput_samples_per_s: float
    devices: int | None
    plan: Plan | None
    next_fewer: SmallestStep | None
    fastest: SmallestStep | None
    tried: tuple[SmallestStep, ...]
    skipped: int


def rate(plan: Plan) -> float:
    """The throughput by which plans are judged: that of the play, where there is one."""
    return plan.simulated.throughput_samples_per_s if plan.simulated else plan.throughput_samples_per_s


def smallest(
    problem: PlanningProblem,
    planner: Planner,
    throughput_samples_per_s: float,
    progress: Progress = lambda done, total: None,
) -> Smallest:
    """Asks for every sub-cluster, the smallest first, until a best plan reaches the throughput.

    Exact whatever the planner: one that uses all devices may be slower with more of them, so nothing is bisected. Only
    sub-clusters whose devices could not reach it if they did nothing but compute are left out.
    """
    require_amount("throughput", throughput_samples_per_s, positive=True)
    problem = problem.corrected
    clusters = list(sub_clusters(problem.cluster))
    most = _most_a_device(problem)
    enough = [cluster for cluster in clusters if cluster.devices * most >= throughput_samples_per_s * (1 - _ROUNDING)]
    tried: list[SmallestStep] = []
    for done, cluster in enumerate(enough):
        progress(done, len(enough))
        step, plan = _step(problem, planner, cluster)
        if plan is not None and rate(plan) >= throughput_samples_per_s:
            fewer = _next_fewer(problem, planner, clusters, cluster, tried)
            return Smallest(
                throughput_samples_per_s=throughput_samples_per_s,
                devices=cluster.devices,
                plan=plan,
                next_fewer=fewer,
                fastest=None,
                tried=(*tried, step),
                skipped=len(clusters) - len(enough),
            )
        tried.append(step)
    if not enough:
        tried.append(_step(problem, planner, clusters[-1])[0])
    return Smallest(
        throughput_samples_per_s=throughput_samples_per_s,
        devices=None,
        plan=None,
        next_fewer=None,
        fastest=max(tried, key=lambda step: step.throughput_samples_per_s or 0.0),
        tried=tuple(tried),
        skipped=len(clusters) - len(enough),
    )


def _step(problem: PlanningProblem, planner: Planner, cluster: Cluster) -> tuple[SmallestStep, Plan | None]:
    """What the planner makes of a sub-cluster. One that it cannot be asked about is an answer too."""
    sizes = tuple(level.size for level in cluster.levels)
    try:
        answer = planner(replace(problem, cluster=cluster))
    except InvalidInputError as error:
        if len(sizes) == len(problem.cluster.levels) and sizes[-1] == problem.cluster.levels[-1].size:
            raise
        return SmallestStep(devices=cluster.devices, sizes=sizes, reason=str(error)), None
    if isinstance(answer, Infeasible):
        return SmallestStep(devices=cluster.devices, sizes=sizes, reason=answer.reasons[0].detail), None
    return SmallestStep(devices=cluster.devices, sizes=sizes, throughput_samples_per_s=rate(answer)), answer


def _next_fewer(
    problem: PlanningProblem, planner: Planner, clusters: list[Cluster], found: Cluster, tried: list[SmallestStep]
) -> SmallestStep | None:
    if tried:
        return tried[-1]
    before = clusters.index(found) - 1
    return _step(problem, planner, clusters[before])[0] if before >= 0 else None


def _most_a_device(problem: PlanningProblem) -> float:
    """Samples a second of a device that does nothing but forward and backward, at the best microbatch size."""
    factor = min(problem.options.recompute_factor or 1.0, 1.0)
    work_s = {
        size: sum(block.compute_s for block in problem.profile.at(size)) for size in problem.profile.microbatch_sizes
    }
    return max(size / max(factor * seconds, LEAST_AMOUNT) for size, seconds in work_s.items())
