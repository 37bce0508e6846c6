"""Chunk model: stages of ranks with three chunks and more, by OR-tools CP-SAT, with a bound.

A cut is a row of booleans: `beyond[s][k]` says that stage s stops beyond block k. A sum over the blocks of a stage is
linear in the rows of its two cuts, and so are the limits of a rank. Comments and docstrings number the constraints.

Seconds are rounded to whole units; the bound allows for that. One worker, and a limit in the solver's deterministic
seconds, make the answer reproducible.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from ortools.sat.python import cp_model

from pipeplan.arrays import FloatArray
from pipeplan.planners.interleaved.terms import ChunkedTerms

_SEED = 1
_UNITS = 2.0**30
"""Units of time in an even share of the model's compute."""

_EACH_BOOLEAN = 1e-5
"""Deterministic seconds for making the model, for each boolean and rank: the solver's own count leaves them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkVerdict:
    """The stops that were found, or None; no step is shorter than `bound`. `proven`: time was enough."""

    stops: tuple[int, ...] | None
    bound: float
    proven: bool
    spent: float


def least_step(
    terms: ChunkedTerms, *, least_s: float, below_s: float, hint: Sequence[int] | None, limit: float
) -> ChunkVerdict:
    """The least step below a limit, with ranks that fit. Its bound is infinite if it is proven that there is none.

    `least_s` is a known lower bound on all steps.
    """
    unit_s = float(terms.chain.compute_s[-1]) / terms.shape.ranks / _UNITS
    model = _ChunkModel(terms)
    most = int(min(below_s / unit_s, 4.0 * terms.shape.ranks * _UNITS * terms.shape.depth))
    step = model.model.new_int_var(min(int(least_s / unit_s * (1 - 1e-9)), most), most, "step")
    model.limit_time(step, unit_s)
    model.limit_memory()
    if hint is not None:
        model.hint(hint)
    model.model.minimize(step)
    # Both sums of a stage are rounded: a rank is off by at most one unit for each of its stages.
    return model.solve(limit, unit_s, terms.shape.chunks)


class _ChunkModel:
    """The cuts, and their limits."""

    def __init__(self, terms: ChunkedTerms) -> None:
        self.terms, self.model = terms, cp_model.CpModel()
        shape, blocks, model = terms.shape, terms.blocks, self.model
        never, always = model.new_constant(0), model.new_constant(1)
        self.beyond: list[list[cp_model.IntVar]] = []
        for stage in range(shape.depth - 1):
            first, last = stage + 1, blocks - (shape.depth - 1 - stage)  # where the stage may stop
            self.beyond.append(
                [
                    always if k < first else never if k >= last else model.new_bool_var(f"{stage}>{k}")
                    for k in range(blocks + 1)
                ]
            )
        self._none, self._all = [never] * (blocks + 1), [*[always] * blocks, never]
        for stage, row in enumerate(self.beyond):
            for k in range(blocks):
                model.add(row[k + 1] <= row[k])
                if stage:
                    model.add(self.beyond[stage - 1][k] <= row[k + 1])  # 1. Stops ascend; every stage has a block.
        options = terms.problem.options
        for cut in (*options.forced_cuts, *options.forbidden_cuts):  # 2. Forced cuts are stops, forbidden ones are not.
            stops_here = cp_model.LinearExpr.sum([row[cut - 1] - row[cut] for row in self.beyond])
            model.add(stops_here == (1 if cut in options.forced_cuts else 0))
        self.modes = {
            (rank, mode, unit): model.new_bool_var(f"rank {rank}, recompute {mode} by {unit}")
            for rank in range(shape.ranks)
            for mode, unit in terms.ways
        }
        for rank in range(shape.ranks):
            model.add_exactly_one([self.modes[rank, mode, unit] for mode, unit in terms.ways])

    def limit_time(self, step: cp_model.IntVar, unit_s: float) -> None:
        """3. A rank recomputes or not, and takes no longer than the step, with its gradient exchange overlapped."""
        terms, shape = self.terms, self.terms.shape
        for (rank, mode, _), chosen in self.modes.items():
            stages = shape.stages_of(rank)
            busy = []
            for stage in stages:
                begins_s, ends_s = terms.edge_sums(stage, recompute=mode)
                busy += [self._at(stage, ends_s / unit_s), self._at(stage - 1, -begins_s / unit_s)]
            self.model.add(cp_model.LinearExpr.sum(busy) <= step).only_enforce_if(chosen)
            weights = terms.exchange_s_per_byte(rank) / unit_s * terms.chain.weight_bytes
            if weights.any():
                exchange = [sums for s in stages for sums in (self._at(s, weights), self._at(s - 1, -weights))]
                self.model.add(cp_model.LinearExpr.sum(exchange) <= step).only_enforce_if(chosen)

    def limit_memory(self) -> None:
        """4. A rank holds no more than its device, at each of the moments at which it may hold most."""
        terms, shape, blocks = self.terms, self.terms.shape, self.terms.blocks
        workspaces = [int(terms.workspace_bytes[block, block + 1]) for block in range(blocks)]
        by_block = (True, "block") in terms.ways
        activations = [int(terms.largest_bytes[block, block + 1]) for block in range(blocks)]
        for rank in range(shape.ranks):
            stages = shape.stages_of(rank)
            transient = self._largest(workspaces, stages)
            largest = [self._largest(activations, (stage,)) if by_block else 0 for stage in stages]
            for mode, unit in terms.ways:
                for moment in terms.held(rank, recompute=mode).moments.tolist():
                    held: list[cp_model.LinearExprT] = [transient]
                    for chunk, stage in enumerate(stages):
                        whole, inputs = moment[chunk], moment[shape.chunks + chunk]
                        table = terms.fixed_bytes(stage, recompute=mode)
                        if unit == "block":
                            held.append(whole * largest[chunk])
                            table = table + terms.inputs_of_blocks(whole + inputs)
                        else:
                            table = table + terms.microbatch_bytes(whole=whole, inputs=inputs)
                        held += [self._at(stage, table[0]), self._at(stage - 1, table[:, 0] - table[0, 0])]
                    together = cp_model.LinearExpr.sum(held)
                    self.model.add(together <= terms.device_bytes).only_enforce_if(self.modes[rank, mode, unit])

    def _largest(self, values: Sequence[int], stages: Sequence[int]) -> cp_model.IntVar:
        """No less than the largest value of a block of these stages."""
        largest = self.model.new_int_var(0, max(values), f"largest of {stages}")
        for block, value in enumerate(values):
            if value:
                here = [self._row(stage)[block] - self._row(stage - 1)[block] for stage in stages]
                self.model.add(largest >= value * cp_model.LinearExpr.sum(here))
        return largest

    def hint(self, stops: Sequence[int]) -> None:
        """Gives the solver stages to start from."""
        for row, stop in zip(self.beyond, stops, strict=False):
            for k, variable in enumerate(row):
                if variable.index not in (self._none[0].index, self._all[0].index):
                    self.model.add_hint(variable, int(stop > k))

    def solve(self, limit: float, unit: float, rounded: int) -> ChunkVerdict:
        """Solves within `limit` deterministic seconds."""
        making = _EACH_BOOLEAN * self.terms.shape.depth * self.terms.blocks
        if making >= limit:
            return ChunkVerdict(stops=None, bound=0.0, proven=False, spent=limit)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = _SEED
        solver.parameters.max_deterministic_time = limit - making
        status = solver.solve(self.model)
        spent = making + solver.response_proto.deterministic_time
        if status == cp_model.MODEL_INVALID:
            raise ArithmeticError(f"the solver refuses its model: {self.model.validate()}")
        if status == cp_model.INFEASIBLE:
            return ChunkVerdict(stops=None, bound=inf, proven=True, spent=spent)
        bound = max(solver.best_objective_bound - rounded, 0.0) * unit
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return ChunkVerdict(stops=None, bound=bound, proven=False, spent=spent)
        stops = tuple(sum(solver.value(each) for each in row) for row in self.beyond)
        proven = status == cp_model.OPTIMAL
        return ChunkVerdict(stops=(*stops, self.terms.blocks), bound=bound, proven=proven, spent=spent)

    def _row(self, stage: int) -> Sequence[cp_model.IntVar]:
        """The row of a stage's stop: all 0 before the first stage, all 1 at the last."""
        if stage < 0:
            return self._none
        return self.beyond[stage] if stage < len(self.beyond) else self._all

    def _at(self, stage: int, values: FloatArray) -> cp_model.LinearExprT:
        """The value at a stage's stop, rounded."""
        whole = [round(value) for value in values.tolist()]
        steps = [after - before for before, after in pairwise(whole)]
        sums: cp_model.LinearExprT = cp_model.LinearExpr.weighted_sum(self._row(stage)[:-1], steps) + whole[0]
        return sums
