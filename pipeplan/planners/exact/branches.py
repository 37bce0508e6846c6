"""Branches: a shape and a limit of time -> what the solver is asked."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray
from pipeplan.errors import LEAST_AMOUNT
from pipeplan.planners.exact.decision import Branch, SolverWork, StageQuestion
from pipeplan.planners.exact.kinds import StageKind, StageShape, Tabulated
from pipeplan.planners.exact.places import Placed, Places, Team

Levels = tuple[int | None, int | None, int | None]
"""Those of a stage's own links, and of the boundaries before and behind it."""

_UNITS = 1e6
"""Of work in a step of one worker."""

_ROUNDING = 1e-12

_EACH_TABLE = 10
"""How many times longer an entry takes to compute than to look at."""


def _free(_: int) -> None:
    """Nobody counts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BranchesAsked:
    """A question, and the places of the stages where they are given."""

    asked: StageQuestion
    placed: Placed | None = None


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The questions about one shape. What does not depend on the limit is computed once.

    `charge` is told of every table entry that is computed or looked at.
    """

    shape: StageShape
    tabulated: Tabulated
    places: Places
    straight: bool = False
    fewer: bool = False
    charge: Callable[[int], None] = _free
    _tables: dict[StageKind, FloatArray] = field(default_factory=dict)

    def table(self, kind: StageKind) -> FloatArray:
        """The seconds of every interval on a kind of stage."""
        if kind not in self._tables:
            self._tables[kind] = self.tabulated.time_s(self.shape, kind)
            self.charge(_EACH_TABLE * self._tables[kind].size * len(self.tabulated.recomputes))
        return self._tables[kind]

    @property
    def entries(self) -> int:
        """About how many entries of tables a question takes, if none is there yet."""
        devices, types, levels = sum(self.places.counts), len(self.places.counts), len(self.places.cluster.levels)
        if self.shape.width is None:
            kinds = types * (devices if self.straight else devices * devices.bit_length())
        else:
            kinds = types * self.shape.depth
        by_level = not self.places.flat and (types > 1 or self.shape.width is None)
        kinds *= levels**3 if by_level else 1
        return _EACH_TABLE * kinds * self.tabulated.blocks**2 * len(self.tabulated.recomputes)

    def forget(self) -> None:
        """Lets the tables go."""
        self._tables.clear()

    def shared(self, kind: StageKind) -> StageKind:
        """The kind without what makes no difference where replicas differ: its number, and workers in between."""
        if self.shape.width is not None:
            return kind
        held = -(-kind.workers // kind.replicas)
        return replace(kind, stage=0, workers=held * kind.replicas)

    def within(self, step_s: float) -> Iterator[BranchesAsked]:
        """One question, or one an orientation: are there stages none of which takes longer than this?"""
        if self.shape.width is not None and len(self.places.counts) == 1:
            for links in self.places.orientations(self.shape):
                placed = self.places.oriented(self.shape, links)
                yield BranchesAsked(asked=self._fixed(placed.kinds, step_s), placed=placed)
            return
        branches = self._of_stages(step_s)
        everything = self.shape.width is None and not self.fewer
        blocks = self.tabulated.blocks
        asked = StageQuestion(
            blocks=blocks,
            branches=branches,
            places=self.places,
            all_devices=everything,
            work=self._work(step_s),
        )
        yield BranchesAsked(asked=asked)

    def _work(self, step_s: float) -> SolverWork | None:
        """Compute on the first type of device; a worker of another does at most so many times as much in a step.

        None where types differ so much that it says little.
        """
        seconds = [np.diagonal(self.tabulated.compute_s(kind)) for kind in range(len(self.places.counts))]
        times = [float(np.max(seconds[0] / np.maximum(other, LEAST_AMOUNT))) for other in seconds]
        if not np.isfinite(step_s) or max(times) > _UNITS:
            return None
        units = _UNITS / step_s * (self.shape.width or 1) * (1 - _ROUNDING)
        before = np.concatenate(([0.0], np.cumsum(seconds[0]))) * units
        behind = np.concatenate((np.cumsum(seconds[0][::-1])[::-1], [0.0])) * units
        return SolverWork(
            before=tuple(before.astype(np.int64).tolist()),
            behind=tuple(behind.astype(np.int64).tolist()),
            rates=tuple(int(np.ceil(max(more, 1.0) * _UNITS)) for more in times),
        )

    def _allowed(self, kind: StageKind, step_s: float) -> BoolArray:
        table = self.table(kind)
        self.charge(table.size)
        return np.isfinite(table) & (table <= step_s)

    def _fixed(self, kinds: Sequence[StageKind], step_s: float) -> StageQuestion:
        branches = (
            (Branch(team=Team(type=kind.type, replicas=kind.replicas), allowed=self._allowed(kind, step_s)),)
            for kind in kinds
        )
        return StageQuestion(blocks=self.tabulated.blocks, branches=tuple(branches))

    def _of_stages(self, step_s: float) -> tuple[tuple[Branch, ...], ...]:
        """Every stage's branches; where replicas differ, all stages but the first and the last have the same."""
        last = self.shape.depth - 1
        made: dict[int, tuple[Branch, ...]] = {}
        for stage in range(self.shape.depth):
            like = stage if self.shape.width is not None or stage in (0, last) else 1
            if like not in made:
                made[like] = tuple(self._branches(like, step_s))
            made[stage] = made[like]
        return tuple(made[stage] for stage in range(self.shape.depth))

    def _branches(self, stage: int, step_s: float) -> Iterator[Branch]:
        for team in self._teams():
            for levels in self._levels(stage, team):
                yield from self._of_team(stage, team, levels, step_s)

    def _teams(self) -> Iterator[Team]:
        for kind, count in enumerate(self.places.counts):
            for replicas in self._replicas(count):
                yield Team(type=kind, replicas=replicas)

    def _replicas(self, count: int) -> Iterable[int]:
        if self.shape.width is not None:
            return (self.shape.width,) if self.shape.width <= count else ()
        return (1,) if self.straight else range(1, count + 1)

    def _levels(self, stage: int, team: Team) -> Iterator[Levels]:
        """All that may be: where it does not matter on which devices a stage lies, there is one."""
        if self.places.flat:
            yield None, None, None
            return
        levels = range(len(self.places.cluster.levels))
        last = self.shape.depth - 1
        for own in levels if team.replicas > 1 else (0,):
            for before in range(own, len(levels)) if stage > 0 else (None,):
                for after in range(own, len(levels)) if stage < last else (None,):
                    yield own, before, after

    def _of_team(self, stage: int, team: Team, levels: Levels, step_s: float) -> Iterator[Branch]:
        """One branch, or one for every range of workers from here on that allows the same."""
        own, before, after = levels
        found: list[Branch] = []
        for low, high in self._workers(team):
            kind = self._kind(stage, team, levels, high)
            allowed = self._allowed(kind, step_s)
            if found and found[-1].workers and np.array_equal(found[-1].allowed, allowed):
                low = found.pop().workers[0]  # type: ignore[index]
            workers = (low, high) if self.shape.width is None else None
            found.append(Branch(team=team, allowed=allowed, workers=workers, own=own, before=before, after=after))
        yield from (branch for branch in found if branch.allowed.any())

    def _workers(self, team: Team) -> Iterator[tuple[int, int]]:
        """Ranges of the workers from a stage on that have as much in flight."""
        if self.shape.width is not None:
            yield 0, 0
            return
        devices = sum(self.places.counts)
        for held in range(1, -(-devices // team.replicas) + 1):
            yield (held - 1) * team.replicas + 1, held * team.replicas

    def _kind(self, stage: int, team: Team, levels: Levels, workers: int) -> StageKind:
        own, before, after = (self.places.bandwidth(level or 0) for level in levels)
        return self.shared(
            StageKind(
                stage=stage,
                type=team.type,
                replicas=team.replicas,
                workers=workers,
                own=own,
                before=before,
                after=after,
            )
        )
