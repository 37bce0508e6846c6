"""From the ranks' figures to a profile and a cluster."""

import dataclasses
from pathlib import Path

import pytest

from pipeplan.costs.estimate import estimate
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import dump, parse
from pipeplan.documents.plan import Stage
from pipeplan.documents.profile import Device, Profile
from pipeplan.errors import InvalidInputError
from pipeplan.programs.program import pipelines_in_a_row
from pipeplan.protocol.jobs import ProfileTask
from worker_agent.profiler.exchange import Exchanged
from worker_agent.profiler.job import ProfileDirectory, ProfileJob, ProgressWriter, following, read_job, write_job
from worker_agent.profiler.results import (
    BlockFigures,
    RankFigures,
    cluster_of,
    profile_of,
    read_figures,
    spread,
    trimmed_mean,
    write_figures,
)

JOB = ProfileJob(task=ProfileTask(model="package:model", microbatch_sizes=(2,), devices=2, rounds=3))


def figures(*, forward_s: tuple[float, ...], memory_bytes: int, bandwidth: float | None) -> RankFigures:
    block = BlockFigures(
        forward_s=forward_s,
        backward_s=tuple(2 * s for s in forward_s),
        split_forward_s=tuple(1.5 * s for s in forward_s),
        backward_input_s=tuple(1.2 * s for s in forward_s),
        backward_weight_s=tuple(0.9 * s for s in forward_s),
        weight_gradient_bytes=memory_bytes // 20,
        input_bytes=8,
        output_bytes=16,
        activation_bytes=24,
        split_activation_bytes=20,
        split_shared_bytes=4,
        split_gradient_bytes=10,
        workspace_bytes=memory_bytes // 10,
    )
    return RankFigures(
        model_name="model",
        block_names=("only",),
        weight_bytes=(40,),
        sizes=((block,),),
        without_graph=(0.8, 0.9),
        updates_s=(40e-9,),
        first_update_s=3e-6,
        version_s_per_byte=2e-9,
        handing_over_s=None if bandwidth is None else 3e-4,
        handing_over_more_s=None if bandwidth is None else 5e-4,
        message_bytes=100,
        tied=(),
        exchanged=Exchanged(bytes_by_block=(1000,), added_s=4e-5),
        bandwidth_bytes_per_s=bandwidth,
        latency_s=None if bandwidth is None else 1e-5,
        device=Device(name="core", memory_bytes=memory_bytes),
        clock="wall clock",
        torch_version="2.13.0",
    )


RANKS = (
    figures(forward_s=(1.0, 2.0, 3.0), memory_bytes=1000, bandwidth=1e9),
    figures(forward_s=(2.0, 4.0, 9.0), memory_bytes=900, bandwidth=None),
)


def test_times_are_means_over_the_rounds_of_all_ranks_without_the_extremes() -> None:
    (measured,) = profile_of(JOB, RANKS).blocks[0].measurements
    assert (measured.forward_s, measured.backward_s) == (2.75, 5.5)  # of 1 2 2 3 4 9
    assert (measured.forward_spread_s, measured.backward_spread_s) == (1.75, 3.5)
    assert measured.workspace_bytes == 100


def test_a_trimmed_mean_counts_what_is_slow_often_but_not_a_single_pause() -> None:
    assert trimmed_mean([2.0]) == 2.0
    assert trimmed_mean([1.0, 3.0]) == 2.0
    assert trimmed_mean([1.0, 900.0, 3.0]) == 3.0  # the median
    often_slow = [1.0] * 6 + [2.0] * 4
    assert trimmed_mean(often_slow) == pytest.approx(11 / 8)  # of which the median is 1
    assert trimmed_mean([*often_slow * 2, 900.0]) == pytest.approx(24 / 17)  # 21 values, less 2 at each end


def test_the_profile_says_how_it_was_measured_and_by_which_spec_its_model_is_built() -> None:
    profile = profile_of(JOB, RANKS)
    assert profile.method is not None
    assert (profile.method.concurrent_devices, profile.method.rounds, profile.method.clock) == (2, 3, "wall clock")
    assert (profile.model.name, profile.model.spec) == ("model", "package:model")
    assert profile.weight_bytes == 40


def test_the_longer_forward_of_a_split_backward_counts_in_p1() -> None:
    (measurement,) = profile_of(JOB, RANKS).blocks[0].measurements
    assert measurement.forward_s == 2.75
    assert measurement.backward_input_s == pytest.approx(1.2 * 2.75 + (1.5 - 1.0) * 2.75)
    assert measurement.deferred_share == pytest.approx(0.9 / (1.2 + 0.9))


def test_the_profile_and_the_cluster_are_documents_that_everybody_accepts() -> None:
    profile, cluster = profile_of(JOB, RANKS), cluster_of(RANKS)
    assert parse(Profile, dump(dataclasses.asdict(profile))) == profile
    assert parse(Cluster, dump(dataclasses.asdict(cluster))) == cluster
    assert (cluster.devices, cluster.levels[0].bandwidth_bytes_per_s, cluster.device.memory_bytes) == (2, 1e9, 900)


def test_overheads_are_medians_over_the_ranks_that_measured_them() -> None:
    found = profile_of(JOB, RANKS)
    overheads = found.overheads
    assert (overheads.update_s_per_byte, overheads.version_s_per_byte) == (40e-9 / 40, 2e-9)
    assert (overheads.update_s, found.blocks[0].update_s) == (3e-6, 0.0)
    assert overheads.instruction_s == 3e-4
    assert overheads.message_s_per_byte == pytest.approx(2e-6)
    assert overheads.forward_without_graph == pytest.approx(0.85)


