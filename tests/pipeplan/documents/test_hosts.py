"""Hosts: what a device of every named server has of its host."""

import pytest

from pipeplan.documents.cluster import Cluster, Host
from pipeplan.documents.files import dump, parse
from pipeplan.documents.identity import content_id, plain
from pipeplan.documents.named_clusters import SERVERS, named_cluster
from pipeplan.errors import InvalidInputError


@pytest.mark.parametrize("name", sorted(SERVERS))
def test_every_named_server_says_what_a_device_has_of_its_host(name: str) -> None:
    cluster = named_cluster(name)
    host = cluster.host
    assert host is not None
    assert 40e9 < host.memory_bytes < 600e9
    assert 6e9 < host.bandwidth_bytes_per_s <= 180e9
    assert 5e9 < host.update_bytes_per_s < 150e9
    assert named_cluster(f"{name}:3").host == host
    assert parse(Cluster, dump(plain(cluster))) == cluster


def test_adam_takes_as_long_as_was_measured_on_a_dgx_2() -> None:
    """Ren et al. 2021, table 4: 10 billion parameters in 2.57 s, 1 billion in 0.22 s, with both sockets."""
    host = named_cluster("dgx-2").host
    assert host is not None
    whole_bytes_per_s = 16 * host.update_bytes_per_s
    assert 30 * 10e9 / whole_bytes_per_s == pytest.approx(2.57, rel=0.05)
    assert 30 * 1e9 / whole_bytes_per_s == pytest.approx(0.22, rel=0.25)


def test_two_a100s_share_a_link_to_the_host() -> None:
    shared, alone = named_cluster("dgx-a100").host, named_cluster("g5.48xlarge").host
    assert shared is not None and alone is not None
    assert 2 * shared.bandwidth_bytes_per_s == alone.bandwidth_bytes_per_s == 0.8 * 32e9


def test_a_cluster_that_says_nothing_of_its_host_keeps_its_id() -> None:
    named = named_cluster("dgx-a100:2")
    silent = Cluster(device=named.device, levels=named.levels)
    assert "host" not in plain(silent)
    assert content_id(silent) != content_id(named)


@pytest.mark.parametrize("field", ["memory_bytes", "bandwidth_bytes_per_s", "update_bytes_per_s"])
def test_a_host_of_nothing_is_refused_by_its_field(field: str) -> None:
    given = {"memory_bytes": 1, "bandwidth_bytes_per_s": 1.0, "update_bytes_per_s": 1.0}
    with pytest.raises(InvalidInputError) as raised:
        Host(**(given | {field: 0}))  # type: ignore[arg-type]
    assert raised.value.field == field
