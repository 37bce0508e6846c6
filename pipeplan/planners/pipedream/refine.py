"""Refine: a plan of a graph with too many cuts to list, and a bound on its gap to the optimum.

1. The search solves the cuts of one order of the blocks (`graph.line_of`), as it solves any states.
2. A bound over all cuts of the graph says how much better a plan could be (`graph_bound`).
3. If the gap is not negligible, the search adds two kinds of cuts: cuts of few bytes that the bound found on the way,
   and cuts near those of the plan. A near cut differs by a few blocks, or by one block that moves to the other side
   together with every block that must follow it. The search then solves the states again. It stops when this does not
   help any more, or after `ROUNDS` rounds.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, prod

import numpy as np

from pipeplan.costs.graph import closures, crossing_by_cut, graph_of, membership
from pipeplan.documents.certificate import Certificate
from pipeplan.planners.pipedream.certificate import QUANTITY
from pipeplan.planners.pipedream.graph_bound import (
    BLOCKS_AT_MOST,
    Blocks,
    Bound,
    HeldBytes,
    Machines,
    Sides,
    bound,
    compute_bound,
    windows_of,
)
from pipeplan.planners.pipedream.partition import partition
from pipeplan.planners.pipedream.parts import Partition, fits
from pipeplan.planners.pipedream.states import CutStates, evenly, exactly_summed, states_of, summed
from pipeplan.planners.pipedream.terms import FACTORS, gradient_copies, law, search, synchronisation
from pipeplan.planners.problem import PlanningProblem

ENTRIES_AT_MOST = 2e7
"""(Cuts x devices) squared: if memory decides, a search compares this many entries in about a second."""

ROUNDS = 4
"""Upper bound on the rounds in which cuts are added."""

CUTS_AT_MOST = 1200
"""Upper bound on the states that are solved at once after the first round."""

STEPS_AT_MOST = 100_000
"""Upper bound on the blocks examined for the cuts near one cut of a plan: a few hundredths of a second."""

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
    blocks = _blocks(problem, microbatch_size)
    solved = _solved(problem, cuts)
    if solved is None:
        return None
    cuts, found = solved
    machines = _machines(problem)
    if len(blocks.graph) > BLOCKS_AT_MOST:
        proven = compute_bound(blocks, problem.cluster.devices, found.cost_s)
        return Refined(cuts=cuts, found=found, certificate=_certificate(problem, found, proven))
    cut = _Cut(blocks=blocks, machines=machines)
    proven, cheap = cut.bound(cuts, found)
    measured = problem.profile.at(microbatch_size)
    sums = summed(problem.profile, measured, gradient_copies(problem))
    for _ in range(ROUNDS):
        if found.cost_s <= proven.seconds * (1 + NEAR):
            break
        listed = cut.around(cuts, found, cheap, _room(problem))
        more = states_of(sums, blocks.graph, measured, listed, complete=False)
        solved = _solved(problem, more)
        if solved is None or solved[1].cost_s >= found.cost_s * (1 - NEAR):
            break
        cuts, found = solved
        proven, cheap = cut.bound(cuts, found)
    return Refined(cuts=cuts, found=found, certificate=_certificate(problem, found, proven))


def _solved(problem: PlanningProblem, cuts: CutStates) -> tuple[CutStates, Partition] | None:
    """The best partition of these cuts, or of a part of them if memory decides and all would take too long."""
    wanted = search(problem, cuts.states)
    found = partition(replace(wanted, memory=None))
    if found is not None and not fits(wanted, found):
        cuts = cuts.some(evenly(range(len(cuts.states)), _room(problem)))
        found = partition(search(problem, cuts.states))
    return None if found is None else (cuts, found)


def _room(problem: PlanningProblem) -> int:
    """Upper bound on the cuts that are solved at once: time grows with their square and, if memory decides, with that
    of the devices.
    """
    return max(min(CUTS_AT_MOST, int(ENTRIES_AT_MOST**0.5 / problem.cluster.devices)), 50)


def _blocks(problem: PlanningProblem, microbatch_size: int) -> Blocks:
    profile = problem.profile
    measured = profile.at(microbatch_size)
    return Blocks(
        graph=graph_of(len(measured), profile.edges or ()),
        compute_s=exactly_summed(np.asarray([block.compute_s for block in measured], dtype=np.float64)),
        weight_bytes=np.asarray([block.trained_bytes for block in profile.blocks], dtype=np.float64),
        activation_bytes=np.asarray([block.activation_bytes for block in measured], dtype=np.float64),
        output_bytes=np.asarray([block.output_bytes for block in measured], dtype=np.float64),
    )


def _machines(problem: PlanningProblem) -> list[Machines]:
    """By level: its units in the whole cluster, joined by links as fast as the fastest from that level on."""
    levels, known = problem.cluster.levels, law(problem)
    held = HeldBytes(fixed=known.fixed[:2], each=known.each[:2], limit_bytes=known.limit_bytes)
    return [
        Machines(
            units=prod(outer.size for outer in levels[index:]),
            inside=prod(inner.size for inner in levels[:index]),
            bandwidth_bytes_per_s=max(outer.bandwidth_bytes_per_s for outer in levels[index:]),
            exchange=FACTORS[synchronisation(problem)],
            straight=problem.options.straight and index == 0,
            held=held if index == 0 else None,
        )
        for index in range(len(levels))
    ]


def _certificate(problem: PlanningProblem, found: Partition, proven: Bound) -> Certificate:
    if proven.refuted_s == 0:
        claim = f"All {problem.cluster.devices} devices sharing all compute take the bound; no plan is below that."
    else:
        unit = "devices" if proven.units == problem.cluster.devices else "units of an outer level"
        needs = (
            f"needs at least {proven.needed:g} {unit} (the second)"
            if proven.needed < inf
            else "does not fit any number of them"
        )
        claim = (
            f"Over all cuts of the graph, also those that were not listed: within {proven.refuted_s:.6g} s (the first "
            f"number of the witness) a plan {needs}; there are {proven.units} {unit}."
        )
    return Certificate(
        method="cut and refine",
        quantity=QUANTITY,
        value=found.cost_s,
        bound=proven.seconds,
        claim=claim,
        witness=tuple(number for number in (proven.refuted_s, proven.needed) if 0 < number < inf),
    )


class _Cut:
    """A graph's cuts, those of a plan and possible ones."""

    def __init__(self, *, blocks: Blocks, machines: Sequence[Machines]) -> None:
        self._blocks = blocks
        self._machines = machines
        self._needed, self._dependent = closures(blocks.graph)
        self._sides = Sides(blocks)

    def bound(self, cuts: CutStates, found: Partition) -> tuple[Bound, tuple[int, ...]]:
        """The bound over all cuts, and cuts of few bytes."""
        proven = compute_bound(self._blocks, self._machines[0].units, found.cost_s)
        cheap: tuple[int, ...] = ()
        for machines in self._machines:
            if machines.units > 1 and found.cost_s > proven.seconds * (1 + NEAR):
                limit_bytes = found.cost_s * machines.bandwidth_bytes_per_s / 2
                places_s = np.unique(cuts.states.compute_s[cuts.states.boundary_bytes <= limit_bytes])
                windows = windows_of(self._blocks, self._sides, limit_bytes, places_s)
                proven = max(proven, bound(windows, machines, found.cost_s), key=lambda known: known.seconds)
                cheap = (*cheap, *windows.cheap)
        return proven, cheap

    def around(self, cuts: CutStates, found: Partition, cheap: Sequence[int], most: int) -> list[int]:
        """The next cuts to solve, by size: the plan's own and others, at most `most`."""
        own = [cuts.cut(share.stop) for share in found.shares]
        chosen = dict.fromkeys((0, *own))
        allowed = np.flatnonzero(cuts.states.boundary_bytes <= self._limit_bytes(found)).tolist()
        room = most // 3
        for few in (cheap, [cuts.cut(state) for state in evenly(allowed, room)]):
            chosen |= dict.fromkeys(evenly(few, room))
        room = (most - len(chosen)) // max(len(own) - 1, 1)
        for cut in own[:-1]:
            chosen |= dict.fromkeys(self._moved(cut, self._limit_bytes(found), room // 2))
            chosen |= dict.fromkeys(self._stepped(cut, room // 2))
        return sorted(chosen, key=lambda cut: (cut.bit_count(), cut))

    def _limit_bytes(self, found: Partition) -> float:
        """The bytes that can cross a cut within the time of the plan."""
        return found.cost_s * self._machines[0].bandwidth_bytes_per_s / 2

    def _moved(self, cut: int, limit_bytes: float, room: int) -> list[int]:
        """The cuts that differ by one block and its dependents; those that move the least compute first."""
        moved = [
            cut & ~self._dependent[block] if cut >> block & 1 else cut | self._needed[block]
            for block in range(len(self._blocks.graph))
        ]
        moved = list(dict.fromkeys(moved))
        inside = membership(moved, len(self._blocks.graph))
        seconds = inside @ self._blocks.compute_s
        before_s = float(membership([cut], len(self._blocks.graph))[0] @ self._blocks.compute_s)
        crossing = crossing_by_cut(self._blocks.graph, inside, self._blocks.output_bytes)
        nearest = np.argsort(np.abs(seconds - before_s), kind="stable")
        return [moved[index] for index in nearest.tolist() if crossing[index] <= limit_bytes][:room]

    def _stepped(self, cut: int, room: int) -> list[int]:
        """The cuts that differ by one block, then those by two, and so on."""
        blocks = range(len(self._blocks.graph))
        room = min(room, STEPS_AT_MOST // len(blocks))
        found = {cut: None}
        queue = deque([cut])
        while queue and len(found) <= room:
            here = queue.popleft()
            for block in blocks:
                own = 1 << block
                ahead = self._dependent[block] & here if here & own else self._needed[block] & ~here
                if ahead == own and here ^ own not in found:
                    found[here ^ own] = None
                    queue.append(here ^ own)
        return list(found)[:room]
