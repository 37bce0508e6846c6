"""Plans in YAML and as variables: what parsers read is the plan."""

from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.cli.plan_formats import _lines, as_env, as_yaml, plain_values
from pipeplan.documents.degrees import DegreeChoice
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Model
from pipeplan.errors import InvalidInputError
from pipeplan.formats import in_order
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.solve import solve
from tests.pipeplan.builders import Cell, cluster, profile

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
KEYS = st.from_regex(r"[a-z]{3,8}_s", fullmatch=True)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=20)


@given(st.dictionaries(KEYS, VALUES, min_size=1))
def test_what_yaml_reads_is_what_was_written(document: dict[str, Any]) -> None:
    assert yaml.safe_load("\n".join(_lines(document))) == document


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two stages."""
    problem = PlanningProblem(
        profile=profile([Cell(weight_bytes=8, output_bytes=4)] * 4), cluster=cluster((2, 1e9)), batch_size=8
    )
    found = solve("gpipe", problem)
    assert isinstance(found, Plan)
    return found


def test_a_plans_documents_are_equal(plan: Plan) -> None:
    assert yaml.safe_load(as_yaml(plan)) == plain_values(plan)


def test_variables_hold_what_the_plan_says(plan: Plan) -> None:
    values = dict(line.split("=") for line in as_env(plan).splitlines())
    assert all(name.startswith("PLAN_") for name in values)
    assert values["PLAN_STAGES"] == str(plan.depth) == "2"
    assert values["PLAN_CUTS"] == str(plan.stages[1].start)
    assert values["PLAN_REPLICAS"] == "1,1"
    assert float(values["PLAN_SAMPLES_PER_S"]) == plan.throughput_samples_per_s


@pytest.mark.parametrize("planner", ["a b", "$(touch x)", "a'b", "`x`", "a;b"])
def test_what_would_need_quotes_is_refused(plan: Plan, planner: str) -> None:
    with pytest.raises(InvalidInputError, match="must be a text that needs no quotes"):
        as_env(replace(plan, planner=planner))


def test_free_text_is_in_no_variable(plan: Plan) -> None:
    assert "rm -rf" not in as_env(replace(plan, model=Model(name="x; rm -rf /")))


def test_the_values_of_a_degree_are_shown_from_the_least_on() -> None:
    values = [("tensor", "16"), ("tensor", "2"), ("microbatch_size", "8"), ("recomputed", "nothing")]
    made = [
        DegreeChoice(degree=degree, value="1", instead=value, throughput_samples_per_s=None, reason="none fits")
        for degree, value in values
    ]
    assert [each.instead for each in in_order(made)] == ["2", "16", "8", "nothing"]
