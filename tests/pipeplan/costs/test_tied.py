"""Weights that several blocks use: a stage's copies of them, and the sum of the copies' gradients."""

from dataclasses import replace

import pytest

from pipeplan.costs.estimate import estimate
from pipeplan.costs.tied import copied_bytes, tied_stages
from pipeplan.documents.cluster import Level
from pipeplan.documents.plan import Stage
from pipeplan.documents.tied import TiedWeights
from pipeplan.programs.program import pipelines_in_a_row, stages_in_a_row
from tests.pipeplan.builders import Cell, cluster, profile

ENDS = TiedWeights(block=0, also=(3,), weight_bytes=6)
TIED = replace(profile([Cell(weight_bytes=10) for _ in range(4)]), tied=(ENDS,))
HALVES = (Stage(start=0, stop=2, replicas=2), Stage(start=2, stop=4, replicas=2))
SERVERS = cluster((2, 8.0), (2, 1.0))


def test_a_stage_has_a_copy_of_weights_that_only_other_stages_count() -> None:
    several = replace(TIED, tied=(ENDS, TiedWeights(block=1, also=(2, 3), weight_bytes=4)))
    assert copied_bytes(TIED.tied, 0, 4) == [0, 0, 0, 0]
    assert copied_bytes(TIED.tied, 1, 3) == [0, 0]
    assert copied_bytes(several.tied, 2, 4) == [4, 6]
    assert copied_bytes(several.tied, 1, 4) == [0, 0, 6]
    assert copied_bytes(several.tied, 3, 4) == [10]


def test_a_copy_is_held_updated_and_exchanged_among_replicas_like_own_weights() -> None:
    def costs(also: int) -> dict[str, float]:
        last = Cell(weight_bytes=10 + also)
        model = TIED if not also else profile([*(Cell(weight_bytes=10) for _ in range(3)), last])
        placed = stages_in_a_row((2, 2))
        own = estimate(model, SERVERS, HALVES, placed, microbatch_size=1, optimizer="adam")[1]
        return {name: getattr(own, name) for name in ("version_bytes", "fixed_bytes", "gradient_bytes", "reduce_s")}

    assert costs(also=0) == costs(also=6)


def test_the_gradients_of_copies_are_summed_on_the_ways_between_their_stages() -> None:
    """6 bytes. Inside a server at 8 bytes a second; across, both replicas share a port of 1 byte a second."""
    (inside,) = tied_stages(TIED, SERVERS, HALVES, pipelines_in_a_row((2, 2)))
    (across,) = tied_stages(TIED, SERVERS, HALVES, stages_in_a_row((2, 2)))
    assert inside.stages == across.stages == (0, 1)
    assert inside.seconds == pytest.approx(6 / 8)
    assert across.seconds == pytest.approx(2 * 6 / 1)


def test_devices_with_network_cards_of_their_own_do_not_share_the_port() -> None:
    own = Level(size=2, bandwidth_bytes_per_s=1.0, device_bandwidth_bytes_per_s=0.5)
    servers = replace(SERVERS, levels=(SERVERS.levels[0], own))
    (tied,) = tied_stages(TIED, servers, HALVES, stages_in_a_row((2, 2)))
    assert tied.seconds == pytest.approx(6 / 0.5)


def test_weights_that_stay_on_one_stage_are_not_summed() -> None:
    whole = (Stage(start=0, stop=4, replicas=2),)
    assert tied_stages(TIED, SERVERS, whole, pipelines_in_a_row((2,))) == ()


def test_in_a_v_the_first_rank_sums_for_itself() -> None:
    stages = tuple(Stage(start=index, stop=index + 1) for index in range(4))
    (in_v,) = tied_stages(TIED, SERVERS, stages, pipelines_in_a_row((1, 1)), in_v=True)
    (in_turn,) = tied_stages(TIED, SERVERS, stages, pipelines_in_a_row((1, 1)))
    assert (in_v.stages, in_v.seconds) == ((0, 3), 0.0)
    assert in_turn.seconds == pytest.approx(6 / 8)


def test_of_a_graph_the_blocks_count_where_the_stages_have_them() -> None:
    order = (0, 3, 1, 2)
    assert tied_stages(TIED, SERVERS, HALVES, pipelines_in_a_row((2, 2)), order=order) == ()
    (tied,) = tied_stages(TIED, SERVERS, HALVES, pipelines_in_a_row((2, 2)), order=(1, 3, 2, 0))
    assert tied.stages == (0, 1)
    costs = estimate(
        TIED, SERVERS, HALVES, stages_in_a_row((2, 2)), microbatch_size=1, optimizer="sgd", order=(1, 3, 2, 0)
    )
    assert [each.version_bytes for each in costs] == [26, 20]  # the copy is now on the first stage
