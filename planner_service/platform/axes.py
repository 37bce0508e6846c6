"""Axes: the common parts of all charts: their frame, round numbers at even distances, parts of stacked bars."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, log10

from pipeplan.formats import seconds, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark on an axis: its position and its label."""

    position: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedPart:
    """A part of a stacked bar."""

    kind: str
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Frame:
    """A chart's area in a picture. `x` and `y` place a value of 0 to `most`, `rows` its axis."""

    left: float
    right: float
    top: float
    bottom: float

    def x(self, value: float, most: float = 1.0) -> float:
        return self.left + (self.right - self.left) * value / most

    def y(self, value: float, most: float = 1.0) -> float:
        return self.bottom - (self.bottom - self.top) * value / most

    def rows(self, low: float, high: float, label: Callable[[float], str]) -> "tuple[Tick, ...]":
        return ticks(low, high, start=self.bottom, end=self.top, most=5, label=label)


FILE = Frame(92.0, 1140.0, 14.0, 206.0)
"""A file of a chart, 1160 x 240, with axes."""


def round_values(low: float, high: float, most: int) -> list[float]:
    """At most `most` multiples of 1, 2 or 5 times a power of ten within [low, high]."""
    rough = (high - low) / most if most >= 1 else 0.0
    if rough < sys.float_info.min:  # nothing to divide, or so little that its power of ten is no normal number
        return [low]
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = ceil(low / step - 1e-9)
    last = floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def ticks(
    low: float, high: float, *, start: float, end: float, most: int, label: Callable[[float], str]
) -> tuple[Tick, ...]:
    """The axis from `start` to `end` that shows [low, high]."""
    scale = (end - start) / (high - low) if high > low else 0.0
    return tuple(
        Tick(position=start + (value - low) * scale, label=label(value)) for value in round_values(low, high, most)
    )


def time_ticks(span_s: float, *, start: float, end: float) -> tuple[Tick, ...]:
    """The time axis of a picture of `span_s` seconds."""
    return ticks(0.0, span_s, start=start, end=end, most=8, label=seconds)


def memory_ticks(most_bytes: float, *, start: float, end: float, most: int) -> tuple[Tick, ...]:
    """The axis of a picture of `most_bytes`: round numbers of the largest binary unit that they reach."""
    unit_bytes = max((2.0**power for power in (0, 10, 20, 30, 40) if 2.0**power <= most_bytes), default=1.0)
    return ticks(
        0.0, most_bytes / unit_bytes, start=start, end=end, most=most, label=lambda value: size(value * unit_bytes)
    )
