"""Floor: the least errors of any model of the rows that were put together from traces of single layers.

All rows of a hidden size, a tensor degree and a microbatch size share the trace of a layer. What such a row takes is
linear in the layer's seconds; all else of it is taken as known. A model of layers may be limited in two ways:

    monotone         more work never takes less time: wider layers, larger microbatches, fewer devices that share them
    equal launches   besides, layers that the host's launches determine take the same time if there are as many

The least error and regret are those of an integer program.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations
from math import inf

from ortools.sat.python import cp_model

from benchmarks.truth.constants import Constants
from benchmarks.truth.counted import count_rows
from benchmarks.truth.planned import cluster_of_row
from benchmarks.truth.rows import Row
from benchmarks.truth.timed import Timer
from benchmarks.truth.traced import is_launching
from pipeplan.costs.collectives import all_reduce_among

Trace = tuple[int, int, int]
"""Hidden size, tensor degree, microbatch size."""

UNITS_PER_S = 10**6
PARTS = 10**9
"""Errors and regrets are counted in so many parts of 1."""

MOST = 3
"""No layer takes more than so many times what was measured, or less than that part of it."""

ERROR_LIMIT = 0.05
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Floor:
    """The least mean error; and the least mean regret with a mean error of at most `ERROR_LIMIT`."""

    mean_error: float
    mean_regret: float


def trace_of(row: Row) -> Trace:
    """The trace that a row shares with others."""
    return row.hidden, row.tensor_parallel, row.microbatch or 1


def _layers_in_turn(row: Row) -> int:
    """So many layers a row takes in turn: a stage's, for every microbatch and for every other stage."""
    microbatches = row.batch // row.data_parallel // (row.microbatch or 1)
    return row.layers // row.pipeline_parallel * (microbatches + row.pipeline_parallel - 1)


