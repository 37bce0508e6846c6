"""Steps: which configurations are tried next to a fast one."""

from dataclasses import replace

import numpy as np
import pytest

from pipeplan.documents.forms import Form
from pipeplan.planners.bound import of_stages_s, turns_s, within_s
from pipeplan.planners.whole.degrees import Degrees, Recipe, Shapes, steps_to
from pipeplan.planners.whole.exchanged import _paced_s, crowded_s

OWN = Recipe(form=Form(tensor=2), microbatch_size=2, recompute="none", sharding="optimizer")
DEGREES = Degrees(recipe=OWN, pipeline=8, chunks=1, data=4, microbatches=16)


def shapes(recipe: Recipe, *rows: tuple[int, int, int]) -> Shapes:
    pipeline, chunks, data = np.asarray(rows, dtype=np.int64).T
    return Shapes(recipe, pipeline, chunks, data, 64 // data, *np.zeros((3, len(rows))))


@pytest.mark.parametrize(
    ("recipe", "row", "steps"),
    [
        (OWN, (8, 1, 4), 0),
        (replace(OWN, microbatch_size=1), (8, 1, 4), 1),
        (replace(OWN, recompute="block"), (8, 1, 4), 1),
        (replace(OWN, sharding="none"), (8, 1, 4), 1),
        (OWN, (8, 2, 4), 1),
        (OWN, (4, 1, 8), 1),  # devices move from pipelines to replicas
        (OWN, (7, 1, 4), 1),
        (replace(OWN, form=Form(tensor=1)), (16, 1, 4), 1),
        (replace(OWN, form=Form(tensor=4)), (4, 1, 4), 1),
        (replace(OWN, form=Form(tensor=4)), (16, 1, 1), 2),
        (replace(OWN, sharding="none"), (32, 1, 1), 1),  # one replica has nobody to share states with
        (replace(OWN, sharding="none"), (16, 1, 2), 2),
        (replace(OWN, microbatch_size=1), (4, 1, 8), 2),
        (replace(OWN, microbatch_size=4, recompute="block"), (8, 2, 4), 3),
    ],
)
def test_a_step_changes_one_choice_or_moves_devices(recipe: Recipe, row: tuple[int, int, int], steps: int) -> None:
    assert steps_to(shapes(recipe, row), DEGREES).tolist() == [steps]


def test_sharing_weights_is_no_step_to_or_from_a_pipeline_whose_stages_hold_whole_ones() -> None:
    gradients, weights = (replace(OWN, sharding=each) for each in ("gradients", "weights"))
    ours = replace(DEGREES, recipe=gradients)
    assert steps_to(shapes(weights, (8, 1, 4), (4, 1, 8), (1, 1, 32)), ours).tolist() == [0, 1, 1]
    alone = replace(ours, pipeline=1, chunks=1, data=32)
    assert steps_to(shapes(weights, (8, 1, 4), (1, 1, 32)), alone).tolist() == [1, 1]


def test_crowded_transfers_lie_between_those_that_never_meet_and_always_do() -> None:
    assert crowded_s(4.0, 6.0, 0.0) == 4.0
    assert crowded_s(4.0, 6.0, 5.0) == pytest.approx(4.0 + (6.0 - 4.0) * 5.0 / crowded_s(4.0, 6.0, 5.0))
    assert crowded_s(4.0, 6.0, 6.0) == pytest.approx(6.0)


def test_the_slowest_round_may_be_one_of_later_ranks() -> None:
    """Four ranks of a second, 16 microbatches; the way to the last one takes 6 s there and back.

    From rank 2 on two are in flight: 2 s before it and (2 + 6) / 2 s for each. From rank 0 it is (4 + 6) / 4 s.
    """
    assert _paced_s(1.0, np.asarray([6.0, 6.0, 6.0, 0.0]), 16) == pytest.approx(2.0 + 16 * 4.0)


def test_two_ranks_wait_for_half_of_the_way_between_them() -> None:
    """Four ranks of 3 s, a third of it forwards; the way from rank 1 to rank 2 and back takes 10 s.

    Two microbatches pass ranks 1 and 2 in 2 x 3 + 10 s: (18 - 2) / 2 times. Before these, one more forward of rank 1;
    after them, the last microbatch's whole way.
    """
    ways_s = np.asarray([0.0, 0.0, 10.0, 10.0])
    found_s = turns_s(within_s(np.full(4, 3.0)), np.full(4, 1.0), ways_s, 18)
    assert found_s == pytest.approx(1.0 + 8 * 16.0 + (4 * 3.0 + 10.0))
    assert turns_s(within_s(np.full(4, 3.0)), np.full(4, 1.0), ways_s, 1) == 0.0


def test_ranks_of_several_stages_wait_for_two_thirds_of_the_way_between_them() -> None:
    """Two ranks of two stages, a second there and another back; from one rank to the other takes 4 s, as does the way
    back. Three turns of rank 0 pass both ranks in 4 + 8 s.

    Of its 16 forwards five come before the first backward. From the sixth to the last there are ten turns: three times
    three, and one of 2 s. Before them the first microbatch goes through all stages, which takes 8 + 3 x 8 s there and
    back together with the last microbatch's way back, and once more through the last stages of both ranks.
    """
    ones, ways_s = np.ones((2, 2)), np.asarray([0.0, 8.0])
    assert of_stages_s(ones, 2 * ones, ways_s, 32.0, 8) == pytest.approx(32.0 + (4.0 + 8.0) + 3 * 12.0 + 2.0)
