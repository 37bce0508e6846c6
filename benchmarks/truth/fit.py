"""Fit: the constants of the least error; and those without each model.

The logarithm of every row's played seconds is taken as linear in the logarithms of the constants, near where they are.
What is made least is then a linear program; what it finds is played before it is believed.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import exp, inf, log
from statistics import median

import numpy as np
from ortools.linear_solver import pywraplp

from benchmarks.truth.constants import GPUS, Constants
from benchmarks.truth.counted import Counted
from benchmarks.truth.planned import Choice, Planned, taken
from benchmarks.truth.rows import GIB, Row
from pipeplan.arrays import FloatArray

RADIUS = 0.4
LEAST_RADIUS = 0.01
"""No constant's logarithm changes by more in a step; it is halved where the plays are no better than before."""

WITHOUT_RADIUS = 0.3
"""The same of the one step from the constants of all rows to those without a model."""

STEP = 0.03
"""By which slopes are taken."""

MOST = 0.95
"""No share of a peak is above."""

MOST_KERNEL_S = 2e-5
"""No kernel takes longer to start and end: more would stand for what grows with sizes."""

ROUNDS = 3

PENALTY = 0.02
"""A change of a constant's logarithm must make the mean difference less by so much of it: rows that say little about a
constant leave it where it is.
"""

Place = tuple[str, str, str]
"""Of a constant: gpus or engines, the name, the field."""


def places(constants: Constants) -> Iterator[Place]:
    """Of all constants of seconds, but those that are 0."""
    for group, each in (("gpus", constants.gpus), ("engines", constants.engines)):
        for name, holder in each.items():
            for field in fields(holder):
                if getattr(holder, field.name) and field.name != "reserve":
                    yield group, name, field.name


def value(constants: Constants, place: Place) -> float:
    """One of them."""
    group, name, field = place
    return float(getattr(getattr(constants, group)[name], field))


def changed(constants: Constants, place: Place, factor: float) -> Constants:
    """With one of them multiplied, within its bounds."""
    group, name, field = place
    holders = dict(getattr(constants, group))
    holders[name] = replace(holders[name], **{field: min(value(constants, place) * factor, _most(place))})
    return replace(constants, **{group: holders})


def _most(place: Place) -> float:
    field = place[2]
    return MOST if field.endswith("efficiency") else MOST_KERNEL_S if field == "kernel_s" else inf


def concerns(place: Place, row: Row) -> bool:
    """Whether a constant has anything to do with a row."""
    group, name, field = place
    if field == "compiled" and "compile" not in row.precision:
        return False
    return name == (GPUS[row.gpu].constants if group == "gpus" else row.program.constants)


