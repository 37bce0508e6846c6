"""Decision: OR-tools CP-SAT decides whether any stages stay within a limit of time.

The solver sees no seconds and no bytes. For every stage and every kind of place (a branch) it gets the intervals of
blocks that take at most the limit and fit, from the exact tables of `kinds`. It decides what a recurrence cannot
express: the places of the cuts, the type and number of devices of each stage, and the network levels between them.
Comments in `_Model` number the constraints.

One worker and a limit in the solver's deterministic seconds make the answer reproducible.
"""

from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from ortools.sat.python import cp_model

from pipeplan.arrays import BoolArray, IntArray
from pipeplan.planners.exact.places import Places, Team

_SEED = 1

_EACH_MODEL, _EACH_ENTRY = 0.002, 2e-5
"""Deterministic seconds for making and presolving a model, and for each entry of its tables. They are measured: the
solver's own count leaves them out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branch:
    """One kind of place for a stage: a team of devices, and the intervals of blocks that it may take.

    `workers` is the allowed range of workers from this stage on. `own` is the outermost level between its replicas,
    `before` and `after` are those across its boundaries; None where they do not matter.
    """

    team: Team
    allowed: BoolArray
    workers: tuple[int, int] | None = None
    own: int | None = None
    before: int | None = None
    after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageQuestion:
    """Every stage's branches. `places` is None where the stages' places are given with their branches.

    `all_devices`: none may stay idle.
    """

    blocks: int
    branches: tuple[tuple[Branch, ...], ...]
    places: Places | None = None
    all_devices: bool = False
    work: "SolverWork | None" = None

    @property
    def entries(self) -> int:
        """The size of the model: of every branch how far each start reaches, and the exceptions."""
        every = (branch.allowed for branches in self.branches for branch in branches)
        return sum(len(allowed) + len(_exceptions(allowed)) for allowed in every)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SolverWork:
    """The work of the blocks before each cut and after it, and what a worker of each type can do, in whole units.

    Blocks are rounded down and workers up: rounding excludes no stages.
    """

    before: tuple[int, ...]
    behind: tuple[int, ...]
    rates: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The teams and stops of a solution; or None, and whether it is `proven` that there is none."""

    found: tuple[tuple[Team, ...], tuple[int, ...]] | None
    proven: bool
    spent: float


def decide(question: StageQuestion, limit: float) -> Verdict:
    """Finds stages, proves that there are none, or ends undecided after this many deterministic seconds."""
    if not all(question.branches):
        return Verdict(found=None, proven=True, spent=_EACH_MODEL)
    making = _EACH_MODEL + _EACH_ENTRY * question.entries
    if making >= limit:
        return Verdict(found=None, proven=False, spent=limit)
    model = _Model(question)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = _SEED
    solver.parameters.cp_model_probing_level = 0  # it finds nothing here, and takes most of the time of small questions
    solver.parameters.max_deterministic_time = limit - making
    status = solver.solve(model.model)
    spent = making + solver.response_proto.deterministic_time
    found = model.read(solver) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    return Verdict(found=found, proven=status == cp_model.INFEASIBLE, spent=spent)


def _reach(allowed: BoolArray) -> IntArray:
    """The last allowed stop for every start; 0 if there is none."""
    reach = np.where(allowed.any(axis=1), len(allowed) - np.argmax(allowed[:, ::-1], axis=1), 0)
    return np.asarray(reach, dtype=np.int64)


def _exceptions(allowed: BoolArray) -> IntArray:
    """The pairs (start, stop) within reach that are nevertheless not allowed."""
    blocks = len(allowed)
    within = np.tri(blocks, dtype=bool).T & (np.arange(blocks) < _reach(allowed)[:, None])
    return np.asarray(np.argwhere(within & ~allowed) + np.array([0, 1]), dtype=np.int64)


