"""Pareto: what no other beats in both throughput and memory."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def pareto_front(
    items: Iterable[T], *, throughput_samples_per_s: Callable[[T], float], memory_bytes: Callable[[T], int]
) -> list[T]:
    """The items that no other beats: as fast or faster with less memory, or faster with as little. The fastest first.

    Of items that are equal in both the first stands for all. O(n log n).
    """
    front: list[T] = []
    for item in sorted(items, key=lambda each: (-throughput_samples_per_s(each), memory_bytes(each))):
        if not front or memory_bytes(item) < memory_bytes(front[-1]):
            front.append(item)
    return front
