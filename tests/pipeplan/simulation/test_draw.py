"""Pictures of timelines."""

import pytest

from pipeplan.documents.stage_costs import unit_costs
from pipeplan.programs.pipeline import Pipeline
from pipeplan.schedules.registry import build
from pipeplan.simulation.draw import draw
from pipeplan.simulation.play import simulate

ONE_EACH = unit_costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=0.0)


def picture(schedule: str, pipeline: Pipeline, *, columns: int = 80, until_s: float | None = None) -> list[str]:
    timeline = simulate(build(schedule, pipeline), [ONE_EACH] * pipeline.depth)
    return draw(timeline, columns=columns, until_s=until_s).splitlines()


def test_1f1b_is_drawn_as_its_docstring_draws_it() -> None:
    assert picture("1f1b", Pipeline(replicas=(1, 1, 1), microbatches=4)) == [
        "stage 0  F1 F2 F3       B1 F4 B2    B3    B4",
        "stage 1     F1 F2    B1 F3 B2 F4 B3    B4",
        "stage 2        F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_replicas_have_rows_of_their_own() -> None:
    assert picture("naive", Pipeline(replicas=(2,), microbatches=1)) == ["stage 0.0  F1 B1", "stage 0.1  F2 B2"]


def test_what_lies_beyond_the_last_column_is_cut_and_said_to_be() -> None:
    assert picture("naive", Pipeline(replicas=(1,), microbatches=3), columns=9) == ["stage 0  F1 B1 F2 ..."]


def test_a_picture_can_be_scaled_to_a_time() -> None:
    assert picture("naive", Pipeline(replicas=(1,), microbatches=1), columns=12, until_s=2.0) == [
        "stage 0  F1--- B1---"
    ]


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_narrow_pictures_never_fail(columns: int) -> None:
    rows = picture("gpipe", Pipeline(replicas=(1, 1), microbatches=3), columns=columns, until_s=100.0)
    assert [row.split()[0] for row in rows] == ["stage", "stage"]
