"""All-reduce level by level: what each level carries, in which time, and over which ports."""

import numpy as np
import pytest

from pipeplan.costs.collectives import all_reduce_among, all_reduces_among
from pipeplan.costs.transfer import SharedPort
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.profile import Device
from pipeplan.errors import InvalidInputError

DEVICE = Device(name="unknown", memory_bytes=1)


def servers(*, own: float | None = None, latency_s: float = 0.0) -> Cluster:
    """Four servers of four devices: 100 bytes/s inside, 10 bytes/s for a server, `own` for one of its devices."""
    inside = Level(size=4, bandwidth_bytes_per_s=100.0, latency_s=latency_s)
    between = Level(size=4, bandwidth_bytes_per_s=10.0, latency_s=10 * latency_s, device_bandwidth_bytes_per_s=own)
    return Cluster(device=DEVICE, levels=(inside, between))


def test_devices_of_one_server_have_one_ring() -> None:
    """2 (n - 1) / n of the bytes: 1.5 x 1000 / 100 s."""
    exchange = all_reduce_among(servers(), range(4))
    assert exchange.seconds(1000.0) == pytest.approx(15.0)
    assert exchange.slowest is not None
    assert exchange.slowest.port == SharedPort(1, 1.0)


def test_a_server_sends_the_bytes_once_however_many_of_its_devices_take_part() -> None:
    """Inside 1.5 x 1000 / 100, between the servers 1.5 x 1000 / 10: less than a flat ring's 1.875 x 1000 / 10."""
    exchange = all_reduce_among(servers(), range(16))
    assert exchange.seconds(1000.0) == pytest.approx(15.0 + 150.0)
    assert exchange.port_s(1000.0) == pytest.approx(150.0)
    assert exchange.slowest is not None
    assert exchange.slowest.port == SharedPort(4, 1.0)


def test_one_device_a_server_has_only_the_ring_between_them() -> None:
    assert all_reduce_among(servers(), (0, 4, 8, 12)).seconds(1000.0) == pytest.approx(150.0)
    assert all_reduce_among(servers(), (0, 4)).seconds(1000.0) == pytest.approx(100.0)


def test_devices_use_their_own_links_side_by_side() -> None:
    """A device alone has 2.5 of its server's 10 bytes/s; four of them have all of it."""
    own = servers(own=2.5)
    assert all_reduce_among(own, (0, 4, 8, 12)).seconds(1000.0) == pytest.approx(600.0)
    assert all_reduce_among(own, range(16)).seconds(1000.0) == pytest.approx(15.0 + 150.0)
    two_each = all_reduce_among(own, (0, 1, 4, 5, 8, 9, 12, 13))
    assert two_each.seconds(1000.0) == pytest.approx(1.0 * 1000 / 100 + 1.5 * 1000 / 5)
    assert two_each.slowest is not None
    assert two_each.slowest.port == SharedPort(4, 0.25)


def test_where_servers_hold_different_numbers_the_least_counts() -> None:
    uneven = all_reduce_among(servers(own=2.5), (0, 1, 2, 4))
    assert uneven.seconds(1000.0) == pytest.approx(2 * 2 / 3 * 1000 / 100 + 1.0 * 1000 / 2.5)


def test_latency_counts_per_hop_and_few_bytes_take_a_tree() -> None:
    """A ring of 16 devices on one level has 30 hops, a tree 8: of many bytes the ring is faster, of few the tree."""
    flat = Cluster(device=DEVICE, levels=(Level(size=16, bandwidth_bytes_per_s=100.0, latency_s=1.0),))
    exchange = all_reduce_among(flat, range(16))
    assert exchange.seconds(1e6) == pytest.approx(30.0 + 1.875 * 1e4)
    assert exchange.latency_s(1e6) == 30.0
    assert exchange.seconds(1.0) == pytest.approx(8.0 + 2.0 / 100)
    assert exchange.latency_s(1.0) == 8.0


def test_a_single_device_exchanges_nothing() -> None:
    exchange = all_reduce_among(servers(latency_s=1.0), (3,))
    assert exchange.seconds(1000.0) == 0.0
    assert exchange.slowest is None


def test_a_devices_own_link_is_no_faster_than_its_units_and_not_for_the_first_level() -> None:
    with pytest.raises(InvalidInputError, match="device_bandwidth_bytes_per_s"):
        Level(size=2, bandwidth_bytes_per_s=10.0, device_bandwidth_bytes_per_s=11.0)
    with pytest.raises(InvalidInputError, match="several devices"):
        Cluster(device=DEVICE, levels=(Level(size=2, bandwidth_bytes_per_s=10.0, device_bandwidth_bytes_per_s=5.0),))


def test_all_reduces_of_several_sets_are_those_of_each_set() -> None:
    """Sets that whole servers lie between are alike; (0, 1) and (3, 4) are not."""
    rows = np.asarray([(0, 1), (3, 4), (4, 5), (7, 8), (0, 4), (8, 12), (1, 5)])
    cluster = servers(own=2.5)
    assert all_reduces_among(cluster, rows) == [all_reduce_among(cluster, row) for row in rows.tolist()]
