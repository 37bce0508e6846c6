"""Branches: turn a shape and a limit of time into questions for the solver.

A branch is one kind of place for a stage: with a team (a type of device and a number of replicas), on links of certain
levels, and with a range of workers from this stage on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray
from pipeplan.errors import LEAST_AMOUNT
from pipeplan.planners.exact.decision import Branch, SolverWork, StageQuestion
from pipeplan.planners.exact.kinds import StageKind, StageShape, Tabulated
from pipeplan.planners.exact.places import Placed, Places, Team

Levels = tuple[int | None, int | None, int | None]
"""Those of a stage's own links, and of the boundaries before and after it."""

_UNITS = 1e6
"""The units of work of a worker in a step."""

_ROUNDING = 1e-12

_EACH_TABLE = 10
"""The ratio of the time for computing an entry to that for reading it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BranchesAsked:
    """A question, and the places of the stages if they are given."""

    asked: StageQuestion
    placed: Placed | None = None


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The questions about one shape. What does not depend on the limit is computed once.

    `charge` gets the number of table entries whenever some are computed or read.
    """

    shape: StageShape
    tabulated: Tabulated
    places: Places
    straight: bool = False
    fewer: bool = False
    charge: Callable[[int], None]
    _tables: dict[StageKind, FloatArray] = field(default_factory=dict)

    def table(self, kind: StageKind) -> FloatArray:
        """The seconds of every interval on a kind of stage."""
        if kind not in self._tables:
            self._tables[kind] = self.tabulated.time_s(self.shape, kind)
            self.charge(_EACH_TABLE * self._tables[kind].size * len(self.tabulated.recomputes))
        return self._tables[kind]

    @property
    def entries(self) -> int:
        """The approximate number of table entries of a question, if none exists yet."""
        devices, types, levels = sum(self.places.counts), len(self.places.counts), len(self.places.cluster.levels)
        if self.shape.width is None:
            kinds = types * (devices if self.straight else devices * devices.bit_length())
        else:
            kinds = types * self.shape.depth
        by_level = not self.places.flat and (types > 1 or self.shape.width is None)
        kinds *= levels**3 if by_level else 1
        return _EACH_TABLE * kinds * self.tabulated.blocks**2 * len(self.tabulated.recomputes)

    def forget(self) -> None:
        """Releases the tables."""
        self._tables.clear()

    def shared(self, kind: StageKind) -> StageKind:
        """The kind that stands for all that have the same tables.

        Where replicas differ, tables depend on the microbatches in flight, not on the stage's number.
        """
        if self.shape.width is not None:
            return kind
        held = -(-kind.workers // kind.replicas)
        return replace(kind, stage=0, workers=held * kind.replicas)

    def within(self, step_s: float) -> Iterator[BranchesAsked]:
        """One question, or one for each orientation: are there stages that all take at most `step_s`?"""
        if self.shape.width is not None and len(self.places.counts) == 1:
            # 1. All places are given: every stage has one branch, and each orientation is a question.
            for links in self.places.orientations(self.shape):
                placed = self.places.oriented(self.shape, links)
                fixed = tuple(
                    (Branch(team=Team(type=kind.type, replicas=kind.replicas), allowed=self._allowed(kind, step_s)),)
                    for kind in placed.kinds
                )
                yield BranchesAsked(asked=StageQuestion(blocks=self.tabulated.blocks, branches=fixed), placed=placed)
            return

        width, last = self.shape.width, self.shape.depth - 1
        teams = []
        for kind, count in enumerate(self.places.counts):
            widths = (width,) if width is not None else (1,) if self.straight else range(1, count + 1)
            teams += [Team(type=kind, replicas=replicas) for replicas in widths if replicas <= count]

        # 2. A stage has a branch for every team and every combination of levels. Where replicas differ, all stages but
        #    the first and the last have the same branches.
        made: dict[int, tuple[Branch, ...]] = {}
        for stage in range(self.shape.depth):
            like = stage if width is not None or stage in (0, last) else 1
            if like not in made:
                made[like] = tuple(
                    branch
                    for team in teams
                    for levels in self._levels(like, team)
                    for branch in self._of_team(like, team, levels, step_s)
                )
            made[stage] = made[like]
        asked = StageQuestion(
            blocks=self.tabulated.blocks,
            branches=tuple(made[stage] for stage in range(self.shape.depth)),
            places=self.places,
            all_devices=self.shape.width is None and not self.fewer,
            work=self._work(step_s),
        )
        yield BranchesAsked(asked=asked)

    def _levels(self, stage: int, team: Team) -> Iterator[Levels]:
        """All possible levels; if a stage's devices do not matter, one entry without levels."""
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
        """3. A branch for each range of workers from this stage on with as many microbatches in flight (PipeDream);
        neighbouring ranges that allow the same intervals are one branch.
        4. A branch allows the intervals of blocks that fit and take at most the limit; without any it is dropped.
        """
        own, before, after = levels
        own_speed, before_speed, after_speed = (self.places.bandwidth(level or 0) for level in levels)
        most_in_flight = -(-sum(self.places.counts) // team.replicas) if self.shape.width is None else 1
        found: list[Branch] = []
        for held in range(1, most_in_flight + 1):
            low, high = (held - 1) * team.replicas + 1, held * team.replicas
            kind = StageKind(
                stage=stage,
                type=team.type,
                replicas=team.replicas,
                workers=high if self.shape.width is None else 0,
                own=own_speed,
                before=before_speed,
                after=after_speed,
            )
            allowed = self._allowed(self.shared(kind), step_s)
            if found and found[-1].workers and np.array_equal(found[-1].allowed, allowed):
                low = found.pop().workers[0]  # type: ignore[index]
            workers = (low, high) if self.shape.width is None else None
            found.append(Branch(team=team, allowed=allowed, workers=workers, own=own, before=before, after=after))
        yield from (branch for branch in found if branch.allowed.any())

    def _allowed(self, kind: StageKind, step_s: float) -> BoolArray:
        table = self.table(kind)
        self.charge(table.size)
        return np.isfinite(table) & (table <= step_s)

    def _work(self, step_s: float) -> SolverWork | None:
        """5. Upper bounds on the workers' work in a step, in seconds on the first type of device. They bound the blocks
        before and after each cut: no new constraint, but the solver prunes by them.

        A worker of another type counts by its largest speed-up of any block. None if types differ so much that it
        would prune little.
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
