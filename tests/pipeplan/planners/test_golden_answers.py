"""Golden answers: no planner answers slower, and no bound is below a rate that is known.

`python -m tests.pipeplan.planners.golden_answers --compare` says what differs besides.
"""

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import pytest

from tests.pipeplan.planners.golden_answers import (
    LEAST_MEAN,
    GoldenAnswer,
    GoldenRow,
    differences,
    faults,
    known_rates,
    planned,
    ratio,
    read_rows,
)

ROWS = read_rows()
KNOWN = known_rates(ROWS)
FEW = 20
"""The mean of fewer ratios than this says little."""


@pytest.fixture(scope="module")
def ratios() -> Iterator[list[float]]:
    """The ratios of all rates of this process, whose mean is tested at the end."""
    found: list[float] = []
    yield found
    assert len(found) < FEW or fmean(found) >= LEAST_MEAN


@pytest.mark.parametrize(
    "golden",
    [pytest.param(row, id=row.name, marks=() if row.is_quick else pytest.mark.campaign) for row in ROWS],
)
def test_an_answer_is_as_good_as_the_golden_one(golden: GoldenRow, ratios: list[float]) -> None:
    now = planned(golden)
    share = ratio(golden, now)
    ratios += [] if share is None else [share]
    assert list(faults(golden, now, KNOWN.get(golden.name, 0.0))) == []


ANSWER = GoldenAnswer(samples_per_s=10.0, bound_samples_per_s=11.0, rank_bytes=5, plan_id="a")
ROW = GoldenRow(planner="auto", builder="drawn", arguments={"seed": 1}, options={}, problem_id="p", answer=ANSWER)
NO_PLAN = GoldenAnswer(reason="too large")


@pytest.mark.parametrize(
    ("now", "fault"),
    [
        (replace(ANSWER, samples_per_s=9.94), "0.99400 of 10 samples/s"),
        (replace(ANSWER, bound_samples_per_s=9.99), "no bound: 9.99 is below the known 10"),
        (replace(ANSWER, bound_samples_per_s=10.4), "no bound: 10.4 is below the known 10.5"),
        (replace(ANSWER, fits=False), "5 bytes a worker do not fit"),
        (NO_PLAN, "10 samples/s; now too large"),
    ],
)
def test_what_is_worse_is_a_fault(now: GoldenAnswer, fault: str) -> None:
    known = 10.5 if "10.5" in fault else 0.0
    assert fault in list(faults(ROW, replace(ROW, answer=now), known))


def test_another_problem_is_a_fault() -> None:
    (fault,) = faults(ROW, replace(ROW, problem_id="q"))
    assert fault == "the problem is another one: p, now q"


def test_a_plan_where_none_fitted_is_a_fault() -> None:
    (fault,) = faults(replace(ROW, answer=NO_PLAN), ROW)
    assert fault.startswith("too large; now 10")


def test_other_plans_and_tighter_bounds_are_no_fault() -> None:
    now = replace(ROW, answer=replace(ANSWER, samples_per_s=9.96, bound_samples_per_s=10.0, rank_bytes=6, plan_id="b"))
    assert list(faults(ROW, now)) == []
    assert differences(ROW, now) == (
        "samples_per_s 10.0 -> 9.96; bound_samples_per_s 11.0 -> 10.0; rank_bytes 5 -> 6; plan_id a -> b"
    )


def test_a_forced_options_rate_is_known_of_the_free_problem() -> None:
    forced = replace(ROW, options={"stages": 2}, answer=replace(ANSWER, samples_per_s=10.7))
    by_gpipe = replace(forced, planner="gpipe", answer=replace(ANSWER, samples_per_s=10.8))
    on_paper = replace(ROW, options={"memory": "paper"}, answer=replace(ANSWER, samples_per_s=20.0))
    assert known_rates([ROW, forced, by_gpipe, on_paper]) == {
        ROW.name: 10.8,
        forced.name: 10.8,
        by_gpipe.name: 10.8,
        on_paper.name: 20.0,
    }
