"""A stage's costs from profile, cluster and placement."""

from dataclasses import replace

import pytest

from pipeplan.costs.estimate import estimate
from pipeplan.documents.plan import Stage, Worker
from pipeplan.documents.profile import Overheads
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.program import pipelines_in_a_row, stages_in_a_row
from pipeplan.schedules.registry import build
from pipeplan.simulation.play import simulate
from tests.pipeplan.builders import Cell, cluster, profile

CHAIN = profile(
    [
        Cell(forward_s=1.0, backward_s=2.0, weight_bytes=100, output_bytes=10, activation_bytes=7),
        Cell(forward_s=3.0, backward_s=4.0, weight_bytes=200, output_bytes=20, activation_bytes=9),
        Cell(forward_s=5.0, backward_s=6.0, weight_bytes=400, output_bytes=30, activation_bytes=11),
    ],
    sizes=(1, 2),
    input_bytes=5,
)
TWO_STAGES = (Stage(start=0, stop=2, replicas=2), Stage(start=2, stop=3, replicas=2, recompute=True))
SERVERS = cluster((2, 100.0), (2, 1.0), latency_s=0.5)


def test_a_stage_sums_its_blocks_and_pays_for_the_links_that_it_crosses() -> None:
    measured = replace(CHAIN, overheads=Overheads(update_s_per_byte=0.01, instruction_s=0.001, message_s_per_byte=1e-4))
    first, second = estimate(
        measured, SERVERS, TWO_STAGES, stages_in_a_row((2, 2)), microbatch_size=2, optimizer="adam"
    )
    assert (first.forward_s, first.backward_s) == (8.0, 12.0)
    assert (first.activation_transfer_s, second.gradient_transfer_s) == (40 / 1.0, 40 / 1.0)  # between servers
    assert (first.gradient_transfer_s, second.activation_transfer_s) == (0.0, 0.0)  # nothing beyond the ends
    assert first.reduce_s == 300 / 100.0 + 2 * 0.5  # inside a server, 2 (2 - 1) / 2 of the weights in two hops
    assert (first.activation_latency_s, second.gradient_latency_s) == (0.5, 0.5)
    assert (first.gradient_latency_s, second.activation_latency_s) == (0.0, 0.0)
    assert first.update_s == 3.0
    assert first.instruction_s == 0.001
    assert first.handing_over_s(onward=True) == pytest.approx(0.001 + 1e-4 * 40)
    assert second.handing_over_s(onward=False) == first.handing_over_s(onward=True)
    assert second.activation_message_s == 0.0  # nobody receives the last block's 60 bytes
    assert (first.version_bytes, first.fixed_bytes) == (300, 900)  # gradients and Adam's two moments
    assert (first.activation_bytes, first.input_bytes, second.input_bytes) == (32, 10, 40)
    assert second.recompute_s == 10.0


def test_each_boundary_of_a_stage_has_its_own_link() -> None:
    """Stages 0 and 1 share a server, stage 2 is in the next one. Stage 1 once sent its gradient as late as its output.

    stage 0   F1 >              < B1
    stage 1        F1 >>>> <<<<
    """
    machines = cluster((2, 100.0), (2, 1.0))
    levels = [replace(level, latency_s=own_s) for level, own_s in zip(machines.levels, (0.25, 4.0), strict=True)]
    stages = tuple(Stage(start=block, stop=block + 1) for block in range(3))
    placement = stages_in_a_row((1, 1, 1))
    costs = estimate(
        CHAIN, replace(machines, levels=tuple(levels)), stages, placement, microbatch_size=1, optimizer="sgd"
    )
    assert [each.activation_latency_s for each in costs] == [0.25, 4.0, 0.0]
    assert [each.gradient_latency_s for each in costs] == [0.0, 0.25, 4.0]
    timeline = simulate(build("gpipe", Pipeline(replicas=(1, 1, 1), microbatches=1)), costs)
    sent_s = sum(each.activation_transfer_s + each.gradient_transfer_s for each in costs)
    computed_s = sum(each.forward_s + each.backward_s for each in costs)
    assert timeline.makespan_s == pytest.approx(computed_s + sent_s + 2 * 0.25 + 2 * 4.0)


def test_an_update_takes_what_its_bytes_its_blocks_and_every_update_take() -> None:
    """A stage without weights updates nothing."""
    blocks = tuple(replace(block, update_s=own) for block, own in zip(CHAIN.blocks, (0.5, 0.25, 0.0), strict=True))
    overheads = Overheads(update_s_per_byte=0.01, update_s=0.125)
    measured = replace(CHAIN, blocks=blocks, overheads=overheads)
    costs = estimate(measured, SERVERS, TWO_STAGES, stages_in_a_row((2, 2)), microbatch_size=2, optimizer="sgd")
    assert [each.update_s for each in costs] == [3.0 + 0.75 + 0.125, 4.0 + 0.125]
    frozen = replace(measured, blocks=(*blocks[:2], replace(blocks[2], weight_bytes=0)))
    costs = estimate(frozen, SERVERS, TWO_STAGES, stages_in_a_row((2, 2)), microbatch_size=2, optimizer="sgd")
    assert costs[1].update_s == 0.0


def test_pipelines_in_a_row_send_inside_a_server_and_reduce_between_them() -> None:
    first, _ = estimate(CHAIN, SERVERS, TWO_STAGES, pipelines_in_a_row((2, 2)), microbatch_size=1, optimizer="sgd")
    assert first.activation_transfer_s == 20 / 100.0
    assert first.reduce_s == 300 / 1.0 + 2 * 0.5


def test_unequal_replicas_cross_the_slowest_link_of_all_round_robin_pairs() -> None:
    stages = (Stage(start=0, stop=2, replicas=3), Stage(start=2, stop=3, replicas=1))
    first, second = estimate(CHAIN, SERVERS, stages, stages_in_a_row((3, 1)), microbatch_size=1, optimizer="sgd")
    assert first.activation_transfer_s == 20 / 1.0
    assert second.reduce_s == 0.0


def test_c_extra_multiplies_all_compute_and_is_never_a_gain() -> None:
    stage = (Stage(start=0, stop=3, recompute=True),)

    def recompute_s(factor: float) -> float:
        costs = estimate(
            CHAIN, SERVERS, stage, (Worker(stage=0),), microbatch_size=1, optimizer="sgd", recompute_factor=factor
        )
        return costs[0].recompute_s

    assert recompute_s(4 / 3) == pytest.approx(21 / 3)
    assert recompute_s(0.5) == 0.0


def test_a_backward_that_was_not_measured_split_is_all_p1() -> None:
    split = replace(
        CHAIN.blocks[0],
        measurements=tuple(
            replace(m, backward_input_s=0.5 * m.microbatch_size, backward_weight_s=1.5 * m.microbatch_size)
            for m in CHAIN.blocks[0].measurements
        ),
    )
    mixed = replace(CHAIN, blocks=(split, *CHAIN.blocks[1:]))
    costs = estimate(mixed, SERVERS, (Stage(start=0, stop=3),), (Worker(stage=0),), microbatch_size=1, optimizer="sgd")[
        0
    ]
    assert (costs.backward_input_s, costs.backward_weight_s) == (0.5 + 4.0 + 6.0, 1.5)
