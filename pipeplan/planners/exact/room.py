"""Room: the solver's PipeDream plans reserve memory for the messages that their stages have in transit.

The solver's tables have one stage each. The number of a stage's messages in transit also depends on its neighbours'
replicas. If a stage of the answer does not fit with its messages, two other searches run, and the faster answer counts:

- the same search with a reserved part of every device, more each time, until all stages fit;
- PipeDream's recurrence, which counts messages, where it supports the problem: devices of one type on one level, any
  cuts, no recomputation. Without recomputation its answer is the best plan, and it proves that nothing fits.

Else the bound stays that of the first answer, which counts no messages.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from pipeplan.documents.plan import Plan
from pipeplan.planners.exact.explain import nearest, stages_of
from pipeplan.planners.exact.kinds import StageShape
from pipeplan.planners.exact.places import Team
from pipeplan.planners.exact.search import ExactSearch, Result, Solution
from pipeplan.planners.messages import excess_bytes
from pipeplan.planners.pipedream.planner import pipedream

RAISED = 1.5
"""Lower bound on the ratio of the reserved memory to that of the previous search."""

WITHOUT_MESSAGES = "as if no messages were under way, CP-SAT proved that no plan takes less than the bound"
BY_RECURRENCE = "PipeDream's recurrence compared every partition, by the replicas of the stages beside each as well"


def searched_with_room(make: Callable[[float], ExactSearch]) -> tuple[ExactSearch, Result]:
    """The search that gave the answer, and the answer. `make` takes the bytes to reserve on every device."""
    search, reserved_bytes = make(0.0), 0.0
    result = first = search.run()
    if first.best is None or _ruled_out(search, first.best) is None:
        return search, first
    plain, options = search, search.problem.options
    recurs = plain.places.flat and len(plain.places.counts) == 1 and not options.recompute
    recurs = recurs and not options.forced_cuts and not options.forbidden_cuts and options.stages is None
    known = _by_recurrence(plain) if recurs else None
    if recurs and options.recompute is False:
        bound_s = inf if known is None else known.sample_s
        return plain, replace(first, best=known, bound_s=bound_s, decided=True, claim=BY_RECURRENCE)
    while result.best is not None and (ruled_out := _ruled_out(search, result.best)) is not None:
        reserved_bytes = max(ruled_out + 1, RAISED * reserved_bytes)
        search = make(reserved_bytes)
        result = search.run()
    # where a plan that holds the least fits, it is one
    found = [(search, result.best), (plain, known), (plain, nearest(plain, plain.shapes[0]))]
    fitting = [
        (each.sample_s, place)
        for place, (of, each) in enumerate(found)
        if each is not None and each.step_s < inf and _ruled_out(of, each) is None
    ]
    search, best = found[min(fitting)[1]] if fitting else (plain, None)
    return search, replace(result, best=best, bound_s=first.bound_s, claim=WITHOUT_MESSAGES)


def _by_recurrence(search: ExactSearch) -> Solution | None:
    """PipeDream's own answer, as a solution; None where nothing fits."""
    options = replace(
        search.problem.options, recompute=None, recompute_unit=None, recompute_factor=None, time_limit_s=None
    )
    plan = pipedream(replace(search.problem, options=options, graph=None))
    if not isinstance(plan, Plan):
        return None
    shape: StageShape = replace(search.shapes[0], depth=plan.depth)
    placed = search.places.in_a_row([Team(type=0, replicas=stage.replicas) for stage in plan.stages])
    stops = tuple(stage.stop for stage in plan.stages)
    return Solution(shape=shape, placed=placed, stops=stops, step_s=plan.closed_form.time_per_microbatch_s)


def _ruled_out(search: ExactSearch, found: Solution) -> float | None:
    """The bytes to reserve that rule out a stage that does not fit, for any neighbours; None if all fit."""
    stages = stages_of(search, found)
    excess = excess_bytes(search.problem, stages)
    return min(
        (
            stage.memory.buffers - over
            for stage, over in zip(stages, excess, strict=True)
            if over > 0 and stage.memory is not None
        ),
        default=None,
    )
