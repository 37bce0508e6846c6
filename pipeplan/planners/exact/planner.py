"""Exact: the planner for problems that the papers' recurrences do not express, with a proof or a gap.

- Stages are contiguous blocks. Cuts between them may be forced and forbidden.
- Each stage recomputes or not, and fits its own device under the schedule's real number of microbatches in flight.
- Each stage runs on one of the cluster's types of devices, whose own profile gives its times.
- The objective is the schedule's. PipeDream's is the slowest stage or boundary, with replicas of its own for every
  stage. For equal widths it is that of PipeDream-2BW's appendix A.1, with the flush of 1F1B and GPipe.
- A recurrence over the devices used and the blocks done finds the optimum (`paths`, `places`).
- Where ranks hold several stages (in a loop, or in a V), the objective is the slowest rank's time (`chunked`); for
  three stages and more a rank, OR-tools' CP-SAT finds it.
- Where a cluster has several levels, PipeDream's stages lie in a row on its devices, and a transfer is as slow as the
  slowest level that it crosses.
"""

from pipeplan.documents.plan import Answer
from pipeplan.errors import require
from pipeplan.planners.chain import profiled
from pipeplan.planners.exact.answers import NAME, alternatives_of, certificate_of, infeasible, plan_of
from pipeplan.planners.exact.chunked import chunked
from pipeplan.planners.exact.search import ExactSearch
from pipeplan.planners.exact.tables import StageShape
from pipeplan.planners.pipedream.planner import minibatch_size
from pipeplan.planners.problem import (
    Observer,
    Options,
    PlanningProblem,
    refuse_unused,
    require_schedule,
    require_stages,
    unobserved,
)
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.registry import schedule_named

SCHEDULES = ("pipedream-2bw", "1f1b", "gpipe", "pipedream", "1f1b-interleaved", "zb-v", "v-half", "dual-pipe-v")
"""The schedules that it plans for; the default is the first that the options allow."""

USED = (
    "microbatch_size",
    "schedule",
    "stages",
    "recompute",
    "recompute_unit",
    "recompute_factor",
    "forced_cuts",
    "forbidden_cuts",
)
USED_BY_PIPEDREAM = ("synchronisation", "straight", "fewer_machines")
USED_BY_CHUNKED = ("chunks",)

DEFAULT_TIME_LIMIT_S = 20.0

MAX_BLOCKS = 256
MAX_DEVICES = 256
MAX_PIPEDREAM_DEVICES = 64
"""Beyond these limits, making the tables alone takes too long."""


def exact(problem: PlanningProblem, observe: Observer = unobserved) -> Answer:
    """The fastest plan, or the fastest that was found in time and how far it may be from the optimum.

    `Options.time_limit_s` counts deterministic seconds, which are about as long as real ones; the answer does not
    depend on the machine. Ties prefer fewer devices, then fewer stages, then smaller microbatches. Raises
    InvalidInputError if the time ends before a plan is found or it is proven that there is none.
    """
    _check(problem)
    schedule, limit = _schedule(problem.options), problem.options.time_limit_s or DEFAULT_TIME_LIMIT_S
    if schedule.chunked:
        return chunked(problem, schedule.name, limit, observe)
    shapes = shapes_of(problem)
    search = ExactSearch(problem=problem, shapes=shapes, limit=limit, observe=observe)
    search.run()
    if search.best is None:
        rule = "must be longer: in this time no plan was found, and no proof that none fits"
        require(search.rounds.decided, "time_limit_s", rule, limit)
        return infeasible(search)
    searched = f"{len(shapes)} combinations of depth, width and microbatch size"
    certificate = certificate_of(search.rounds, "recurrence over devices", searched)
    return plan_of(search, search.best, tuple(alternatives_of(search, search.best)), certificate)


