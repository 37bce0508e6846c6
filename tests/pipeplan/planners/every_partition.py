"""Every partition there is of a few states on a few machines, costed and weighed in plain loops."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from pipeplan.costs.memory import Copies
from pipeplan.planners.pipedream.fitting import Law
from pipeplan.planners.pipedream.space import LevelLinks
from pipeplan.planners.pipedream.states import States

STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Copies of the weights that an optimizer keeps as its state."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Blocks between two states on so many units, and how each is laid out inside."""

    start: int
    stop: int
    units: int
    inside: tuple["Piece", ...] = ()


Pieces = tuple[Piece, ...]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write total as a sum of so many positive numbers."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


@dataclass(frozen=True, kw_only=True)
class World:
    """States, levels and the factor of the exchange."""

    states: States
    levels: tuple[LevelLinks, ...]
    factor: float

    def between(self, start: int, stop: int) -> bool:
        before = self.states.before
        return start < stop if before is None else bool(before[start, stop])

    def paths(self, start: int, stop: int) -> Iterator[tuple[int, ...]]:
        if start == stop:
            yield (stop,)
        for after in range(start + 1, stop + 1):
            if self.between(start, after) and (after == stop or self.between(after, stop)):
                for rest in self.paths(after, stop):
                    yield (start, *rest)

    def every(self, *, straight: bool = False, fewer: bool = False) -> list[Pieces]:
        units = self.levels[-1].units
        return [
            pieces
            for count in (range(1, units + 1) if fewer else [units])
            for pieces in self._pieces(len(self.levels), 0, len(self.states) - 1, count, straight)
        ]

    def _pieces(self, level: int, start: int, stop: int, units: int, straight: bool) -> Iterator[Pieces]:
        for path in self.paths(start, stop):
            stages = list(pairwise(path))
            if len(stages) > units or (straight and len(stages) < units):
                continue
            inside: list[list[Pieces]] = [[()] for _ in stages]
            if level > 1:
                within = self.levels[level - 2].units
                inside = [list(self._pieces(level - 1, a, b, within, straight)) for a, b in stages]
            for counts, layouts in product(compositions(units, len(stages)), product(*inside)):
                yield tuple(
                    Piece(start=a, stop=b, units=m, inside=layout)
                    for (a, b), m, layout in zip(stages, counts, layouts, strict=True)
                )

    def cost_s(self, pieces: Pieces, level: int | None = None) -> float:
        """The slowest stage or boundary (PipeDream 2018, section 3.2; by levels SOSP 2019, section 3.1)."""
        level = len(self.levels) if level is None else level
        bandwidth, states = self.levels[level - 1].bandwidth_bytes_per_s, self.states
        slowest_s = 0.0
        for piece in pieces:
            a, b, m = piece.start, piece.stop, piece.units
            unit_s = self.cost_s(piece.inside, level - 1) if piece.inside else states.compute_s[b] - states.compute_s[a]
            weights = states.weight_bytes[b] - states.weight_bytes[a]
            slowest_s = max(slowest_s, max(unit_s, self.factor * (m - 1) / m * weights / bandwidth) / m)
        for before, _ in pairwise(pieces):
            slowest_s = max(slowest_s, 2 * states.boundary_bytes[before.stop] / bandwidth)
        return float(slowest_s)

    def sent_bytes(self, pieces: Pieces) -> float:
        states, sent = self.states, 0.0
        for piece in pieces:
            weights = states.weight_bytes[piece.stop] - states.weight_bytes[piece.start]
            sent += self.factor * (piece.units - 1) / piece.units * weights
        return float(sent + sum(2 * states.boundary_bytes[piece.stop] for piece in pieces[:-1]))

    def worst_bytes(self, pieces: Pieces, law: Law) -> float:
        """What the fullest device holds: ceil(devices from a stage on / its replicas) minibatches in flight."""
        stages, states = list(flat(pieces)), self.states
        worst = 0.0
        for index, (a, b, replicas) in enumerate(stages):
            held = -(-sum(stage[2] for stage in stages[index:]) // replicas)
            transient = 0.0 if states.transient_bytes is None else states.transient_bytes[a, b]
            amounts = (
                states.weight_bytes[b] - states.weight_bytes[a],
                states.added_bytes[b] - states.kept_before[a],
                states.input_bytes[a],
                transient,
                0.0 if states.late_bytes is None else states.late_bytes[b] - states.late_bytes[a],
            )
            factors = [fixed + held * each for fixed, each in zip(*map(factors_of, (law.fixed, law.each)), strict=True)]
            worst = max(worst, sum(factor * amount for factor, amount in zip(factors, amounts, strict=True)))
        return float(worst)


def copies_of(factors: Sequence[int]) -> Copies:
    """A law's copies, from the factors of weights, activations, input, largest transient and late gradients."""
    weights, activations, inputs, transients, late = factors
    return Copies(versions=weights, activations=activations, inputs=inputs, transients=transients, late_gradients=late)


def factors_of(copies: Copies) -> tuple[float, ...]:
    """The same factors of a law's copies."""
    return copies.weights, copies.activations, copies.inputs, copies.transients, copies.late_gradients


def flat(pieces: Pieces, copies: int = 1) -> Iterator[tuple[int, int, int]]:
    """The stages with their replicas."""
    for piece in pieces:
        if piece.inside:
            yield from flat(piece.inside, copies * piece.units)
        else:
            yield piece.start, piece.stop, copies * piece.units