class _Model:
    """The variables: `cuts[s]`, where stage s starts, and `takes[s][k]`, that it takes its branch k."""

    def __init__(self, question: StageQuestion) -> None:
        self.question = question
        self.model = cp_model.CpModel()
        self.depth = len(question.branches)
        blocks = question.blocks
        inner = range(1, self.depth)
        self.cuts = [
            self.model.new_constant(0),
            *(self.model.new_int_var(s, blocks - self.depth + s, f"cut{s}") for s in inner),
            self.model.new_constant(blocks),
        ]
        for start, stop in pairwise(self.cuts):
            self.model.add(start < stop)  # 1. The cuts ascend from 0 to the number of blocks.
        self.takes = [
            [self.model.new_bool_var(f"takes{s}_{k}") for k in range(len(branches))]
            for s, branches in enumerate(question.branches)
        ]
        for stage, takes in enumerate(self.takes):
            self.model.add_exactly_one(takes)  # 2. Every stage takes exactly one of its branches.
            for branch, taken in zip(question.branches[stage], takes, strict=True):
                # 3. A stage stops where its branch allows: within reach of its start, with exceptions.
                reached = self.model.new_int_var(0, blocks, "")
                self.model.add_element(self.cuts[stage], [*_reach(branch.allowed).tolist(), 0], reached)
                self.model.add(self.cuts[stage + 1] <= reached).only_enforce_if(taken)
                if len(exceptions := _exceptions(branch.allowed)):
                    ends = [self.cuts[stage], self.cuts[stage + 1]]
                    self.model.add_forbidden_assignments(ends, exceptions.tolist()).only_enforce_if(taken)
        if question.places is not None:
            self._devices(question.places)

    def read(self, solver: cp_model.CpSolver) -> tuple[tuple[Team, ...], tuple[int, ...]]:
        """The solver's solution."""
        teams = tuple(
            next(b.team for b, taken in zip(branches, takes, strict=True) if solver.boolean_value(taken))
            for branches, takes in zip(self.question.branches, self.takes, strict=True)
        )
        return teams, tuple(solver.value(cut) for cut in self.cuts[1:])

    def _devices(self, places: Places) -> None:
        """Constraints 4 to 7, for stages whose places are not given."""
        for kind, count in enumerate(places.counts):
            used = self._used(kind, self.depth)
            # 4. Every type has enough devices, or all of them are used.
            self.model.add(used == count if self.question.all_devices else used <= count)
        for stage, branches in enumerate(self.question.branches):
            later = range(stage, self.depth)
            workers = cp_model.LinearExpr.sum([self._replicas(s) for s in later])
            for branch, taken in zip(branches, self.takes[stage], strict=True):
                if branch.workers is not None:  # 5. The workers from a stage on are in its branch's range.
                    self.model.add_linear_constraint(workers, *branch.workers).only_enforce_if(taken)
        if (work := self.question.work) is not None:
            # 6. The workers before a cut, and those after it, can do the work of the blocks there. This follows from
            #    the other constraints, but the solver would take long to find it.
            total = cp_model.LinearExpr.sum([self._does(work, s) for s in range(self.depth)])
            for stage in range(1, self.depth):
                done = cp_model.LinearExpr.sum([self._does(work, s) for s in range(stage)])
                before = self.model.new_int_var(0, work.before[-1], "")
                behind = self.model.new_int_var(0, work.behind[0], "")
                self.model.add_element(self.cuts[stage], work.before, before)
                self.model.add_element(self.cuts[stage], work.behind, behind)
                self.model.add(before <= done)
                self.model.add(behind <= total - done)
        if any(branch.own is not None for branches in self.question.branches for branch in branches):
            self._levels(places)

    def _does(self, work: SolverWork, stage: int) -> cp_model.LinearExprT:
        rates = [b.team.replicas * work.rates[b.team.type] for b in self.question.branches[stage]]
        return cp_model.LinearExpr.weighted_sum(self.takes[stage], rates)

    def _replicas(self, stage: int, kind: int | None = None) -> cp_model.LinearExprT:
        """The stage's replicas; with a type, only those of this type."""
        branches = self.question.branches[stage]
        counted = [b.team.replicas if kind in (None, b.team.type) else 0 for b in branches]
        return cp_model.LinearExpr.weighted_sum(self.takes[stage], counted)

    def _used(self, kind: int, stages: int) -> cp_model.LinearExprT:
        """The devices of a type that the stages before this one take."""
        return cp_model.LinearExpr.sum([self._replicas(s, kind) for s in range(stages)])

    def _levels(self, places: Places) -> None:
        """7. The levels between the devices of a stage, and across each boundary, are those of the branches taken. They
        follow from the first of its type's devices that every stage takes.
        """
        rows, top = _Rows(places), len(places.cluster.levels) - 1
        size = places.cluster.levels[0].size
        units = range(places.cluster.devices // size)
        apart_rows = [(low, high, places.level(low * size, high * size)) for low, high in product(units, units)]

        owns: list[cp_model.IntVar] = []
        anchors: list[cp_model.IntVar] = []
        for stage in range(self.depth):
            own, anchor = self.model.new_int_var(0, top, ""), self.model.new_int_var(0, places.cluster.devices, "")
            first = self.model.new_int_var(0, places.cluster.devices, "")
            for branch, taken in zip(self.question.branches[stage], self.takes[stage], strict=True):
                self.model.add(first == self._used(branch.team.type, stage)).only_enforce_if(taken)
                self.model.add_allowed_assignments([first, own, anchor], rows[branch.team]).only_enforce_if(taken)
                if branch.own is not None:
                    self.model.add(own == branch.own).only_enforce_if(taken)
            owns.append(own)
            anchors.append(anchor)

        for boundary in range(1, self.depth):
            apart, edge = self.model.new_int_var(0, top, ""), self.model.new_int_var(0, top, "")
            self.model.add_allowed_assignments([anchors[boundary - 1], anchors[boundary], apart], apart_rows)
            self.model.add_max_equality(edge, [owns[boundary - 1], owns[boundary], apart])
            self._edge(boundary - 1, edge, "after")
            self._edge(boundary, edge, "before")

    def _edge(self, stage: int, edge: cp_model.IntVar, side: str) -> None:
        for branch, taken in zip(self.question.branches[stage], self.takes[stage], strict=True):
            level = getattr(branch, side)
            if level is not None:
                self.model.add(edge == level).only_enforce_if(taken)


class _Rows(dict[Team, list[tuple[int, int, int]]]):
    """Team -> rows of (first of its type's devices, level between its replicas, unit of its first device).

    A unit is one of the innermost level: the distance of two devices depends only on their units.
    """

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._places = places

    def __missing__(self, team: Team) -> list[tuple[int, int, int]]:
        ranks = self._places.ranks[team.type]
        lows, highs = ranks[: len(ranks) - team.replicas + 1], ranks[team.replicas - 1 :]
        levels = self._places.bandwidths.levels(lows, highs)
        units = lows // self._places.cluster.levels[0].size
        self[team] = list(zip(range(len(lows)), levels.tolist(), units.tolist(), strict=True))
        return self[team]