def _check(problem: PlanningProblem) -> None:
    """Refuses options and problems that the planner does not support, or that are too large."""
    options, cluster = problem.options, problem.cluster
    require_schedule(options, SCHEDULES, NAME)
    pipedream, in_chunks = _by_minibatch(options), _schedule(options).chunked
    used = USED_BY_PIPEDREAM if pipedream else USED_BY_CHUNKED if in_chunks else ()
    refuse_unused(NAME, options, (*USED, *used, "time_limit_s"))
    if in_chunks:
        _check_chunks(problem)
    blocks = len(problem.profile.blocks)
    require(blocks <= MAX_BLOCKS, "profile.blocks", f"must be at most {MAX_BLOCKS} for the planner {NAME}", blocks)
    most = MAX_PIPEDREAM_DEVICES if pipedream else MAX_DEVICES
    rule = f"must make at most {most} devices for the planner {NAME}" + (" and pipedream" if pipedream else "")
    require(cluster.devices <= most, "cluster.levels", rule, cluster.devices)
    require(problem.profile.edges is None, "profile.edges", f"must be none: {NAME} plans chains", "a graph")
    for field in ("forced_cuts", "forbidden_cuts"):
        for cut in getattr(options, field):
            require(cut < blocks, field, f"must stand before one of the blocks 1 to {blocks - 1}", cut)
    require_stages(problem)


def _by_minibatch(options: Options) -> bool:
    """Whether the stages update after every minibatch: each may then have its own number of replicas."""
    return _schedule(options).update == "minibatch"


def _schedule(options: Options) -> Schedule:
    if options.schedule is not None:
        return schedule_named(options.schedule)
    return next(laws for laws in map(schedule_named, SCHEDULES) if laws.synchronous or not options.synchronous)


def _check_chunks(problem: PlanningProblem) -> None:
    """Refuses options that ranks of several stages do not support, and more stages than blocks."""
    options, blocks, laws = problem.options, len(problem.profile.blocks), _schedule(problem.options)
    types = [device.name for device in problem.cluster.types]
    require(len(types) == 1, "cluster.groups", f"must be of one type for {laws.name}", types)
    require(options.memory == "training", "memory", f"must be training for {laws.name}", options.memory)
    rule = f"must be 2 for {laws.name}, whose ranks hold two stages in a V"
    require(not laws.v_shaped or options.chunks in (None, 2), "chunks", rule, options.chunks)
    ranks, chunks = options.stages or 1, options.chunks or (2 if laws.v_shaped else 1)
    rule = f"must leave each of the {ranks} x {chunks} stages one of the {blocks} blocks"
    require(ranks * chunks <= blocks, "chunks" if options.chunks else "stages", rule, options.chunks or options.stages)


def shapes_of(problem: PlanningProblem) -> list[StageShape]:
    """All shapes, everything but the stages' cuts and devices, in the order that decides ties."""
    options, devices, blocks = problem.options, problem.cluster.devices, len(problem.profile.blocks)
    schedule = _schedule(options).name
    least, most = len(options.forced_cuts) + 1, blocks - len(options.forbidden_cuts)
    if options.stages is not None:
        least, most = max(least, options.stages), min(most, options.stages)
    if _by_minibatch(options):
        size = minibatch_size(problem)
        for other in problem.other_profiles:
            other.at(size)
        return [
            StageShape(
                schedule=schedule,
                depth=workers if options.straight else options.stages or 0,
                width=None,
                workers=workers,
                microbatch_size=size,
                microbatches=1,
            )
            for workers in range(1 if options.fewer_machines else devices, devices + 1)
            if least <= most and least <= workers and (workers <= most or not options.straight)
        ]

    # The sizes that all profiles have, measured or between measured ones.
    sizes = profiled(problem).sizes
    others = [profile.microbatch_sizes for profile in problem.other_profiles]
    kept = [size for size in sizes if all(other[0] <= size <= other[-1] for other in others)]
    require(bool(kept), "other_profiles", f"must be measured at one of the microbatch sizes {list(sizes)}", others)

    laws, shapes = _schedule(options), list[StageShape]()
    counts = problem.cluster.counts.values()
    for width in range(1, devices + 1):
        deepest = min(sum(count // width for count in counts), most)
        for size in (size for size in kept if problem.batch_size % (width * size) == 0):
            microbatches = problem.batch_size // (width * size)
            shapes += [
                StageShape(
                    schedule=schedule,
                    depth=depth,
                    width=width,
                    workers=width * depth,
                    microbatch_size=size,
                    microbatches=microbatches,
                )
                for depth in range(least, deepest + 1)
                if not laws.microbatch_a_stage or microbatches >= depth
            ]
    return sorted(shapes, key=lambda shape: (shape.workers, shape.depth, shape.microbatch_size))
