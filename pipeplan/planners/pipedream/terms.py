"""Terms: the inputs of PipeDream's partitioner: network levels, search, and the law of a stage's memory."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache

from pipeplan.costs.memory import Copies, keeps_master_weights, paper_copies, training_copies
from pipeplan.documents.plan import Stage
from pipeplan.planners.messages import messages_of
from pipeplan.planners.pipedream.fitting import Law, Neighbours
from pipeplan.planners.pipedream.parts import LevelShare, PartitionSearch, search_of
from pipeplan.planners.pipedream.space import LevelLinks
from pipeplan.planners.pipedream.states import States
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.stage_sum import stage_memory
from pipeplan.programs.in_transit import InTransit
from pipeplan.schedules.registry import schedule_named

_PIPEDREAM = schedule_named("pipedream")

FACTORS = {"parameter-server": 4.0, "all-reduce": 2.0}
"""The factor of (m - 1)/m |w|, the bytes that each of m workers sends and receives for an update (2018, section 3.2).
"""


def synchronisation(problem: PlanningProblem) -> str:
    """How replicas exchange gradients: by an all-reduce, unless the options name the parameter server.

    The authors' program supports only the papers' parameter server.
    """
    return problem.options.synchronisation or ("parameter-server" if released(problem) else "all-reduce")


def released(problem: PlanningProblem) -> bool:
    """Whether the options request the authors' program instead of the papers' method."""
    return problem.options.semantics == "release"


def network(problem: PlanningProblem) -> list[LevelLinks]:
    """The cluster's network levels."""
    return [
        LevelLinks(units=level.size, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s)
        for level in problem.cluster.levels
    ]


def search(
    problem: PlanningProblem,
    states: States,
    *,
    straight: bool | None = None,
    levels: Sequence[LevelLinks] | None = None,
) -> PartitionSearch:
    """The problem's search, on its cluster's network or another one."""
    return search_of(
        states,
        network(problem) if levels is None else levels,
        exchange=FACTORS[synchronisation(problem)],
        law=law(problem),
        straight=problem.options.straight if straight is None else straight,
        fewer=problem.options.fewer_machines,
    )


def law(problem: PlanningProblem) -> Law:
    """The requested accounting, as a linear function of the minibatches in flight. Both accountings are linear, but for
    messages.
    """
    one, two = copies(problem, 1), copies(problem, 2)
    counts = {field.name: (getattr(one, field.name), getattr(two, field.name)) for field in fields(Copies)}
    return Law(
        fixed=Copies(**{name: 2 * first - later for name, (first, later) in counts.items()}),
        each=Copies(**{name: later - first for name, (first, later) in counts.items()}),
        limit_bytes=problem.cluster.device.usable_bytes,
        buffers=None if problem.options.memory == "paper" else _messages,
    )


@lru_cache(maxsize=65_536)
def _messages(neighbours: Neighbours) -> InTransit:
    return messages_of(_PIPEDREAM, *neighbours).in_transit


def copies(problem: PlanningProblem, held: int) -> Copies:
    """The copies held with `held` minibatches in flight and as many weight versions.

    With vertical sync, which needs a straight pipeline, there are as many versions as devices.
    """
    options, dtype = problem.options, problem.profile.dtype
    if options.memory == "paper":
        stashing = paper_copies(_PIPEDREAM, recompute=False, depth=held, microbatches=1)
    else:
        stashing = training_copies(
            _PIPEDREAM,
            options.optimizer_or_default,
            recompute=False,
            held=held,
            microbatches=1,
            dtype=dtype,
            master_weights=keeps_master_weights(dtype, options.master_weights),
            autocast=problem.profile.autocast,
        )
    if not synchronised(problem):
        return stashing
    versions = problem.cluster.devices
    return replace(stashing, versions=versions, casts=stashing.casts / stashing.versions * versions)


def gradient_copies(problem: PlanningProblem) -> int:
    """The bytes of a set of gradients, in copies of the weights."""
    return copies(problem, 1).late_gradients or 1


def synchronised(problem: PlanningProblem) -> bool:
    """Whether PipeDream's vertical sync is requested."""
    return problem.options.schedule is not None and schedule_named(problem.options.schedule).vertical_sync


def stage(problem: PlanningProblem, states: States, share: LevelShare, held: int, blocks: tuple[int, int]) -> Stage:
    """A plan's stage of a share, with a worker's memory at `held` minibatches in flight."""
    memory = stage_memory(states.quantities, copies(problem, held), share.start, share.stop)
    return Stage(
        start=blocks[0],
        stop=blocks[1],
        replicas=share.replicas,
        time_s=share.time_s,
        memory_bytes=memory.total,
        memory=memory,
    )