@dataclass(frozen=True, eq=False)
class Floors:
    """The floors of rows. Constants say which layers the host determines, and what exchanges take."""

    all_rows: Sequence[Row]
    constants: Constants

    def found(self) -> dict[str, Floor]:
        """The floors, by what limits a model."""
        return {
            name: Floor(self._least(equal, error_limit=None), self._least(equal, error_limit=ERROR_LIMIT))
            for name, equal in (("monotone", False), ("equal launches", True))
        }

    @cached_property
    def rows(self) -> list[Row]:
        """Those of which the layer's seconds can be told."""
        return [row for row in self.all_rows if trace_of(row) in self.layers_s]

    @cached_property
    def _timer(self) -> Timer:
        return Timer(count_rows(self.all_rows), self.all_rows)

    @cached_property
    def layers_s(self) -> dict[Trace, float]:
        """Of every trace, what a layer was measured to take without its exchanges.

        It is the difference between rows that differ in their depth alone, of the most layers in turn: in these, what a
        layer takes once in an iteration counts least.
        """
        alike: dict[tuple[Trace, int, int], list[Row]] = defaultdict(list)
        for row in self.all_rows:
            if row.pipeline_parallel == 1:
                alike[trace_of(row), row.data_parallel, row.batch].append(row)
        pairs: dict[Trace, tuple[Row, Row]] = {}
        for (trace, *_), rows in alike.items():
            pair = min(rows, key=_layers_in_turn), max(rows, key=_layers_in_turn)
            if pair[0].layers < pair[1].layers and _turns(pair) > _turns(pairs.get(trace, (pair[0], pair[0]))):
                pairs[trace] = pair
        return {
            trace: (pair[1].seconds - pair[0].seconds) / _turns(pair) - self._exchanged_s(pair[0])
            for trace, pair in pairs.items()
        }

    def _exchanged_s(self, row: Row) -> float:
        trace, (_, layer, _) = row.program.trace, self._timer.kinds(row, row.microbatch or 1)
        if trace is None or row.tensor_parallel == 1:
            return 0.0
        among = all_reduce_among(cluster_of_row(row, self.constants), range(row.tensor_parallel))
        collectives = layer.forward.collectives + layer.backward.collectives
        return sum(each.count * (among.seconds(each.size_bytes) + trace.exchange_s) for each in collectives)

    @cached_property
    def launching(self) -> set[Trace]:
        """The traces of which the host determines both passes of the layer."""
        timed, found = self._timer.timed(self.constants), set()
        for row in {trace_of(row): row for row in self.rows}.values():
            size, engine = row.microbatch or 1, self.constants.engines[row.program.constants]
            layer, seconds = self._timer.kinds(row, size)[1], self._timer.of_row(row, size, timed)[1]
            passes = (layer.forward, seconds.forward), (layer.backward, seconds.backward)
            if all(is_launching(one, each.computing_s, row.tensor_parallel, engine) for one, each in passes):
                found.add(trace_of(row))
        return found

    @cached_property
    def operations(self) -> dict[Trace, int]:
        """The operations of every trace's layer."""
        kinds = {trace_of(row): self._timer.kinds(row, row.microbatch or 1)[1] for row in self.rows}
        return {trace: len(k.forward.operations) + len(k.backward.operations) for trace, k in kinds.items()}

    def _least(self, equal: bool, error_limit: float | None) -> float:
        """The least mean error, or the least mean regret within a limit of the error."""
        program = cp_model.CpModel()
        layers = {
            trace: program.new_int_var(int(s * UNITS_PER_S / MOST), int(s * UNITS_PER_S * MOST), "")
            for trace, s in self.layers_s.items()
        }
        for less, more in self._ordered():
            program.add(layers[less] <= layers[more])
        for one, other in combinations(self.launching, 2):
            if equal and self.operations[one] == self.operations[other]:
                program.add(layers[one] == layers[other])
        error = self._error(program, layers)
        if error_limit is None:
            program.minimize(error)
        else:
            program.add(error <= int(error_limit * PARTS))
            program.minimize(self._regret(program, layers))
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = LIMIT_S
        solver.parameters.num_workers = 1
        if solver.solve(program) == cp_model.INFEASIBLE:
            return inf
        return float(solver.best_objective_bound) / PARTS

    def _ordered(self) -> Iterator[tuple[Trace, Trace]]:
        """Pairs of which the second has at least the first's work, in at least as many operations."""
        for less, more in permutations(self.layers_s, 2):
            (h, t, b), (wider, fewer, larger) = less, more
            if h <= wider and t >= fewer and b <= larger and self.operations[less] <= self.operations[more]:
                yield less, more

    def _error(self, program: cp_model.CpModel, layers: Mapping[Trace, cp_model.IntVar]) -> cp_model.LinearExprT:
        """The mean error of the rows."""
        shares: dict[Trace, float] = defaultdict(float)
        for row in self.rows:
            shares[trace_of(row)] += _layers_in_turn(row) / row.seconds / len(self.rows)
        sizes = []
        for trace, layer in layers.items():
            measured = round(self.layers_s[trace] * UNITS_PER_S)
            size = program.new_int_var(0, measured * MOST, "")
            program.add_abs_equality(size, layer - measured)
            sizes.append(round(shares[trace] * PARTS / UNITS_PER_S) * size)
        return sum(sizes)

    def _regret(self, program: cp_model.CpModel, layers: Mapping[Trace, cp_model.IntVar]) -> cp_model.LinearExprT:
        """The mean regret: of every group, one row is predicted to take least."""

        def predicted(row: Row) -> cp_model.LinearExprT:
            turns, layer_s = _layers_in_turn(row), self.layers_s[trace_of(row)]
            return turns * layers[trace_of(row)] + round((row.seconds - turns * layer_s) * UNITS_PER_S)

        groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
        for row in self.rows:
            groups[row.group].append(row)
        several, lost = [group for group in groups.values() if len(group) > 1], []
        for group in several:
            best_s = min(row.seconds for row in group)
            chosen = {row: program.new_bool_var("") for row in group}
            program.add_exactly_one(chosen.values())
            for row, other in permutations(group, 2):
                program.add(predicted(row) <= predicted(other)).only_enforce_if(chosen[row])
            lost += [round((row.seconds / best_s - 1) * PARTS / len(several)) * chosen[row] for row in group]
        return sum(lost)


def _turns(pair: tuple[Row, Row]) -> int:
    return _layers_in_turn(pair[1]) - _layers_in_turn(pair[0])


def print_floors(found: Mapping[str, Floor]) -> None:
    """One row for each."""
    print(f"| model of layers | least mean error | least regret with an error of at most {ERROR_LIMIT:.0%} |")
    print("|---|---|---|")
    for name, floor in found.items():
        print(f"| {name} | {floor.mean_error:.1%} | {floor.mean_regret:.1%} |")
