"""Cut and refine: a plan of a graph with more cuts than can be listed, and how far from the optimum it is at most.

1. The cuts of one order of the blocks (`graph.line_of`) are solved as any states are.
2. A bound over all cuts of the graph says how much better a plan could be (`graph_bound`).
3. Unless that is next to nothing, cuts are added: those of few bytes that the bound came across, and around each cut
   of the plan those that differ by a few blocks, or by one that moves to the other side with all that has to follow.
   The states are solved again, as long as that helps, `ROUNDS` times at most.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner_service.core.graph import closures, crossing_by_cut, graph_of, membership
from planner_service.core.plan import Certificate
from planner_service.core.planner.graph_bound import (
    BLOCKS_AT_MOST,
    Blocks,
    Bound,
    Machines,
    Sides,
    bound,
    compute_bound,
    windows_of,
)
from planner_service.core.planner.graph_states import CutStates, evenly, exactly_summed, states_of
from planner_service.core.planner.partition import Partition, partition
from planner_service.core.planner.pipedream_certificate import QUANTITY
from planner_service.core.planner.pipedream_terms import FACTORS, search, synchronisation
from planner_service.core.planner.problem import Problem

ROUNDS = 4
"""How often cuts are added."""

CUTS_AT_MOST = 1200
"""States that are solved at once after the first time."""

STEPS_AT_MOST = 100_000
"""Blocks that are looked at for the cuts next to one of a plan: a few hundredths of a second."""

NEAR = 1e-3
"""A gap that is not worth another round."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Refined:
    """The best partition, the states that it is of, and what is proven of it."""

    cuts: CutStates
    found: Partition
    certificate: Certificate


def refine(problem: Problem, microbatch_size: int, cuts: CutStates, found: Partition) -> Refined:
    """Improves on a partition of some cuts of a graph, and proves how much better another could be.

    Deterministic: effort is counted, not timed. The bound holds for all cuts, whether or not a stage fits its device.
    """
    blocks = _blocks(problem, microbatch_size)
    machines = _machines(problem)
    if len(blocks.graph) > BLOCKS_AT_MOST:
        proven = compute_bound(blocks, machines, found.cost_s)
        return Refined(cuts=cuts, found=found, certificate=_certificate(problem, found, proven))
    cut = _Cut(blocks=blocks, machines=machines)
    proven, cheap = cut.bound(cuts, found)
    for _ in range(ROUNDS):
        if found.cost_s <= proven.seconds * (1 + NEAR):
            break
        listed = cut.around(cuts, found, cheap)
        more = states_of(problem.profile, blocks.graph, problem.profile.at(microbatch_size), listed, complete=False)
        better = partition(search(problem, more.states))
        if better is None or better.cost_s >= found.cost_s * (1 - NEAR):
            break
        cuts, found = more, better
        proven, cheap = cut.bound(cuts, found)
    return Refined(cuts=cuts, found=found, certificate=_certificate(problem, found, proven))


def _blocks(problem: Problem, microbatch_size: int) -> Blocks:
    profile = problem.profile
    measured = profile.at(microbatch_size)
    return Blocks(
        graph=graph_of(len(measured), profile.edges or ()),
        compute_s=exactly_summed(np.asarray([block.compute_s for block in measured], dtype=np.float64)),
        weight_bytes=np.asarray([block.weight_bytes for block in profile.blocks], dtype=np.float64),
        output_bytes=np.asarray([block.output_bytes for block in measured], dtype=np.float64),
    )


def _machines(problem: Problem) -> Machines:
    """All devices, behind links as fast as the fastest."""
    cluster = problem.cluster
    return Machines(
        devices=cluster.devices,
        bandwidth_bytes_per_s=max(level.bandwidth_bytes_per_s for level in cluster.levels),
        exchange=FACTORS[synchronisation(problem)],
        straight=problem.options.straight,
    )


def _certificate(problem: Problem, found: Partition, proven: Bound) -> Certificate:
    devices = problem.cluster.devices
    if proven.refuted_s == 0:
        claim = f"All {devices} devices sharing all compute take the bound; no plan is below that."
    else:
        claim = (
            f"Over all cuts of the graph, also those that were not listed: within {proven.refuted_s:.6g} s (the first "
            f"number of the witness) a plan needs at least {proven.devices:g} devices (the second), and there are "
            f"{devices}."
        )
    return Certificate(
        method="cut and refine",
        quantity=QUANTITY,
        value=found.cost_s,
        bound=proven.seconds,
        claim=claim,
        witness=(proven.refuted_s, proven.devices) if proven.refuted_s > 0 else (),
    )


class _Cut:
    """Where a graph is cut, and where it could be."""

    def __init__(self, *, blocks: Blocks, machines: Machines) -> None:
        self._blocks = blocks
        self._machines = machines
        self._needed, self._dependent = closures(blocks.graph)
        self._sides = Sides(blocks)

    def bound(self, cuts: CutStates, found: Partition) -> tuple[Bound, tuple[int, ...]]:
        """What is proven over all cuts, and cuts of few bytes."""
        proven = compute_bound(self._blocks, self._machines, found.cost_s)
        if found.cost_s <= proven.seconds * (1 + NEAR):
            return proven, ()
        limit_bytes = self._limit_bytes(found)
        places_s = np.unique(cuts.states.compute_s[cuts.states.boundary_bytes <= limit_bytes])
        windows = windows_of(self._blocks, self._sides, limit_bytes, places_s)
        return bound(windows, self._machines, found.cost_s), windows.cheap

    def around(self, cuts: CutStates, found: Partition, cheap: Sequence[int]) -> list[int]:
        """Cuts to be solved next, by size: the plan's own, and so many of the others as there is room for."""
        own = [cuts.cut(share.stop) for share in found.shares]
        chosen = dict.fromkeys((0, *own))
        allowed = np.flatnonzero(cuts.states.boundary_bytes <= self._limit_bytes(found)).tolist()
        room = CUTS_AT_MOST // 3
        for few in (cheap, [cuts.cut(state) for state in evenly(allowed, room)]):
            chosen |= dict.fromkeys(evenly(few, room))
        room = (CUTS_AT_MOST - len(chosen)) // max(len(own) - 1, 1)
        for cut in own[:-1]:
            chosen |= dict.fromkeys(self._moved(cut, self._limit_bytes(found), room // 2))
            chosen |= dict.fromkeys(self._stepped(cut, room // 2))
        return sorted(chosen, key=lambda cut: (cut.bit_count(), cut))

    def _limit_bytes(self, found: Partition) -> float:
        """What crosses a cut within the time of the plan."""
        return found.cost_s * self._machines.bandwidth_bytes_per_s / 2

    def _moved(self, cut: int, limit_bytes: float, room: int) -> list[int]:
        """The cuts that differ by one block and what has to follow, those of the least compute that moves first."""
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
        """The cuts that differ by one block, then by two, and so on."""
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
