"""A parameter server on the replicas' own devices: what each port carries, how it is priced, and that bounds hold."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.calibration.observed import costs_of
from pipeplan.costs.collectives import all_reduce_among, parameter_server_among
from pipeplan.costs.transfer import SharedPort
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Device
from pipeplan.planners.batches import one_pipeline
from pipeplan.planners.bound import most_samples_per_s
from pipeplan.planners.complete import play
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.planners.verify import verify
from pipeplan.programs.timeline import batch_ends_s, steady_batch_s
from tests.pipeplan.builders import Cell, cells, cluster, clusters, profile
from tests.properties import examples

ALTERNATING = 1.005
"""Without a flush batches may take more and less time in turn, and a window may hold one short one more."""

MANY = 400
"""So many batches that one more or less of the alternating ones makes no difference."""


def long_samples_per_s(plan: Plan) -> float:
    """The steady rate of a long play."""
    batch_s = steady_batch_s(batch_ends_s(one_pipeline(plan, batches=MANY)), plan.optimal_in_flight)
    return plan.microbatch_size * plan.microbatches * lcm(*plan.replicas) / batch_s


DEVICE = Device(name="unknown", memory_bytes=1)


def servers(*, own: float | None = None) -> Cluster:
    """Four servers of four devices: 100 bytes/s inside, 10 bytes/s for a server, `own` for one of its devices."""
    inside = Level(size=4, bandwidth_bytes_per_s=100.0, latency_s=1.0)
    between = Level(size=4, bandwidth_bytes_per_s=10.0, latency_s=3.0, device_bandwidth_bytes_per_s=own)
    return Cluster(device=DEVICE, levels=(inside, between))


def test_on_one_level_a_device_sends_gradients_as_a_worker_and_weights_as_a_server() -> None:
    """Of 1000 bytes 3/4 each, at 100 bytes/s, and two hops of 1 s."""
    exchange = parameter_server_among(servers(), range(4))
    assert exchange.seconds(1000.0) == pytest.approx(7.5 + 7.5 + 2.0)
    assert exchange.latency_s(1000.0) == 2.0
    assert exchange.port == SharedPort(1, 1.0)


def test_on_two_levels_a_servers_port_carries_what_each_of_its_devices_sends() -> None:
    """Four devices send 12/16 of 1000 bytes to other servers, twice: 6000 bytes at 10 bytes/s, and two hops of 3 s."""
    exchange = parameter_server_among(servers(), range(16))
    assert exchange.seconds(1000.0) == pytest.approx(600.0 + 6.0)
    assert exchange.port_s(1000.0) == pytest.approx(4 * all_reduce_among(servers(), range(16)).port_s(1000.0))
    assert exchange.port == SharedPort(4, 1.0)


def test_one_device_a_server_sends_as_in_a_ring() -> None:
    assert parameter_server_among(servers(), (0, 4, 8, 12)).port_s(1000.0) == pytest.approx(150.0)


def test_devices_use_their_own_links_side_by_side() -> None:
    """A device alone has 2.5 of its server's 10 bytes/s; two of them have 5, four have all of it."""
    own = servers(own=2.5)
    assert parameter_server_among(own, (0, 4, 8, 12)).port_s(1000.0) == pytest.approx(1500.0 / 2.5)
    two_each = parameter_server_among(own, (0, 1, 4, 5, 8, 9, 12, 13))
    assert two_each.port_s(1000.0) == pytest.approx(2 * 1500.0 / 5)
    assert two_each.port == SharedPort(4, 0.25)
    assert parameter_server_among(own, range(16)).port_s(1000.0) == pytest.approx(600.0)


def test_a_single_device_exchanges_nothing() -> None:
    exchange = parameter_server_among(servers(), (3,))
    assert exchange.seconds(1000.0) == 0.0
    assert exchange.port == SharedPort()


def busiest_s(machines: Cluster, devices: Sequence[int], size_bytes: float) -> float:
    """How long the busiest port takes, message by message: gradients to every other server, and weights back."""
    carried_s: defaultdict[tuple[int, int, bool], float] = defaultdict(float)
    for sender in devices:
        for receiver in devices:
            unit = 1
            for level, link in enumerate(machines.levels):
                if sender // unit == receiver // unit:
                    break
                message_s = 2 * size_bytes / len(devices) / link.bandwidth_bytes_per_s
                carried_s[level, sender // unit, True] += message_s
                carried_s[level, receiver // unit, False] += message_s
                unit *= link.size
    return max(carried_s.values(), default=0.0)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1.0, 2.0, 7.0])), min_size=1, max_size=3),
    data=st.data(),
)
def test_the_slowest_port_carries_every_message_that_leaves_its_unit(
    sizes: list[tuple[int, float]], data: st.DataObject
) -> None:
    machines = cluster(*sizes)
    devices = sorted(data.draw(st.sets(st.integers(0, machines.devices - 1), min_size=1, max_size=12)))
    assert parameter_server_among(machines, devices).port_s(120.0) == pytest.approx(busiest_s(machines, devices, 120.0))


@given(
    devices=st.integers(1, 40),
    bandwidth=st.sampled_from([0.5, 3.0, 1e9]),
    size_bytes=st.floats(0, 1e12),
)
def test_on_one_level_it_is_no_faster_than_the_all_reduce(devices: int, bandwidth: float, size_bytes: float) -> None:
    """Where ports are full-duplex both send 2 (m - 1) / m of the bytes, and a level without latency takes a ring."""
    flat = cluster((devices, bandwidth))
    servers_s = parameter_server_among(flat, range(devices)).seconds(size_bytes)
    assert servers_s >= all_reduce_among(flat, range(devices)).seconds(size_bytes) * (1 - 1e-12)


