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

import numpy as np
from ortools.sat.python import cp_model

from pipeplan.arrays import FloatArray
from pipeplan.planners.exact.budget import BUDGET
from pipeplan.planners.interleaved.terms import ChunkedTerms

_UNITS = 2.0**30
"""Units of time in an even share of the model's compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkVerdict:
    """The stops that were found, or None; no step is shorter than `bound_s`, which is infinite if there is none."""

    stops: tuple[int, ...] | None
    bound_s: float
    proven: bool
    spent: float


def least_step(
    terms: ChunkedTerms, *, least_s: float, below_s: float, hint: Sequence[int] | None, limit: float
) -> ChunkVerdict:
    """The least step below a limit, with ranks that fit, within `limit` deterministic seconds.

    `least_s` is a known lower bound on all steps, `hint` has stages to start from.
    """
    making = BUDGET.each_boolean_s * terms.shape.depth * terms.blocks
    if making >= limit:
        return ChunkVerdict(stops=None, bound_s=0.0, proven=False, spent=limit)
    unit_s = float(terms.chain.compute_s[-1]) / terms.shape.ranks / _UNITS
    cuts = _Cuts(terms)
    highest = int(min(below_s / unit_s, 4.0 * terms.shape.ranks * _UNITS * terms.shape.depth))
    step = cuts.model.new_int_var(min(int(least_s / unit_s * (1 - 1e-9)), highest), highest, "step")
    _limit_ranks(terms, cuts, step, unit_s)
    if hint is not None:
        cuts.hint(hint)
    cuts.model.minimize(step)

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.max_deterministic_time = limit - making
    status = solver.solve(cuts.model)
    if status == cp_model.MODEL_INVALID:
        raise ArithmeticError(f"the solver refuses its model: {cuts.model.validate()}")
    # Both sums of a stage are rounded: a rank is off by at most one unit for each of its stages.
    bound_s = max(solver.best_objective_bound - terms.shape.chunks, 0.0) * unit_s
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return ChunkVerdict(
        stops=(*(sum(map(solver.value, row)) for row in cuts.beyond), terms.blocks) if found else None,
        bound_s=inf if status == cp_model.INFEASIBLE else bound_s,
        proven=status in (cp_model.OPTIMAL, cp_model.INFEASIBLE),
        spent=making + solver.response_proto.deterministic_time,
    )


def _limit_ranks(terms: ChunkedTerms, cuts: "_Cuts", step: cp_model.IntVar, unit_s: float) -> None:
    """3. A rank recomputes by some unit or not. It takes no longer than the step, with its exchange overlapped.
    4. It holds no more than its device, at each of the moments at which it may hold most.
    """
    model, shape = cuts.model, terms.shape
    starts = np.arange(terms.blocks)
    workspaces = terms.workspaces.at(starts, starts + 1).astype(int).tolist()
    again = terms.chain.quantities.blocks_again
    activations = again.of_stages(starts, starts + 1).astype(int).tolist() if again else []
    by_block = (True, "block") in terms.ways
    for rank in range(shape.ranks):
        stages = shape.stages_of(rank)
        transient = cuts.largest(workspaces, stages)
        largest = [cuts.largest(activations, (stage,)) if by_block else 0 for stage in stages]
        modes = {way: model.new_bool_var(f"rank {rank}, {way}") for way in terms.ways}
        model.add_exactly_one(modes.values())
        for (mode, unit), chosen in modes.items():
            edges = [terms.edge_sums(stage, recompute=mode) for stage in stages]
            busy = [
                cuts.between(s, ends / unit_s, begins / unit_s) for s, (begins, ends) in zip(stages, edges, strict=True)
            ]
            model.add(cp_model.LinearExpr.sum(busy) <= step).only_enforce_if(chosen)
            weights = terms.exchange_s_per_byte(rank) / unit_s * terms.chain.weight_bytes
            exchange = [cuts.between(stage, weights, weights) for stage in stages]
            model.add(cp_model.LinearExpr.sum(exchange) <= step).only_enforce_if(chosen)
            for moment in terms.held(rank, recompute=mode).moments.tolist():
                memory: list[cp_model.LinearExprT] = [transient]
                for chunk, stage in enumerate(stages):
                    whole, inputs = moment[chunk], moment[shape.chunks + chunk]
                    copies = terms.copies(stage, recompute=mode, whole=whole, inputs=inputs, unit=unit)
                    if unit == "block":
                        memory.append(whole * largest[chunk])
                    held = terms.stage_sum(copies)  # without its largest blocks
                    memory.append(cuts.between(stage, held.until, held.before))
                model.add(cp_model.LinearExpr.sum(memory) <= terms.device_bytes).only_enforce_if(chosen)


class _Cuts:
    """The cuts of all stages, and sums over their blocks."""

    def __init__(self, terms: ChunkedTerms) -> None:
        self.model = model = cp_model.CpModel()
        depth, blocks, options = terms.shape.depth, terms.blocks, terms.problem.options
        never, always = model.new_constant(0), model.new_constant(1)
        self.beyond = [
            [
                always if k <= stage else never if k > blocks - depth + stage else model.new_bool_var(f"{stage}>{k}")
                for k in range(blocks + 1)
            ]
            for stage in range(depth - 1)
        ]
        # The row of each stage's stop, and before the first: all 0 before the first stage, all 1 at the last.
        self._rows = [*self.beyond, [*[always] * blocks, never], [never] * (blocks + 1)]
        for stage, row in enumerate(self.beyond):
            for k in range(blocks):
                model.add(row[k + 1] <= row[k])
                if stage:
                    model.add(self.beyond[stage - 1][k] <= row[k + 1])  # 1. Stops ascend; every stage has a block.
        for cut in (*options.forced_cuts, *options.forbidden_cuts):  # 2. Forced cuts are stops, forbidden ones are not.
            stops_here = cp_model.LinearExpr.sum([row[cut - 1] - row[cut] for row in self.beyond])
            model.add(stops_here == (1 if cut in options.forced_cuts else 0))

    def between(self, stage: int, until: FloatArray, before: FloatArray) -> cp_model.LinearExprT:
        """The first sums at the stage's stop, less the second at its start, each rounded."""
        return cp_model.LinearExpr.sum([self._at(stage, until), self._at(stage - 1, -before)])

    def _at(self, stage: int, values: FloatArray) -> cp_model.LinearExprT:
        whole = [round(value) for value in values.tolist()]
        steps = [after - before for before, after in pairwise(whole)]
        sums: cp_model.LinearExprT = cp_model.LinearExpr.weighted_sum(self._rows[stage][:-1], steps) + whole[0]
        return sums

    def largest(self, values: Sequence[int], stages: Sequence[int]) -> cp_model.IntVar:
        """No less than the largest value of a block of these stages."""
        largest = self.model.new_int_var(0, max(values), f"largest of {stages}")
        for block, value in enumerate(values):
            if value:
                here = [self._rows[stage][block] - self._rows[stage - 1][block] for stage in stages]
                self.model.add(largest >= value * cp_model.LinearExpr.sum(here))
        return largest

    def hint(self, stops: Sequence[int]) -> None:
        """Gives the solver stages to start from."""
        for stage, row in enumerate(self.beyond):
            for k, variable in enumerate(row):
                if variable.index > 1:  # not one of both constants
                    self.model.add_hint(variable, int(stops[stage] > k))
