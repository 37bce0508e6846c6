"""Choices: the reasons for a plan's degrees: the plays of the best plans with other values."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from pipeplan.documents.degrees import DegreeChoice
from pipeplan.documents.plan import Plan
from pipeplan.planners.auto.ranking import CLOSE
from pipeplan.planners.complete import length, play
from pipeplan.planners.whole.budget import BUDGET
from pipeplan.planners.whole.degrees import Degrees
from pipeplan.planners.whole.space import WholeSpace

_NAMES = {
    "none": "nothing",
    "modules": "norms and activations",
    "attention": "attention's core",
    "operation": "most operations",
    "block": "every block",
}


def values_of(degrees: Degrees) -> Mapping[str, str]:
    """A configuration's value of each degree."""
    recipe, form = degrees.recipe, degrees.recipe.form
    return {
        "tensor": str(form.tensor),
        "context": str(form.context),
        "expert": str(form.expert),
        "expert_tensor": "1" if form.expert_tensor else "as tensor",
        "pipeline": str(degrees.pipeline),
        "virtual_stages": str(degrees.chunks),
        "microbatch_size": str(recipe.microbatch_size),
        "recomputed": _NAMES[recipe.recompute],
        "sharding": recipe.sharding,
        "replicate": str(recipe.replicate),
        "graphs": "on" if recipe.graphs else "off",
        "offload": recipe.offload,
        "offload_share": f"{recipe.offload_share:.0%}",
    }


def choices(space: WholeSpace, answer: Plan) -> tuple[DegreeChoice, ...]:
    """For each degree, the values that the answer does not have, each with the best fitting plan found."""
    chosen = values_of(Degrees.of(answer))
    rates = rates_of(answer)
    found = dict[tuple[str, str], DegreeChoice]()
    values, tries, left = Counter[str](), Counter[tuple[str, str]](), BUDGET.choice_instructions
    every = [
        values_of(some.degrees(place))
        for some in space.within_memory()
        for place in {*np.unique(some.pipeline, return_index=True)[1], *np.unique(some.chunks, return_index=True)[1]}
    ]
    tried = {
        name: min(BUDGET.choice_values, len({each[name] for each in every} - {value})) for name, value in chosen.items()
    }
    for placed in space.likely(beaten=True):
        has = values_of(placed.degrees)
        others = [key for key in has.items() if key[1] != chosen[key[0]] and key not in found]
        wanted = [
            key
            for key in others
            if (tries[key] < BUDGET.choice_tries if key in tries else values[key[0]] < BUDGET.choice_values)
        ]
        if not wanted:
            settled = all(key in found or tries[key] >= BUDGET.choice_tries for key in tries)
            if settled and all(values[name] >= number for name, number in tried.items()):
                break
            continue
        stops = placed.split()
        plan = None if stops is None else placed.plan(stops)
        for key in wanted:
            values[key[0]] += key not in tries
            tries[key] += 1
            if plan is not None:
                found[key] = compared(key, chosen[key[0]], plan, rates, left)
                left -= length(plan, instructions=left)
    for key in tries:
        if key not in found:
            reason = "none of the likely fastest fits" if tries[key] == BUDGET.choice_tries else "none fits"
            found[key] = DegreeChoice(
                degree=key[0], value=chosen[key[0]], instead=key[1], throughput_samples_per_s=None, reason=reason
            )
    order = list(chosen)
    return tuple(sorted(found.values(), key=lambda each: (order.index(each.degree), each.instead)))


def rates_of(answer: Plan) -> tuple[float, float]:
    """An answer's rates, played and in closed form."""
    return answer.throughput_samples_per_s or 0.0, answer.closed_form.throughput_samples_per_s


def compared(key: tuple[str, str], value: str, plan: Plan, rates: tuple[float, float], left: int) -> DegreeChoice:
    """The comparison with a plan of another value of a degree; `rates` are the answer's, played and in closed form."""
    rate, closed_form = rates
    simulated = plan.simulated or play(plan, instructions=left)
    played = None if simulated is None else simulated.throughput_samples_per_s
    if played is None:
        less = 1 - plan.closed_form.throughput_samples_per_s / closed_form
        reason = f"not played; {100 * less:.1f} % less in closed form" if less > 0 else "not played"
    elif played < rate:
        reason = f"{100 * (1 - played / rate):.1f} % less"
    else:
        reason = f"{100 * (played / rate - 1):.1f} % more" if played > rate * (1 + CLOSE) else "as fast"
    return DegreeChoice(degree=key[0], value=value, instead=key[1], throughput_samples_per_s=played, reason=reason)
