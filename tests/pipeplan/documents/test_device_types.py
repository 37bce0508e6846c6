"""Names of devices: the spellings of one type, the types that they tell apart, and names that say too little."""

import itertools

import pytest

from pipeplan.documents.cluster import differ, is_same, is_unknown, known_types, words
from pipeplan.documents.devices import KNOWN_TYPES

SPELLINGS = {
    "v100-16gb": ("Tesla V100-SXM2-16GB", "NVIDIA Tesla V100-SXM2-16GB", "v100-16gb", "V100 16 GB"),
    "v100-32gb": ("Tesla V100-SXM2-32GB", "V100_32G"),
    "a100-40gb": ("A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB", "A100-SXM-40GB", "a100 40gib"),
    "a100-80gb": ("NVIDIA A100-SXM4-80GB", "a100-80gb", "  nvidia a100  sxm4 80 GB ", "A100 80GB (SXM4)"),
    "h100-sxm": ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB", "h100 sxm", "nvidia:H100_SXM5"),
    "h100-pcie": ("NVIDIA H100 PCIe", "H100-PCIE-80GB"),
    "h200-sxm": ("NVIDIA H200", "H200 SXM"),
    "a800": ("NVIDIA A800-SXM4-80GB", "A800", "a800 sxm"),
    "h800": ("NVIDIA H800", "H800 SXM"),
    "h20": ("NVIDIA H20", "h20-96gb", "NVIDIA H20-141GB"),
    "b200": ("NVIDIA B200", "B200-SXM6-180GB", "b200 192GB"),
    "b300": ("NVIDIA B300 SXM6 AC", "B300", "b300-288gb"),
    "gb200": ("NVIDIA GB200", "GB200 NVL72", "gb200-186gb"),
    "gb300": ("NVIDIA GB300", "gb300 nvl72", "GB300 279GB"),
    "mi300x": ("AMD Instinct MI300X OAM", "AMD Instinct MI300X", "mi300x 192gb"),
    "mi325x": ("AMD Instinct MI325X", "MI325X"),
    "mi355x": ("AMD Instinct MI355X", "mi355x-288GB"),
    "l40s": ("NVIDIA L40S", "l40s 48gb"),
    "l4": ("NVIDIA L4", "NVIDIA L4 Tensor Core GPU", "l4-24gb"),
    "t4": ("Tesla T4", "NVIDIA T4"),
    "a10g": ("NVIDIA A10G",),
    "rtx-3090": ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090", "RTX3090"),
    "rtx-4090": ("NVIDIA GeForce RTX 4090", "rtx_4090"),
}

NOT_KNOWN = (
    *("NVIDIA A100 80GB PCIe", "NVIDIA H100 NVL", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU"),
    *(
        "NVIDIA L40",
        "NVIDIA A10",
        "NVIDIA GH200 480GB",
        "AMD Instinct MI250X",
        "NVIDIA B200 MIG 1g.23gb",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA T400 4GB",
        "Tesla V100-PCIE-16GB",
    ),
    *("gpu", "cpu", "core", "80GB", "RTX", "Intel(R) Xeon(R) Processor, 1 core", "NVIDIA", "unknown", ""),
)


def test_every_known_type_has_its_spellings_here() -> None:
    assert SPELLINGS.keys() == KNOWN_TYPES.keys()


@pytest.mark.parametrize(("key", "name"), [(key, name) for key, names in SPELLINGS.items() for name in names])
def test_a_spelling_stands_for_its_type_alone(key: str, name: str) -> None:
    assert known_types(name) == {key}
    assert is_same(name, KNOWN_TYPES[key].device.name)
    assert is_same(key, name)
    assert not differ(name, KNOWN_TYPES[key].device.name)


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(SPELLINGS, 2)])
def test_two_known_types_differ_however_they_are_spelled(one: str, other: str) -> None:
    for name, other_name in itertools.product(SPELLINGS[one], SPELLINGS[other]):
        assert differ(name, other_name)
        assert not is_same(name, other_name)


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_other_names_stand_for_no_known_type(name: str) -> None:
    assert known_types(name) == frozenset()


@pytest.mark.parametrize(
    ("short", "types"),
    [
        ("A100", {"a100-40gb", "a100-80gb"}),
        ("NVIDIA V100", {"v100-16gb", "v100-32gb"}),
        ("H100 80GB", {"h100-sxm", "h100-pcie"}),
    ],
)
def test_a_short_name_may_stand_for_several_types_and_is_surely_none_of_them(short: str, types: set[str]) -> None:
    assert known_types(short) == types
    for key in types:
        assert not is_same(short, KNOWN_TYPES[key].device.name)
        assert not differ(short, KNOWN_TYPES[key].device.name)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("A100", "V100", True),
        ("NVIDIA A100 80GB PCIe", "H100-SXM5-80GB", True),
        ("RTX 3090 Ti", "RTX 4090", True),
        ("A100-40GB", "A100-80GB", True),
        ("NVIDIA A100 80GB PCIe", "A100-SXM4-80GB", False),
        ("A100", "A100", False),
        ("gpu", "V100", False),
        ("gpu", "cpu", False),
        ("unknown", "V100", False),
    ],
)
def test_names_differ_only_where_both_say_enough(one: str, other: str, expected: bool) -> None:
    assert differ(one, other) is differ(other, one) is expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("My-GPU 1", "my gpu 1", True),
        ("NVIDIA RTX A6000", "rtx-a6000", True),
        ("gpu", "GPU", True),
        ("gpu", "cpu", False),
        ("NVIDIA", "Tesla", False),
        ("gpu 1", "1 gpu 2", False),
    ],
)
def test_free_names_are_compared_by_their_words(one: str, other: str, expected: bool) -> None:
    assert is_same(one, other) is is_same(other, one) is expected


@pytest.mark.parametrize("name", ["unknown", "Unknown", " UNKNOWN ", "", "  "])
def test_an_unknown_device_has_no_name(name: str) -> None:
    assert is_unknown(name)


def test_a_name_of_brands_alone_is_still_a_name() -> None:
    assert words("NVIDIA GPU") == ("nvidia", "gpu")
    assert not is_unknown("NVIDIA GPU")
