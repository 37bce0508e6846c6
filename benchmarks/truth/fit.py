"""Fit: the constants of the least error; and those without each model."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from math import inf
from statistics import median

import numpy as np

from benchmarks.truth.constants import GPUS, Constants
from benchmarks.truth.counted import Counted
from benchmarks.truth.iteration import Predictor, engine_of
from benchmarks.truth.memory import held_bytes
from benchmarks.truth.rows import GIB, Row
from pipeplan.arrays import FloatArray, IntArray

FIRST_STEP = 0.2
LAST_STEP = 0.01
MOST = 0.95
"""No share of a peak is above."""

MOST_KERNEL_S = 2e-5
"""No kernel takes longer to start and end: more would stand for what grows with sizes."""

ROUNDS = 40
ROUNDS_WITHOUT = 6
"""Without a model the constants begin where those of all rows ended."""

Place = tuple[str, str, str]
"""Of a constant: gpus or engines, the name, the field."""


def places(constants: Constants) -> Iterator[Place]:
    """Of all constants of seconds, but those that are 0."""
    for group, each in (("gpus", constants.gpus), ("engines", constants.engines)):
        for name, holder in each.items():
            for field in fields(holder):
                if getattr(holder, field.name) and field.name != "reserve":
                    yield group, name, field.name


def changed(constants: Constants, place: Place, factor: float) -> Constants:
    """With one of them multiplied, within its bounds."""
    group, name, field = place
    holders = dict(getattr(constants, group))
    most = MOST if field.endswith("efficiency") else MOST_KERNEL_S if field == "kernel_s" else inf
    holders[name] = replace(holders[name], **{field: min(getattr(holders[name], field) * factor, most)})
    return replace(constants, **{group: holders})


def concerns(place: Place, row: Row) -> bool:
    """Whether a constant has anything to do with a row."""
    group, name, _ = place
    return name == (GPUS[row.gpu].constants if group == "gpus" else engine_of(row))


def differences(predictor: Predictor, constants: Constants) -> FloatArray:
    """Of the logarithms of every row's seconds, which neither too long nor too short favours."""
    measured_s = np.asarray([row.seconds for row in predictor.rows])
    return np.asarray(np.abs(np.log(np.asarray(predictor.predict(constants)) / measured_s)))


def fit(counted: Counted, rows: Sequence[Row], start: Constants, *, rounds: int = ROUNDS) -> Constants:
    """The best that ever smaller steps along one constant at a time find from `start`.

    What is made least is the sum over sources of the mean difference of their rows, by the cube root of how many they
    are: a source of many rows counts for more than one of few, and for less than all of its rows.
    """
    sources = [row.source for row in rows]
    weights = np.asarray([sources.count(source) ** (-2 / 3) for source in sources])
    of_place: dict[tuple[str, str], tuple[Predictor, IntArray]] = {}
    for place in places(start):
        if place[:2] not in of_place:
            chosen = [number for number, row in enumerate(rows) if concerns(place, row)]
            predictor = Predictor(counted, tuple(rows[number] for number in chosen))
            of_place[place[:2]] = predictor, np.asarray(chosen, dtype=np.int64)
    best, found = start, differences(Predictor(counted, tuple(rows)), start)
    steps = {place: FIRST_STEP for place in places(best) if len(of_place[place[:2]][1])}
    for _ in range(rounds):
        for place, step in steps.items():
            predictor, numbers = of_place[place[:2]]
            for factor in (1 + step, 1 / (1 + step)):
                tried = changed(best, place, factor)
                after = found.copy()
                after[numbers] = differences(predictor, tried)
                if weights @ after < weights @ found:
                    best, found, steps[place] = tried, after, step * 1.2
                    break
            else:
                steps[place] = step / 2
        steps = {place: step for place, step in steps.items() if step > LAST_STEP}
    return _with_reserve(counted, rows, best)


def _with_reserve(counted: Counted, rows: Sequence[Row], constants: Constants) -> Constants:
    """With the reserve that the published memory of sharded programs shows at the middle."""
    chosen = [row for row in rows if row.memory_gib is not None and engine_of(row) == "fsdp"]
    ratios = []
    for row, seconds in zip(chosen, Predictor(counted, tuple(chosen)).choices(constants), strict=True):
        taken = min(seconds, key=lambda each: seconds[each])
        ratios.append((row.memory_gib or 0.0) * GIB / held_bytes(row, *taken, counted))
    if not ratios:
        return constants
    sharded = replace(constants.engines["fsdp"], reserve=max(median(ratios) - 1, 0.0))
    return replace(constants, engines={**constants.engines, "fsdp": sharded})


def without_each(counted: Counted, rows: Sequence[Row], start: Constants) -> dict[str, Constants]:
    """For each model the constants fitted to the rows of all others."""
    models = dict.fromkeys(row.model for row in rows)
    return {
        model: fit(counted, [row for row in rows if row.model != model], start, rounds=ROUNDS_WITHOUT)
        for model in models
    }
