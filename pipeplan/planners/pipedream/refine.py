"""Refine: a plan of a graph with too many cuts to list.

1. The search solves the places of one order of the blocks (`graph.line_of`), as it solves any states.
2. It adds three kinds of cuts, and solves the states again: the places of the order that the fewest bytes cross
   (`costs.graph_order`); those that differ from a cut of the plan by one block, which moves to the other side together
   with every block that must follow it; and those that differ by a few blocks.
3. It stops when this does not help any more, when the plan is as fast as all devices sharing all compute, which is the
   bound, or after a few rounds.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.costs.graph import Graph, closures, crossing_by_cut, graph_of, line_of, membership
from pipeplan.costs.graph_order import least_order
from pipeplan.documents.certificate import Certificate
from pipeplan.planners.pipedream.budget import BUDGET
from pipeplan.planners.pipedream.certificate import QUANTITY
from pipeplan.planners.pipedream.partition import partition
from pipeplan.planners.pipedream.parts import Partition, fits
from pipeplan.planners.pipedream.states import CutStates, evenly, states_of, summed
from pipeplan.planners.pipedream.terms import gradient_copies, search
from pipeplan.planners.problem import PlanningProblem

NEAR = 1e-3
"""A gap that is not worth another round."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Refined:
    """The best partition, the states between which its stages lie, and the proof."""

    cuts: CutStates
    found: Partition
    certificate: Certificate


def refine(problem: PlanningProblem, microbatch_size: int, cuts: CutStates) -> Refined | None:
    """The best partition of some cuts of a graph, with a bound on all others. None if none fits.

    Deterministic: effort is counted, not timed.
    """
    solved = _solved(problem, cuts)
    if solved is None:
        return None
    cuts, found = solved
    measured = problem.profile.at(microbatch_size)
    sums = summed(problem.profile, measured, gradient_copies(problem))
    bound_s = float(sums[0].sum()) / problem.cluster.devices
    graph = graph_of(len(measured), problem.profile.edges or ())
    nearby = _Nearby(graph, [block.output_bytes for block in measured], sums[0])
    for _ in range(BUDGET.refined_rounds if len(graph) <= BUDGET.refined_blocks else 0):
        if found.cost_s <= bound_s * (1 + NEAR):
            break
        limit_bytes = found.cost_s * problem.cluster.levels[0].bandwidth_bytes_per_s / 2
        listed = nearby.around(cuts, found, limit_bytes, _cuts_at_most(problem))
        solved = _solved(problem, states_of(sums, graph, measured, listed, complete=False))
        if solved is None or solved[1].cost_s >= found.cost_s * (1 - NEAR):
            break
        cuts, found = solved
    certificate = Certificate(
        method="cut and refine",
        quantity=QUANTITY,
        value=found.cost_s,
        bound=min(bound_s, found.cost_s),
        claim=f"All {problem.cluster.devices} devices sharing all compute take the bound; no plan is below that.",
    )
    return Refined(cuts=cuts, found=found, certificate=certificate)


def _solved(problem: PlanningProblem, cuts: CutStates) -> tuple[CutStates, Partition] | None:
    """The best partition of these cuts, or of a part of them if memory decides and all would take too long."""
    wanted = search(problem, cuts.states)
    found = partition(replace(wanted, memory=None))
    if found is not None and not fits(wanted, found):
        cuts = cuts.some(evenly(range(len(cuts.states)), _cuts_at_most(problem)))
        found = partition(search(problem, cuts.states))
    return None if found is None else (cuts, found)


def _cuts_at_most(problem: PlanningProblem) -> int:
    """Upper bound on the cuts that are solved at once: time grows with their square and, if memory decides, with that
    of the devices.
    """
    return max(min(BUDGET.refined_cuts, int(BUDGET.refined_entries**0.5 / problem.cluster.devices)), 50)


@dataclass(frozen=True, eq=False)
class _Nearby:
    """A graph's cuts near those of a plan. A cut is the set of blocks before it."""

    graph: Graph
    output_bytes: Sequence[int]
    compute_s: FloatArray

    @cached_property
    def _closures(self) -> tuple[list[int], list[int]]:
        """By block: itself and what it needs; itself and what depends on it."""
        return closures(self.graph)

    @cached_property
    def _cheap(self) -> list[int]:
        """The places of the order that the fewest bytes cross."""
        order = least_order(self.graph, self.output_bytes, line_of(self.graph, self.output_bytes))
        return list(accumulate(1 << block for block in order[:-1]))

    def around(self, cuts: CutStates, found: Partition, limit_bytes: float, count: int) -> list[int]:
        """The next cuts to solve, by size: the plan's own and others, at most `count`."""
        own = [cuts.cut(share.stop) for share in found.shares]
        chosen = dict.fromkeys((0, *own))
        known = [cuts.cut(state) for state in np.flatnonzero(cuts.states.boundary_bytes <= limit_bytes).tolist()]
        for few in (self._within(self._cheap, limit_bytes), known):
            chosen |= dict.fromkeys(evenly(few, count // 3))
        each = (count - len(chosen)) // max(len(own) - 1, 1) // 2
        for cut in own[:-1]:
            chosen |= dict.fromkeys(self._moved(cut, limit_bytes)[:each])
            chosen |= dict.fromkeys(self._stepped(cut, each))
        return sorted(chosen, key=lambda cut: (cut.bit_count(), cut))

    def _within(self, cuts: Sequence[int], limit_bytes: float) -> list[int]:
        """Those of the cuts that at most these bytes cross."""
        inside = membership(cuts, len(self.graph))
        crossing = crossing_by_cut(self.graph, inside, np.asarray(self.output_bytes, dtype=np.float64))
        return [cuts[index] for index in np.flatnonzero(crossing <= limit_bytes).tolist()]

    def _moved(self, cut: int, limit_bytes: float) -> list[int]:
        """The cuts that differ by one block and its dependents; those that move the least compute first."""
        moved = [
            cut & ~dependent if cut >> block & 1 else cut | needed
            for block, (needed, dependent) in enumerate(zip(*self._closures, strict=True))
        ]
        within = self._within(list(dict.fromkeys(moved)), limit_bytes)
        seconds = membership([cut, *within], len(self.graph)) @ self.compute_s
        nearest = np.argsort(np.abs(seconds[1:] - seconds[0]), kind="stable")
        return [within[index] for index in nearest.tolist()]

    def _stepped(self, cut: int, count: int) -> list[int]:
        """The cuts that differ by one block, then those by two, and so on."""
        blocks = len(self.graph)
        count = min(count, BUDGET.refined_steps // blocks)
        found = {cut: None}
        queue = deque([cut])
        while queue and len(found) <= count:
            here = queue.popleft()
            for block, (needed, dependent) in enumerate(zip(*self._closures, strict=True)):
                own = 1 << block
                ahead = dependent & here if here & own else needed & ~here
                if ahead == own and here ^ own not in found:
                    found[here ^ own] = None
                    queue.append(here ^ own)
        return list(found)[:count]
