"""Room: PipeDream's plans of the solver leave room for the messages that their stages have under way.

The solver's tables hold stages by themselves. How many messages a stage has under way depends on the replicas of its
neighbours as well. If a stage of the answer does not fit with its messages, the problem is searched again with a part
of every device kept free, until all stages fit. The bound stays that of the first answer.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from pipeplan.planners.exact.explain import nearest, stages_of
from pipeplan.planners.exact.search import ExactSearch, Result, Solution
from pipeplan.planners.messages import excess_bytes

RAISED = 1.5
"""How much more is kept free each time, at least."""


def searched_with_room(make: Callable[[float], ExactSearch]) -> tuple[ExactSearch, Result]:
    """The search that gave the answer, and the answer. `make` makes a search that keeps so many bytes free."""
    search, reserved_bytes = make(0.0), 0.0
    result = first = search.run()
    while result.best is not None and (ruled_out := _ruled_out(search, result.best)) is not None:
        reserved_bytes = max(ruled_out + 1, RAISED * reserved_bytes)
        search = make(reserved_bytes)
        result = search.run()
    if result is first:
        return search, result
    if result.best is None:  # where a plan that holds the least fits, it is one
        search = make(0.0)
        found = nearest(search, search.shapes[0])
        fits = found is not None and found.step_s < inf and _ruled_out(search, found) is None
        result = replace(result, best=found if fits else None)
    return search, replace(result, bound_s=first.bound_s, with_room=True)


def _ruled_out(search: ExactSearch, found: Solution) -> float | None:
    """The bytes to keep free that rule out a stage which does not fit, whatever its neighbours are; None if all fit."""
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