def one_stage(machines: Cluster, synchronisation: str | None, **options: object) -> Plan:
    """A block of 3 s and 10 bytes, which takes all devices."""
    answer = solve(
        "pipedream",
        PlanningProblem(
            profile=profile([Cell(forward_s=1.0, backward_s=2.0, weight_bytes=10)]),
            cluster=machines,
            batch_size=1,
            options=Options(synchronisation=synchronisation, **options),  # type: ignore[arg-type]
        ),
    )
    assert isinstance(answer, Plan)
    return answer


def test_a_plan_is_played_with_the_exchange_that_is_asked_for() -> None:
    """Two servers of two devices. A port carries 2 x 2 x 10/2 bytes at 1 byte/s, of an all-reduce 10."""
    machines = cluster((2, 10.0), (2, 1.0), latency_s=0.5)
    through_servers, ring = one_stage(machines, "parameter-server"), one_stage(machines, None)
    assert through_servers.replicas == (4,)
    costs = through_servers.costs[0]
    assert (costs.reduce_s, costs.reduce_inside_s, costs.reduce_port_devices) == (20.0 + 1.0, 1.0, 2)
    assert through_servers.throughput_samples_per_s == pytest.approx(4 / (3.0 + 20.0 + 1.0))
    assert ring.throughput_samples_per_s == pytest.approx(4 / (3.0 + 1.0 + 10.0 + 2.0))
    assert [sentence for sentence in through_servers.warnings if "parameter server" in sentence]
    assert ring.warnings == ()


def test_on_one_level_it_differs_from_the_all_reduce_by_its_hops() -> None:
    """Of four devices a tree has 2 x 2 hops and 20 bytes, a ring 2 x 3 and 15; servers have 2 hops and 15 bytes."""
    machines = cluster((4, 1.0), latency_s=0.5)
    assert one_stage(machines, "parameter-server").costs[0].reduce_s == 15.0 + 1.0
    assert one_stage(machines, "all-reduce").costs[0].reduce_s == 15.0 + 3.0


def test_what_runs_is_still_an_all_reduce() -> None:
    """Calibration compares a run with the exchange that it made."""
    machines = cluster((2, 10.0), (2, 1.0))
    plan, model = one_stage(machines, "parameter-server"), profile([Cell(weight_bytes=10)])
    assert costs_of(plan, model, machines)[0].reduce_s == 10.0 / 10.0 + 10.0


@examples(80)
@given(
    planner=st.sampled_from(["pipedream", "exact"]),
    blocks=st.lists(cells(), min_size=1, max_size=6),
    machines=clusters(8),
    latency_s=st.sampled_from([0.0, 0.5]),
    own=st.sampled_from([None, 0.5]),
)
def test_no_play_is_faster_than_its_bounds(
    planner: str, blocks: Sequence[Cell], machines: Cluster, latency_s: float, own: float | None
) -> None:
    levels = [replace(level, latency_s=latency_s) for level in machines.levels]
    levels[1:] = [replace(level, device_bandwidth_bytes_per_s=own) for level in levels[1:]]
    machines = replace(machines, levels=tuple(levels))
    options = Options(synchronisation="parameter-server", schedule="pipedream")
    plan = solve(planner, PlanningProblem(profile=profile(blocks), cluster=machines, batch_size=1, options=options))
    if not isinstance(plan, Plan):
        return
    assert plan.throughput_samples_per_s is not None
    most = most_samples_per_s(plan) * ALTERNATING
    assert plan.throughput_samples_per_s <= most or long_samples_per_s(plan) <= most
    assert plan.certificate is not None
    assert plan.throughput_samples_per_s <= 1 / plan.certificate.bound * (1 + 1e-6)


@examples(60)
@given(blocks=st.lists(cells(), min_size=1, max_size=6), machines=clusters(8))
def test_on_one_level_without_latency_no_play_is_faster_than_that_of_an_all_reduce(
    blocks: Sequence[Cell], machines: Cluster
) -> None:
    machines, model = replace(machines, levels=machines.levels[:1]), profile(blocks)
    options = Options(synchronisation="parameter-server")
    plan = solve("pipedream", PlanningProblem(profile=model, cluster=machines, batch_size=1, options=options))
    if isinstance(plan, Plan):
        ring = play(replace(plan, costs=costs_of(plan, model, machines)))
        assert ring is not None
        assert plan.throughput_samples_per_s is not None
        assert plan.throughput_samples_per_s <= ring.throughput_samples_per_s * (1 + 1e-9)


def test_a_plan_of_auto_for_one_exchange_is_not_held_against_schedules_that_do_not_know_it() -> None:
    """Planners of other schedules refuse the option: their plays prove nothing about the answer."""
    problem = PlanningProblem(
        profile=profile([Cell(weight_bytes=1, output_bytes=1)] * 4),
        cluster=cluster((2, 10.0), (2, 1.0)),
        batch_size=4,
        options=Options(synchronisation="parameter-server"),
    )
    plan = solve("auto", problem)
    assert isinstance(plan, Plan)
    assert plan.schedule == "pipedream"
    *others, optimality = verify(plan, problem)
    assert all(finding.holds for finding in others)
    assert "there is no space to search again" in optimality.detail
