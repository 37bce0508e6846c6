"""Groups of devices: what they exchange, and the cluster that they are the devices of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.costs.groups import grouped, links_among
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.profile import Device
from pipeplan.errors import InvalidInputError

DEVICE = Device(name="gpu", memory_bytes=100)
SERVERS = Cluster(
    device=DEVICE,
    levels=(
        Level(size=8, bandwidth_bytes_per_s=300.0),
        Level(size=4, bandwidth_bytes_per_s=80.0, device_bandwidth_bytes_per_s=20.0),
    ),
)
"""Four servers of eight; a device's card has 20 B/s, of which a server can use four at a time."""


def test_an_all_reduce_inside_a_server_takes_a_rings_time() -> None:
    assert links_among(SERVERS, 4, 1).seconds("all-reduce", 400) == pytest.approx(2 * 3 / 4 * 400 / 300)


def test_between_servers_every_device_has_its_share_of_the_port() -> None:
    """Eight groups of four devices, one in each server, send at once: each has an eighth of 80 B/s."""
    assert links_among(SERVERS, 4, 8).seconds("all-gather", 400) == pytest.approx(3 / 4 * 400 / 10)


def test_over_two_levels_the_devices_of_a_server_share_what_leaves_it() -> None:
    inside, outside = 7 / 8 * 800 / 300, 3 / 4 * 800 / (8 * 10)
    assert links_among(SERVERS, 32, 1).seconds("reduce-scatter", 800) == pytest.approx(inside + outside)


def test_of_an_all_to_all_a_devices_own_share_stays() -> None:
    assert links_among(SERVERS, 8, 1).seconds("all-to-all", 800) == pytest.approx(7 / 8 * 800 / 300)
    both = 7 / 16 * 800 / 300 + 8 / 16 * 800 / 10
    assert links_among(SERVERS, 16, 1).seconds("all-to-all", 800) == pytest.approx(both)


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    assert links_among(SERVERS, 16, 1).seconds("ring", 100) == pytest.approx(100 / 10)


@given(st.sampled_from([2, 4, 8, 16, 32]), st.integers(1, 10**6))
def test_a_gather_and_a_scatter_are_an_all_reduce_by_rings(count: int, size_bytes: int) -> None:
    links = links_among(SERVERS, count, 1)
    both = links.seconds("all-gather", size_bytes) + links.seconds("reduce-scatter", size_bytes)
    assert links.seconds("all-reduce", size_bytes) == pytest.approx(both)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ring"])
def test_a_single_device_exchanges_nothing(kind: str) -> None:
    assert links_among(SERVERS, 1, 1).seconds(kind, 1000) == 0.0


def test_groups_inside_a_server_leave_it_with_their_cards_together() -> None:
    groups = grouped(SERVERS, 2)
    assert [level.size for level in groups.levels] == [4, 4]
    assert groups.levels[0].bandwidth_bytes_per_s == 600.0
    assert groups.levels[1].bandwidth_bytes_per_s == 80.0
    assert groups.levels[1].device_bandwidth_bytes_per_s == 40.0


def test_a_server_as_one_device_has_its_whole_port() -> None:
    groups = grouped(SERVERS, 8)
    assert [level.size for level in groups.levels] == [4]
    assert groups.levels[0].bandwidth_bytes_per_s == 80.0
    assert groups.levels[0].device_bandwidth_bytes_per_s is None


def test_two_servers_as_one_device_have_both_ports() -> None:
    groups = grouped(SERVERS, 16)
    assert [(level.size, level.bandwidth_bytes_per_s) for level in groups.levels] == [(2, 160.0)]


def test_the_whole_cluster_can_be_one_device() -> None:
    assert grouped(SERVERS, 32).devices == 1
    assert grouped(SERVERS, 1) == SERVERS


@pytest.mark.parametrize("devices", [3, 6, 12, 24, 64])
def test_groups_that_tear_a_level_are_refused(devices: int) -> None:
    with pytest.raises(InvalidInputError) as raised:
        grouped(SERVERS, devices)
    assert raised.value.value == devices