def test_an_exchange_is_compared_with_a_ring_over_the_link() -> None:
    """1000 bytes at 1 GB/s take a ring of two a microsecond after two hops of 10 us; they added 40 us to a backward."""
    assert profile_of(JOB, RANKS).overheads.exchange_factor == pytest.approx(20.0)


def test_a_few_bytes_that_take_what_the_code_around_them_takes_are_played_so() -> None:
    ranks = [dataclasses.replace(one, exchanged=Exchanged(bytes_by_block=(4,), added_s=2e-3)) for one in RANKS]
    assert profile_of(JOB, ranks).overheads.exchange_factor == pytest.approx((2e-3 - 2e-5) / 4e-9)


def test_what_an_exchange_adds_is_played_as_it_was_measured() -> None:
    """Three blocks of a bucket each: the first two exchanges are hidden behind the backward, unless they take long."""
    for added_s in (0.03, 0.5, 20.0):
        ranks = [_with_three_blocks(figures, added_s) for figures in RANKS]
        profile, cluster = profile_of(JOB, ranks), cluster_of(ranks)
        costs = estimate(
            profile,
            cluster,
            [Stage(start=0, stop=3, replicas=2)],
            pipelines_in_a_row([2]),
            microbatch_size=2,
            optimizer="sgd",
        )
        assert costs[0].reduce_tail_s == pytest.approx(added_s)
        hidden = added_s < costs[0].reduce_s / 2
        assert hidden == (added_s < 1)  # a backward of a block takes 5.5 s


def test_an_exchange_that_added_nothing_is_taken_to_be_as_fast_as_the_link() -> None:
    ranks = [dataclasses.replace(one, exchanged=Exchanged(bytes_by_block=(1000,), added_s=0.0)) for one in RANKS]
    assert profile_of(JOB, ranks).overheads.exchange_factor == 1.0


def _with_three_blocks(one: RankFigures, added_s: float) -> RankFigures:
    size = 30 * 2**20
    return dataclasses.replace(
        one,
        block_names=("a", "b", "c"),
        weight_bytes=(size,) * 3,
        sizes=tuple(blocks * 3 for blocks in one.sizes),
        updates_s=one.updates_s * 3,
        exchanged=Exchanged(bytes_by_block=(size,) * 3, added_s=added_s),
    )


def test_a_device_that_was_alone_knows_of_no_exchange_and_no_message() -> None:
    alone = dataclasses.replace(RANKS[0], handing_over_s=None, handing_over_more_s=None, exchanged=None)
    overheads = profile_of(JOB, [alone]).overheads
    assert (overheads.instruction_s, overheads.message_s_per_byte, overheads.exchange_factor) == (0.0, 0.0, 1.0)


def test_the_spread_is_the_interquartile_range_and_nothing_for_one_value() -> None:
    assert spread([5.0]) == 0.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0


def test_jobs_and_figures_survive_their_files(tmp_path: Path) -> None:
    directory = ProfileDirectory(root=tmp_path)
    write_job(directory, JOB)
    assert read_job(directory) == JOB
    assert read_figures(directory.result(0)) is None
    write_figures(directory.result(0), RANKS[0])
    assert read_figures(directory.result(0)) == RANKS[0]


def test_progress_of_the_first_rank_reaches_its_follower(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    path = tmp_path / "progress"
    with following(path, lambda done, total, message: seen.append((done, total, message))):
        first, second = (ProgressWriter(path, rank=rank, total=3) for rank in (0, 1))
        second.step("not heard")
        first.say("data: random")
        first.step("round 1 of 3")
    assert seen[-1] == (1, 3, "round 1 of 3")
    assert not any(message == "not heard" for _, _, message in seen)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"clock": "sun"}, "clock: must be one of auto, processor, wall, got 'sun'"),
        ({"device": "tpu"}, "device: must be one of auto, cpu, cuda, got 'tpu'"),
        ({"loss": "a:b"}, "data: must be named where a loss is named, so that its targets suit it, got None"),
    ],
)
def test_a_job_that_cannot_be_is_refused(change: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        dataclasses.replace(JOB, **change)  # type: ignore[arg-type]
    assert str(caught.value) == sentence


def test_a_microbatch_size_is_not_measured_twice() -> None:
    with pytest.raises(InvalidInputError, match="microbatch_sizes: must not name a size twice, got 2"):
        ProfileJob(task=ProfileTask(model="a:b", microbatch_sizes=(2, 4, 2)))


def test_the_deferred_share_is_that_of_p2_and_a_block_that_defers_nothing_has_no_p2() -> None:
    """A clock sees some microseconds where nothing is done: a plan with 2BP once thought that it could move them."""
    (found,) = profile_of(JOB, RANKS).blocks[0].measurements
    assert found.deferred_share == pytest.approx(0.9 / 2.1)

    still = [
        dataclasses.replace(rank, sizes=((dataclasses.replace(rank.sizes[0][0], defers=False),),)) for rank in RANKS
    ]
    (found,) = profile_of(JOB, still).blocks[0].measurements
    assert (found.deferred_share, found.backward_weight_s) == (0.0, 0.0)
    assert found.backward_input_s is not None


def test_updates_are_priced_by_the_bytes_that_are_trained() -> None:
    ranks = [figures(forward_s=(1.0,), memory_bytes=100, bandwidth=1e9)]
    frozen = [dataclasses.replace(ranks[0], frozen_bytes=(30,), buffer_bytes=(5,))]
    (plain,), (block,) = profile_of(JOB, ranks).blocks, profile_of(JOB, frozen).blocks
    assert (block.trained_bytes, block.untrained_bytes) == (10, 35) and block.weight_bytes == plain.weight_bytes
    rates = [profile_of(JOB, each).overheads.update_s_per_byte for each in (ranks, frozen)]
    assert rates == pytest.approx([40e-9 / 40, 40e-9 / 10])
