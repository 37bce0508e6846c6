"""Steps: which configurations are tried next to a fast one."""

from dataclasses import replace

import numpy as np
import pytest

from pipeplan.documents.forms import Form
from pipeplan.planners.whole.degrees import Degrees, Recipe, Shapes, steps_to

OWN = Recipe(form=Form(tensor=2), microbatch_size=2, recompute="none", sharding="optimizer")
DEGREES = Degrees(recipe=OWN, pipeline=8, chunks=1, data=4, microbatches=16)


def shapes(recipe: Recipe, *rows: tuple[int, int, int]) -> Shapes:
    pipeline, chunks, data = np.asarray(rows, dtype=np.int64).T
    return Shapes(recipe=recipe, pipeline=pipeline, chunks=chunks, data=data, microbatches=64 // data)


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
        (replace(OWN, microbatch_size=1), (4, 1, 8), 2),
        (replace(OWN, microbatch_size=4, recompute="block"), (8, 2, 4), 3),
    ],
)
def test_a_step_changes_one_choice_or_moves_devices(recipe: Recipe, row: tuple[int, int, int], steps: int) -> None:
    assert steps_to(shapes(recipe, row), DEGREES).tolist() == [steps]