@dataclass(frozen=True, eq=False)
class Near:
    """The rows near some constants: their differences, and how these change with each constant.

    A difference is the logarithm of predicted over measured seconds. Rows keep the choice that is taken there.
    """

    planned: Planned
    constants: Constants
    choices: Sequence[Choice]

    @cached_property
    def differences(self) -> FloatArray:
        """Of every row."""
        return self.with_constants(self.constants)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Of the constants that concern a row."""
        return tuple(p for p in places(self.constants) if any(concerns(p, row) for row in self.planned.rows))

    @cached_property
    def slopes(self) -> FloatArray:
        """A row for each row, a column for each place: downwards, where a share may still grow."""
        found = np.zeros((len(self.planned.rows), len(self.places)))
        for column, place in enumerate(self.places):
            numbers = [number for number, row in enumerate(self.planned.rows) if concerns(place, row)]
            some = Planned(self.planned.counted, [self.planned.rows[number] for number in numbers])
            there = Near(some, self.constants, [self.choices[number] for number in numbers])
            lower = there.with_constants(changed(self.constants, place, exp(-STEP)))
            found[numbers, column] = (self.differences[numbers] - lower) / STEP
        return found

    def with_constants(self, constants: Constants) -> FloatArray:
        """The differences of the same choices with other constants."""
        plays = self.planned.plays(constants, [[choice] for choice in self.choices])
        return np.asarray(
            [
                log(each[choice].seconds / row.seconds)
                for row, choice, each in zip(self.planned.rows, self.choices, plays, strict=True)
            ]
        )

    def stepped(self, weights: FloatArray, radius: float) -> Constants:
        """The constants within the radius of the least weighted sum of absolute differences, if all is linear."""
        solver = pywraplp.Solver.CreateSolver("GLOP")
        steps = [
            solver.NumVar(-radius, min(radius, log(_most(place) / value(self.constants, place))), str(place))
            for place in self.places
        ]
        objective = solver.Objective()
        for step in steps:  # change >= |step|
            change = solver.NumVar(0.0, solver.infinity(), "")
            objective.SetCoefficient(change, PENALTY * float(weights.sum()))
            for sign in (1.0, -1.0):
                limit = solver.Constraint(0.0, solver.infinity())
                limit.SetCoefficient(change, 1.0)
                limit.SetCoefficient(step, -sign)
        for difference, row, weight in zip(self.differences, self.slopes, weights, strict=True):
            if weight == 0.0:
                continue
            size = solver.NumVar(0.0, solver.infinity(), "")
            objective.SetCoefficient(size, float(weight))
            for sign in (1.0, -1.0):  # size >= sign (difference + slopes . steps)
                limit = solver.Constraint(sign * float(difference), solver.infinity())
                limit.SetCoefficient(size, 1.0)
                for step, slope in zip(steps, row, strict=True):
                    limit.SetCoefficient(step, -sign * float(slope))
        objective.SetMinimization()
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            raise RuntimeError("the linear program of the fit was not solved")
        found = self.constants
        for place, step in zip(self.places, steps, strict=True):
            found = changed(found, place, exp(step.solution_value()))
        return found


def weights_of(rows: Sequence[Row], without: str | None = None) -> FloatArray:
    """The weight of every row: a source counts by the cube root of its rows, a model that is left out counts 0.

    A source of many rows counts for more than one of few, and for less than all of its rows.
    """
    sources = [row.source for row in rows if row.model != without]
    return np.asarray([0.0 if row.model == without else sources.count(row.source) ** (-2 / 3) for row in rows])


def near(counted: Counted, rows: Sequence[Row], constants: Constants) -> Near:
    """The rows with the choices that are taken with these constants."""
    planned = Planned(counted, rows)
    chosen = [taken(row, plays) for row, plays in zip(rows, planned.plays(constants), strict=True)]
    return Near(planned, constants, chosen)


def fit(counted: Counted, rows: Sequence[Row], start: Constants, *, rounds: int = ROUNDS) -> Near:
    """Where steps from `start` end: nothing that the plays then show is better. Choices are those at the start."""
    weights, radius = weights_of(rows), RADIUS
    best = near(counted, rows, start)
    for number in range(rounds):
        while radius >= LEAST_RADIUS:
            tried = Near(best.planned, best.stepped(weights, radius), best.choices)
            if weights @ np.abs(tried.differences) < weights @ np.abs(best.differences):
                best = tried
                break
            radius /= 2
        mean = float(np.abs(best.differences).mean())
        print(f"round {number + 1} of {rounds}: mean difference {mean:.2%}", file=sys.stderr, flush=True)
        if radius < LEAST_RADIUS:
            break
    return Near(best.planned, _with_reserve(best), best.choices)


def _with_reserve(found: Near) -> Constants:
    """With the reserve that the published memory of sharded programs shows at the middle."""
    rows = found.planned.rows
    published = [n for n, row in enumerate(rows) if row.memory_gib is not None and row.program.engine == "fsdp"]
    planned = Planned(found.planned.counted, [rows[n] for n in published])
    plays = planned.plays(found.constants, [[found.choices[n]] for n in published])
    ratios = [
        (row.memory_gib or 0.0) * GIB / held.held_bytes
        for row, each in zip(planned.rows, plays, strict=True)
        for held in each.values()
    ]
    if not ratios:
        return found.constants
    sharded = replace(found.constants.engines["fsdp"], reserve=max(median(ratios) - 1, 0.0))
    return replace(found.constants, engines={**found.constants.engines, "fsdp": sharded})


def without_each(found: Near) -> dict[str, Constants]:
    """For each model the constants fitted to the rows of all others, by one step from those of all rows."""
    rows = found.planned.rows
    return {
        model: found.stepped(weights_of(rows, model), WITHOUT_RADIUS) for model in dict.fromkeys(r.model for r in rows)
    }
