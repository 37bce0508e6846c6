"""Largest: how large a model fits, by pipeline depth (PipeDream-2BW 2021, figure 9).

The model grows as in the figure: consecutive blocks of the profile are repeated. The devices, the microbatches and the
accounting of memory do not change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.plan import Answer, Plan
from pipeplan.documents.profile import DTYPE_BYTES, Profile
from pipeplan.documents.tied import TiedWeights
from pipeplan.errors import InvalidInputError, require
from pipeplan.planners.problem import Planner, PlanningProblem
from pipeplan.questions.smallest import Progress
from pipeplan.schedules.registry import schedule_named

KINDS = (
    ("data-parallel", False),
    ("pipedream-2bw", False),
    ("pipedream-2bw", True),
    ("1f1b", False),
    ("1f1b", True),
    ("gpipe", True),
)
"""Schedules, each with or without recomputation."""

MOST_BLOCKS = 4096
"""Larger models are not tried: the answer is then that this many blocks fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestSize:
    """The largest model of a depth, schedule and recomputation; no blocks where not even one repetition fits."""

    depth: int
    schedule: str
    recompute: bool
    repetitions: int
    blocks: int
    parameters: int
    weight_bytes: int
    limit: str


def inner_blocks(profile: Profile) -> range:
    """The blocks repeated by default: all but the first and the last, or all if there are no others."""
    blocks = len(profile.blocks)
    return range(1, blocks - 1) if blocks > 2 else range(blocks)


def repeated(profile: Profile, inner: range, times: int) -> Profile:
    """The profile with its inner blocks repeated `times` times, one round after another."""
    blocks = profile.blocks
    first, last = blocks[: inner.start], blocks[inner.stop :]
    rounds = [
        replace(block, name=f"{block.name} ({number + 1})")
        for number in range(times)
        for block in blocks[inner.start : inner.stop]
    ]
    places = [*range(inner.start), *(list(inner) * times), *range(inner.stop, len(blocks))]

    def placed(every: Sequence[TiedWeights]) -> tuple[TiedWeights, ...]:
        using = [(each, [place for place, block in enumerate(places) if block in each.blocks]) for each in every]
        return tuple(replace(each, block=at[0], also=tuple(at[1:])) for each, at in using if len(at) > 1)

    return replace(
        profile,
        blocks=(*first, *rounds, *last),
        tied=placed(profile.tied),
        tied_frozen=placed(profile.tied_frozen),
    )


def largest(
    problem: PlanningProblem,
    planner: Planner,
    inner: range,
    depths: Sequence[int],
    progress: Progress = lambda done, total: None,
) -> tuple[LargestSize, ...]:
    """The most repetitions that fit, for every depth and kind, by bisection: a larger model never fits more easily.

    `planner` must take `schedule`, `stages` and `recompute`, as PipeDream-2BW's does. A pipeline of depth d has d
    devices of the cluster's type; more replicas of it would hold the same. Raises InvalidInputError if the planner
    refuses every depth.
    """
    require(problem.profile.edges is None, "profile.edges", "must not be there: repeated blocks make a chain", "edges")
    rule = f"must be some of the {len(problem.profile.blocks)} blocks"
    require(0 <= inner.start < inner.stop <= len(problem.profile.blocks), "repeat", rule, (inner.start, inner.stop))
    problem = problem.corrected
    options = problem.options
    require(options.stages is None, "stages", "is what this question varies: its depths", options.stages)
    kinds = [kind for kind in KINDS if options.schedule in (None, kind[0]) and options.recompute in (None, kind[1])]
    kinds = [kind for kind in kinds if schedule_named(kind[0]).synchronous or not options.synchronous]
    asked = [
        (depth, *kind) for depth in depths for kind in kinds if schedule_named(kind[0]).single_stage == (depth == 1)
    ]
    rule = "must leave open data-parallel without recomputation at depth 1, or at others "
    rule += ", ".join(f"{schedule} {'with' if recompute else 'without'}" for schedule, recompute in KINDS[1:])
    require(len(asked) > 0, "schedule", rule, options.schedule)

    refusals: list[InvalidInputError] = []
    answers: list[bool] = []

    def noted(question: PlanningProblem) -> Answer:
        try:
            answer = planner(question)
        except InvalidInputError as error:
            refusals.append(error)
            raise
        answers.append(isinstance(answer, Plan))
        return answer

    sizes = []
    for done, kind in enumerate(asked):
        progress(done, len(asked))
        sizes.append(_size(problem, noted, inner, *kind))
    if refusals and not answers:
        raise refusals[0]
    return tuple(sizes)


def _size(
    problem: PlanningProblem, planner: Planner, inner: range, depth: int, schedule: str, recompute: bool
) -> LargestSize:
    """The answer for one depth and kind. The repetitions are doubled until they no longer fit, then bisected."""
    profile = problem.profile
    limits: dict[int, str | None] = {}

    def limit(times: int) -> str | None:
        if times not in limits:
            limits[times] = _limit(problem, planner, repeated(profile, inner, times), depth, schedule, recompute)
        return limits[times]

    outside = len(profile.blocks) - len(inner)
    least = max(1, -(-(depth - outside) // len(inner)))  # a block for every stage
    most = (MOST_BLOCKS - outside) // len(inner)
    times = 0
    if least <= most and limit(least) is None:
        times, too_many = least, least * 2
        while too_many <= most and limit(too_many) is None:
            times, too_many = too_many, too_many * 2
        too_many = min(too_many, most + 1)
        while too_many - times > 1:
            middle = (times + too_many) // 2
            times, too_many = (middle, too_many) if limit(middle) is None else (times, middle)

    model = repeated(profile, inner, times)
    beyond = f"more than {MOST_BLOCKS} blocks are not looked for" if max(times, least) >= most else None
    return LargestSize(
        depth=depth,
        schedule=schedule,
        recompute=recompute,
        repetitions=times,
        blocks=len(model.blocks) if times else 0,
        parameters=model.weight_bytes // DTYPE_BYTES[model.dtype] if times else 0,
        weight_bytes=model.weight_bytes if times else 0,
        limit=beyond or limit(times + 1 if times else least) or "",
    )


def _limit(
    problem: PlanningProblem, planner: Planner, profile: Profile, depth: int, schedule: str, recompute: bool
) -> str | None:
    """Why the model does not fit; None if it does."""
    outermost = problem.cluster.levels[-1]
    row = Cluster(device=problem.cluster.device, levels=(replace(outermost, size=depth),))
    size = problem.options.microbatch_size or profile.microbatch_sizes[0]
    options = replace(
        problem.options,
        schedule=schedule,
        stages=depth,
        recompute=recompute,
        recompute_unit=problem.options.recompute_unit if recompute else None,
        microbatch_size=size,
    )
    try:
        answer = planner(replace(problem, profile=profile, cluster=row, options=options))
    except InvalidInputError as error:
        return str(error)
    return None if isinstance(answer, Plan) else answer.reasons[0].detail
