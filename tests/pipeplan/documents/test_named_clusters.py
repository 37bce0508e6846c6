"""Named clusters: what every name stands for, and how names are read."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.cluster import MAX_DEVICES, known_types
from pipeplan.documents.devices import KNOWN_TYPES
from pipeplan.documents.files import dump, parse
from pipeplan.documents.identity import plain
from pipeplan.documents.named_clusters import SERVERS, is_named, most_devices, named_cluster
from pipeplan.errors import InvalidInputError

ASKED_FOR = (
    "dgx-v100",
    "dgx-a100",
    "dgx-a100-40gb",
    "dgx-h100",
    "dgx-h200",
    "p3.16xlarge",
    "p4d.24xlarge",
    "p4de.24xlarge",
    "p5.48xlarge",
    "a3-highgpu-8g",
    "dgx-b200",
    "dgx-b300",
    "gb200-nvl72",
    "gb300-nvl72",
    "p5en.48xlarge",
    "p6-b200.48xlarge",
    "p6e-gb200.36xlarge",
    "a3-ultragpu-8g",
    "a4-highgpu-8g",
    "a4x-highgpu-4g",
    "nd-h200-v5",
    "nd-gb200-v6",
    "bm.gpu.gb200.4",
    "nd-mi300x-v5",
    "l4",
)

names = st.sampled_from(sorted(SERVERS))


def test_the_common_servers_have_names() -> None:
    assert set(ASKED_FOR) <= SERVERS.keys()


@pytest.mark.parametrize("name", sorted(SERVERS))
def test_every_name_has_a_vendors_page_with_its_year_and_a_device_with_a_datasheet(name: str) -> None:
    server = SERVERS[name]
    assert re.search(r"\((19|20)\d\d\)", server.source)
    assert server.source.startswith(("NVIDIA", "AWS", "Google", "Microsoft", "Oracle"))
    assert known_types(KNOWN_TYPES[server.type].device.name) == {server.type}
    assert server.name == name and not re.search(r"[A-Z_:/\s]", name)


@given(names, st.integers(1, 1000))
def test_a_name_with_nodes_is_so_many_servers(name: str, nodes: int) -> None:
    server, cluster = SERVERS[name], named_cluster(f"{name}:{nodes}")
    assert cluster.devices == server.devices * nodes
    assert cluster.device == KNOWN_TYPES[server.type].device
    one = named_cluster(name)
    assert one == named_cluster(f"{name}:1") and one.devices == server.devices
    together = cluster.levels[0].size // server.devices
    assert 1 <= together <= server.rack and replace(cluster.levels[0], size=server.devices) == one.levels[0]
    if nodes > together:
        inside, between = cluster.levels
        assert between.bandwidth_bytes_per_s == together * server.network_bytes_per_s
        assert between.transfer_bytes_per_s <= inside.transfer_bytes_per_s
        assert between.latency_s > inside.latency_s
        shares = server.network_bytes_per_s / between.transfer_bytes_per_s
        assert shares == min(server.cards, server.devices)  # devices that all send over cards of their own
    assert parse(type(cluster), dump(plain(cluster))) == cluster  # as a cluster file


@pytest.mark.parametrize(
    ("name", "gbit_per_s", "device_gbit_per_s"),
    [
        ("dgx-v100", 4 * 100, 100),
        ("dgx-a100", 8 * 200, 200),
        ("dgx-h100", 8 * 400, 400),
        ("p3.16xlarge", 25, 25),
        ("p4d.24xlarge", 400, 100),
        ("p5.48xlarge", 3200, 400),
        ("p5en.48xlarge", 3200, 400),
        ("a3-highgpu-8g", 4 * 200, 200),
        ("a3-megagpu-8g", 8 * 200, 200),
        ("g2-standard-96", 100, 100),
    ],
)
def test_networks_are_what_vendors_state(name: str, gbit_per_s: float, device_gbit_per_s: float) -> None:
    level = named_cluster(f"{name}:2").levels[1]
    assert level.bandwidth_bytes_per_s == gbit_per_s * 1e9 / 8
    assert level.transfer_bytes_per_s == device_gbit_per_s * 1e9 / 8


@pytest.mark.parametrize(
    ("servers", "sizes"),
    [(1, [4]), (2, [8]), (16, [64]), (18, [72]), (32, [64, 2]), (36, [72, 2]), (64, [64, 4]), (38, [8, 19])],
)
def test_servers_of_a_rack_are_one_level_of_their_devices_links(servers: int, sizes: list[int]) -> None:
    for name in ("p6e-gb200.36xlarge", "a4x-highgpu-4g", "nd-gb200-v6", "bm.gpu.gb300.4"):
        assert [level.size for level in named_cluster(f"{name}:{servers}").levels] == sizes
    assert named_cluster("gb200-nvl72").levels[0] == named_cluster("nd-gb200-v6:18").levels[0]


@given(names)
def test_neither_case_nor_separators_matter(name: str) -> None:
    assert named_cluster(name.upper().replace("-", "_")) == named_cluster(name)
    assert is_named(f" {name.title()}:3")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("dgx-h10", r"near: dgx-h100, "),
        ("p5", r"near: p5\.48xlarge, p5e\.48xlarge, p5en\.48xlarge"),
        ("h100", r"h100 is a device; servers with it, and how many: dgx-h100 \(8\), p5\.48xlarge \(8\)"),
        ("H100:8", "h100 is a device; servers with it, and how many: dgx-h100"),
        ("8xh100", "h100 is a device; servers with it, and how many: dgx-h100"),
        ("nvidia-a100", "a100 is a device; servers with it, and how many: dgx-a100"),
        ("rtx-4090", "rtx-4090 is a device; servers with it, and how many: none that is known"),
        ("dgx-h100x4", "dgx-h100:4 is meant: that many servers"),
        ("4 x DGX H100", "dgx-h100:4 is meant: that many servers"),
        ("dgx-b100", "near: dgx-"),
        ("8x", "`pipeplan clusters` lists them"),
        ("qqqq", "`pipeplan clusters` lists them"),
        ("", "`pipeplan clusters` lists them"),
        ("dgx-h100:", "must have a whole number of nodes after the colon, as dgx-h100:4"),
        ("dgx-h100:many", "must have a whole number of nodes"),
        ("dgx-h100:-1", "must have a whole number of nodes"),
        ("dgx-h100:1.5", "must have a whole number of nodes"),
        ("dgx-h100:²", "must have a whole number of nodes"),
        ("dgx-h100:" + "9" * 5000, "must have a whole number of nodes"),
        ("dgx-h100:0", f"must have from 1 to {MAX_DEVICES // 8} nodes"),
        (f"dgx-h100:{MAX_DEVICES // 8 + 1}", "must have from 1 to"),
    ],
)
def test_what_is_no_cluster_is_one_error(text: str, rule: str) -> None:
    with pytest.raises(InvalidInputError, match=rule) as caught:
        named_cluster(text)
    assert (caught.value.field, caught.value.value) == ("cluster", text)


def test_the_largest_cluster_is_built() -> None:
    assert named_cluster(f"dgx-h100:{MAX_DEVICES // 8}").devices == MAX_DEVICES


@given(names)
def test_a_server_of_a_type_is_the_largest_that_has_a_name(name: str) -> None:
    server = SERVERS[name]
    assert server.devices <= most_devices(KNOWN_TYPES[server.type].device.name)
    assert most_devices("RTX 4090") == most_devices("a device of one's own") == 8
