"""A clock that no machine's load can disturb."""

from collections.abc import Sequence


class SquaresClock:
    """Its n-th mark is at n * n seconds: the k-th timed piece, from mark 2k to 2k + 1, takes 4k + 1 seconds."""

    def __init__(self) -> None:
        self._marks = 0

    def mark(self) -> None:
        self._marks += 1

    def seconds(self) -> Sequence[float]:
        return [float(n * n) for n in range(self._marks)]
