"""The largest model, against trying every size."""

from dataclasses import replace

import pytest

from pipeplan.documents.plan import Plan
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.two_bw.planner import two_bw
from pipeplan.questions.largest import KINDS, inner_blocks, largest, repeated
from tests.pipeplan.builders import Cell, cluster, profile

EMBEDDING = Cell(weight_bytes=30, output_bytes=1)
LAYER = Cell(weight_bytes=10, output_bytes=1, activation_bytes=5)
HEAD = Cell(weight_bytes=20, activation_bytes=2)


def problem(memory_bytes: int = 100) -> PlanningProblem:
    machines = cluster((4, 100.0), memory_bytes=memory_bytes)
    return PlanningProblem(profile=profile([EMBEDDING, LAYER, HEAD], input_bytes=1), cluster=machines, batch_size=16)


def test_inner_blocks_are_repeated_between_the_others() -> None:
    larger = repeated(problem().profile, range(1, 2), 3)
    assert [block.weight_bytes for block in larger.blocks] == [30, 10, 10, 10, 20]
    assert inner_blocks(problem().profile) == range(1, 2)


def fits(asked: PlanningProblem, times: int, depth: int, schedule: str, recompute: bool) -> bool:
    whole = repeated(asked.profile, range(1, 2), times)
    if len(whole.blocks) < depth:
        return False
    options = Options(schedule=schedule, stages=depth, recompute=recompute, microbatch_size=1)
    row = cluster((depth, 100.0), memory_bytes=asked.cluster.device.memory_bytes)
    return isinstance(two_bw(replace(asked, profile=whole, cluster=row, options=options)), Plan)


@pytest.mark.each_case
@pytest.mark.parametrize("memory_bytes", [60, 117])
def test_the_largest_model_is_the_last_that_fits(memory_bytes: int) -> None:
    asked = problem(memory_bytes)
    sizes = largest(asked, two_bw, range(1, 2), [1, 2, 4])
    assert [(size.depth, size.schedule, size.recompute) for size in sizes] == [
        (depth, *kind) for depth in (1, 2, 4) for kind in KINDS if (kind[0] == "data-parallel") == (depth == 1)
    ]
    for size in sizes:
        fitting = [t for t in range(1, 24) if fits(asked, t, size.depth, size.schedule, size.recompute)]
        assert size.repetitions == max(fitting, default=0) < 23
        assert size.weight_bytes == (50 + 10 * size.repetitions if size.repetitions else 0)
        assert size.parameters == size.weight_bytes // 4
        assert size.limit


def test_deeper_pipelines_hold_larger_models() -> None:
    """PipeDream-2BW (2021), figure 9: the largest model grows with the depth, with recomputation the more."""
    sizes = largest(problem(150), two_bw, range(1, 2), [2, 4])
    by_kind = {(size.schedule, size.recompute, size.depth): size.blocks for size in sizes}
    for schedule in ("pipedream-2bw", "1f1b"):
        for recompute in (False, True):
            assert by_kind[schedule, recompute, 4] > by_kind[schedule, recompute, 2]
        assert by_kind[schedule, True, 4] >= by_kind[schedule, False, 4]


def test_blocks_that_are_not_there_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="repeat: must be some of the 3 blocks"):
        largest(problem(), two_bw, range(2, 5), [1])
