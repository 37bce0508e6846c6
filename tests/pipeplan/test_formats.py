"""Formats: figures as people read them."""

from dataclasses import replace

import pytest

from pipeplan.documents.certificate import Certificate
from pipeplan.formats import four_digits, proven, seconds, spelled_out


@pytest.mark.parametrize(
    ("value", "shown"),
    [(86.127, "86.13"), (7253.4, "7,253"), (9999.6, "10,000"), (76_885.4, "76,885"), (1.2e7, "12,000,000")],
)
def test_no_power_of_ten_stands_in_a_rate(value: float, shown: str) -> None:
    """A tiny model's plan was said to train 1.155e+04 samples/s, beside another's 7,253."""
    assert four_digits(value) == shown


@pytest.mark.parametrize(
    ("value_s", "shown"),
    [(0.0, "0 s"), (2e-19, "0 s"), (2e-9, "0.002 µs"), (8e-5, "80 µs"), (0.0125, "12.5 ms"), (23.5, "23.5 s")],
)
def test_a_time_has_the_unit_that_it_is_read_in(value_s: float, shown: str) -> None:
    assert seconds(value_s) == shown


def test_a_plans_reasons_are_shown_without_powers_of_ten() -> None:
    reason = "other stages or places, slower when played: 7.589e+04 samples/s, 1.3 % less"
    assert spelled_out(reason) == "other stages or places, slower when played: 75,890 samples/s, 1.3 % less"
    assert spelled_out("not played: at most 1e+05 samples/s") == "not played: at most 100,000 samples/s"
    assert spelled_out("memory: stage 1 misses 784 B") == "memory: stage 1 misses 784 B"


def certificate(value: float, bound: float) -> Certificate:
    return Certificate(method="cp-sat", quantity="seconds a sample", value=value, bound=bound, claim="")


def test_a_proof_is_one_sentence_with_one_figure_and_a_gap_with_two() -> None:
    assert proven(certificate(0.5, 0.5)) == (
        "proven optimal to 1e-06: seconds a sample 0.5, and no plan can have less (cp-sat)"
    )
    assert proven(certificate(1.0, 1 - 1e-7)).startswith("proven optimal to 1e-06: ")
    near = "within 2.2 % of the optimum: seconds a sample 0.5, and no plan can have less than 0.48958 (cp-sat)"
    assert proven(certificate(0.5, 0.48958)) == near
    few = replace(certificate(0.5, 0.5), bound_of_all=0.48958)
    assert proven(few) == f"the fastest of the stages that were compared, and {near}"
    assert proven(replace(certificate(0.5, 0.495), bound_of_all=0.48958)) == near
    assert proven(certificate(2.5, 1.0)).startswith("within 150 % of the optimum: ")
    assert proven(certificate(1.0, 0.99999)).startswith("within 0.0011 % of the optimum: ")
    assert proven(certificate(1.0, 0.5)).startswith("within 100 % of the optimum: ")
    assert proven(certificate(1.0, 1 / 1.129)).startswith("within 13 % of the optimum: ")


def test_a_plan_without_a_bound_is_not_proven() -> None:
    """A gap of nothing was said of it."""
    assert proven(certificate(0.5, 0.0)).startswith("not proven optimal: no bound is known: ")
    few = replace(certificate(0.5, 0.5), bound_of_all=0.0)
    assert not few.proven and "no bound is known" in few.optimality
