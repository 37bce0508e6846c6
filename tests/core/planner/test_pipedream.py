"""PipeDream's planner against the paper's formulas, tried on every partition there is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner_service.core.cluster import Cluster
from planner_service.core.errors import InvalidInputError
from planner_service.core.identity import content_id
from planner_service.core.plan import Infeasible, Plan
from planner_service.core.planner.problem import Options, Problem
from planner_service.solvers.solve import solve
from tests.core.builders import Cell, cells, cluster, clusters, profile

STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write total as a sum of so many positive numbers."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One partition: stops and replicas by stage, its slowest part, and what its worst worker holds."""

    stops: tuple[int, ...]
    replicas: tuple[int, ...]
    bottleneck: float
    sent_bytes: Fraction
    worst_bytes: int
    worst_stage: int


def every_partition(blocks: Sequence[Cell], machines: Cluster, options: Options) -> Iterator[Outcome]:
    """All of them, as section 3.2 costs them."""
    for stages in range(1, min(len(blocks), machines.devices) + 1):
        for sizes in compositions(len(blocks), stages):
            for replicas in compositions(machines.devices, stages):
                yield outcome(blocks, machines, options, sizes, replicas)


def outcome(
    blocks: Sequence[Cell], machines: Cluster, options: Options, sizes: tuple[int, ...], replicas: tuple[int, ...]
) -> Outcome:
    slowest, sent, held = 0.0, Fraction(0), []
    start = first = 0
    before: range | None = None
    factor = 4 if options.synchronisation != "all-reduce" else 2
    for size, m in zip(sizes, replicas, strict=True):
        stage, devices = blocks[start : start + size], range(first, first + m)
        weights = sum(block.weight_bytes for block in stage)
        bandwidth = machines.link(devices).bandwidth_bytes_per_s
        synchronise_s = sum(factor * (m - 1) / m * block.weight_bytes / bandwidth for block in stage)
        slowest = max(slowest, max(sum(b.forward_s + b.backward_s for b in stage), synchronise_s) / m)
        sent += Fraction(factor * (m - 1), m) * weights
        if before is not None:
            a = blocks[start - 1].output_bytes
            pairs = [(before[k % len(before)], devices[k % m]) for k in range(lcm(len(before), m))]
            slowest = max(slowest, max(2 * a / machines.link(pair).bandwidth_bytes_per_s for pair in pairs))
            sent += 2 * a
        in_flight = -(-(machines.devices - first) // m)
        held.append(held_bytes(blocks, start, start + size, in_flight, options))
        start, first, before = start + size, first + m, devices
    stops = tuple(sum(sizes[: index + 1]) for index in range(len(sizes)))
    worst = held.index(max(held))
    return Outcome(
        stops=stops,
        replicas=replicas,
        bottleneck=slowest,
        sent_bytes=sent,
        worst_bytes=held[worst],
        worst_stage=worst,
    )


def held_bytes(blocks: Sequence[Cell], start: int, stop: int, in_flight: int, options: Options) -> int:
    weights = sum(block.weight_bytes for block in blocks[start:stop])
    activations = sum(block.activation_bytes for block in blocks[start:stop])
    if options.memory == "paper":
        return in_flight * (weights + activations + (blocks[start - 1].output_bytes if start else 0))
    transient = max(block.workspace_bytes for block in blocks[start:stop])
    return (in_flight + 1 + STATES[options.optimizer]) * weights + in_flight * activations + transient


def plan_of(blocks: Sequence[Cell], machines: Cluster, options: Options | None = None) -> Plan | Infeasible:
    problem = Problem(profile=profile(blocks), cluster=machines, batch_size=1, options=options or Options())
    return solve("pipedream", problem)


options_of_all_kinds = st.builds(
    Options,
    synchronisation=st.sampled_from([None, "parameter-server", "all-reduce"]),
    memory=st.sampled_from(["training", "paper"]),
    optimizer=st.sampled_from(sorted(STATES)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(cells(), min_size=1, max_size=5), clusters(6), options_of_all_kinds)
def test_the_recurrence_finds_what_trying_every_partition_finds(
    blocks: list[Cell], machines: Cluster, options: Options
) -> None:
    every = list(every_partition(blocks, machines, options))
    fitting = [o for o in every if o.worst_bytes <= machines.device.memory_bytes]
    answer = plan_of(blocks, machines, options)
    if isinstance(answer, Infeasible):
        assert not fitting
        least = min(o.worst_bytes for o in every)
        assert answer.reasons[0].missing_bytes == least - machines.device.memory_bytes
        return
    best = min(o.bottleneck for o in fitting)
    assert answer.time_per_microbatch_s == pytest.approx(best, rel=1e-12)
    assert answer.throughput_samples_per_s == pytest.approx(1 / best, rel=1e-12)
    sizes = tuple(stage.stop - stage.start for stage in answer.stages)
    chosen = outcome(blocks, machines, options, sizes, answer.replicas)
    assert chosen.bottleneck == pytest.approx(best, rel=1e-12)
    assert chosen.worst_bytes == max(stage.memory_bytes for stage in answer.stages)


@settings(max_examples=100, deadline=None)
@given(st.lists(cells(weights=False), min_size=1, max_size=5), clusters(6))
def test_ties_go_to_fewer_stages_then_less_traffic_then_smaller_cuts(blocks: list[Cell], machines: Cluster) -> None:
    """Without weights all costs are quotients of whole numbers, which floating point compares exactly."""
    every = every_partition(blocks, machines, Options())
    fitting = [o for o in every if o.worst_bytes <= machines.device.memory_bytes]
    answer = plan_of(blocks, machines)
    if isinstance(answer, Infeasible):
        assert not fitting
        return
    expected = min(fitting, key=lambda o: (o.bottleneck, len(o.stops), o.sent_bytes, o.stops, o.replicas))
    assert tuple(stage.stop for stage in answer.stages) == expected.stops
    assert answer.replicas == expected.replicas


def recurrence(blocks: Sequence[Cell], machines: int, bandwidth: float) -> float:
    """A(N, M) of section 3.2, from the front, in plain loops."""

    def stage_s(i: int, j: int, m: int) -> float:
        synchronise_s = sum(4 * (m - 1) / m * block.weight_bytes / bandwidth for block in blocks[i:j])
        return max(sum(b.forward_s + b.backward_s for b in blocks[i:j]), synchronise_s) / m

    table: dict[tuple[int, int], float] = {}
    for j in range(1, len(blocks) + 1):
        for m in range(1, machines + 1):
            table[j, m] = stage_s(0, j, m)
            for i in range(1, j):
                for last in range(1, m):
                    boundary_s = 2 * blocks[i - 1].output_bytes / bandwidth
                    table[j, m] = min(table[j, m], max(table[i, m - last], boundary_s, stage_s(i, j, last)))
    return table[len(blocks), machines]


@settings(max_examples=40, deadline=None)
@given(st.lists(cells(), min_size=1, max_size=9), st.integers(7, 24), st.sampled_from([0.25, 1.0, 4.0, 64.0]))
def test_what_the_search_leaves_out_changes_nothing(blocks: list[Cell], machines: int, bandwidth: float) -> None:
    """On more machines than all partitions could be tried on: bounds and chunks against the bare recurrence."""
    plan = plan_of(blocks, cluster((machines, bandwidth)))
    assert isinstance(plan, Plan)
    assert plan.time_per_microbatch_s == pytest.approx(recurrence(blocks, machines, bandwidth), rel=1e-12)


def test_the_larger_of_compute_and_synchronisation_counts_not_their_sum() -> None:
    # Two machines, one block: T = 3 s, W = 4 (2 - 1)/2 * 3 bytes at 1 byte/s = 6 s, so max(3, 6) / 2.
    plan = plan_of([Cell(weight_bytes=3)], cluster((2, 1.0)))
    assert isinstance(plan, Plan)
    assert plan.time_per_microbatch_s == 3.0


def test_an_all_reduce_moves_half_of_what_a_parameter_server_does() -> None:
    plan = plan_of([Cell(weight_bytes=3)], cluster((2, 1.0)), Options(synchronisation="all-reduce"))
    assert isinstance(plan, Plan)
    assert plan.time_per_microbatch_s == 1.5


def test_a_heavy_tail_of_weights_stands_alone_behind_replicas() -> None:
    """The picture of VGG-16: convolutions replicated, the fully connected end on a machine of its own (2-1)."""
    convolutions, dense = Cell(forward_s=2.0, backward_s=4.0), Cell(weight_bytes=100)
    plan = plan_of([convolutions, dense], cluster((3, 1.0)))
    assert isinstance(plan, Plan)
    assert [(s.start, s.stop, s.replicas) for s in plan.stages] == [(0, 1, 2), (1, 2, 1)]
    assert plan.optimal_in_flight == 2  # NOAM = ceil(3 / 2)
    assert plan.batch_size == 2  # both replicas have updated after 2 minibatches
    assert [(w.stage, w.replica) for w in plan.placement] == [(0, 0), (0, 1), (1, 0)]


def test_stages_stay_inside_servers_where_the_network_between_them_is_slow() -> None:
    blocks = [Cell(weight_bytes=4, output_bytes=1)] * 4
    plan = plan_of(blocks, cluster((2, 100.0), (2, 0.5)))
    assert isinstance(plan, Plan)
    assert plan.replicas == (2, 2)


def test_the_same_problem_gives_the_same_plan_to_the_byte() -> None:
    blocks = [Cell(forward_s=float(i % 3), weight_bytes=i, output_bytes=i % 2) for i in range(8)]
    first, second = plan_of(blocks, cluster((4, 1.0))), plan_of(blocks, cluster((4, 1.0)))
    assert content_id(first) == content_id(second)


def test_the_streams_reach_the_rate_of_the_closed_form_when_nothing_is_sent() -> None:
    plan = plan_of([Cell()] * 4, cluster((4, 1.0)), Options())
    straight = next(a for a in plan.alternatives if a.depth == 4) if isinstance(plan, Plan) else None
    assert isinstance(plan, Plan)
    assert plan.simulated is not None
    assert plan.simulated.throughput_samples_per_s == pytest.approx(plan.throughput_samples_per_s, rel=0.05)
    assert straight is not None
    assert straight.throughput_samples_per_s == pytest.approx(1 / 3.0)


def test_several_measured_sizes_ask_for_the_minibatch() -> None:
    measured = profile([Cell()], sizes=(1, 2))
    with pytest.raises(InvalidInputError, match="--microbatch-size"):
        solve("pipedream", Problem(profile=measured, cluster=cluster((1, 1.0)), batch_size=4))
    taken = solve("pipedream", Problem(profile=measured, cluster=cluster((1, 1.0)), batch_size=2))
    assert isinstance(taken, Plan)
    assert taken.microbatch_size == 2


def test_a_batch_that_is_no_multiple_of_the_minibatch_is_refused() -> None:
    problem = Problem(profile=profile([Cell()], sizes=(2,)), cluster=cluster((1, 1.0)), batch_size=3, options=Options())
    with pytest.raises(InvalidInputError, match=r"batch_size: must be a multiple of the minibatch \(2\), got 3"):
        solve("pipedream", problem)


@pytest.mark.parametrize(
    "options", [Options(stages=2), Options(recompute=True), Options(recompute_factor=2.0), Options(schedule="1f1b")]
)
def test_options_without_a_use_are_refused(options: Options) -> None:
    with pytest.raises(InvalidInputError, match="planner pipedream"):
        plan_of([Cell()] * 2, cluster((2, 1.0)), options)


def test_nothing_fits_names_the_stage_and_the_missing_bytes() -> None:
    # One device, one minibatch: 1 version + 1 gradient of 10 bytes, 5 bytes of activations: 25 bytes.
    answer = plan_of([Cell(weight_bytes=10, activation_bytes=5)], cluster((1, 1.0), memory_bytes=20))
    assert isinstance(answer, Infeasible)
    assert (answer.reasons[0].stage, answer.reasons[0].missing_bytes) == (0, 5)


def test_more_machines_than_the_recurrence_can_search_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"cluster\.levels: must make at most 8192 devices .* got 100000"):
        plan_of([Cell()], cluster((100_000, 1.0)))


def test_blocks_that_take_no_time_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="must take some time"):
        plan_of([Cell(forward_s=0.0, backward_s=0.0)], cluster((1, 1.0)))
