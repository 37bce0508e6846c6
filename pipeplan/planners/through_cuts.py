"""Through cuts: an order of a graph for the stages that a plan would have if they could end at any cut.

A plan was made on one order of the blocks, whose places are only some of the graph's cuts. Over all cuts, as sets of
blocks, dynamic programming finds the nested ones between which the slowest stage of as many stages is the fastest:

    V(a, s) = min over cuts b that hold a of max(T_s(a..b), V(b, s + 1))

T_s is stage s's time for a microbatch on the links of the plan: its compute and the transfers at both of its ends (2BW
2021, appendix A.1), or the longer of its compute and the transfers after it where replicas share the minibatches
(PipeDream 2018, section 3.2). The planner runs again on an order through these cuts (`on_chain`).
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.costs.graph import crossing_by_cut, graph_of, ideals, members, membership
from pipeplan.costs.transfer import boundary_bytes, boundary_crossings, ranks_by_stage
from pipeplan.documents.plan import Plan
from pipeplan.planners.problem import CutGraph, PlanningProblem
from pipeplan.schedules.registry import schedule_named

CUTS_AT_MOST = 1000
"""Upper bound on a graph's cuts; lower with many stages: entries are at most `ENTRIES_AT_MOST`."""

ENTRIES_AT_MOST = 3e7
"""Stages times cuts before and cuts after them: some tenths of a second."""

WORTH_IT = 1e-4
"""The relative speed-up of the slowest stage below which no other order is tried."""


def order_through_cuts(graph: CutGraph, plan: Plan) -> tuple[int, ...] | None:
    """An order of the blocks whose places include better cuts for the plan's stages than the plan's own.

    None where there are none, by `WORTH_IT`, where the graph has too many cuts, or where ranks hold several stages, of
    which not the slowest one counts. Blocks of one stage keep their order. Memory and gradient exchanges are ignored.
    """
    problem = graph.problem
    measured = problem.profile.at(plan.microbatch_size)
    joined = graph_of(len(measured), problem.profile.edges or ())
    at_most = min(CUTS_AT_MOST, int((ENTRIES_AT_MOST / plan.depth) ** 0.5))
    cuts = ideals(joined, at_most) if plan.depth > 1 == plan.chunks else None
    if cuts is None:
        return None
    inside = membership(cuts, len(measured))
    output_bytes = np.asarray([block.output_bytes for block in measured], dtype=np.float64)
    crossing = crossing_by_cut(joined, inside, output_bytes)
    number = {cut: index for index, cut in enumerate(cuts)}
    own = [number[sum(1 << block for block in graph.order[:place])] for place in (0, *(s.stop for s in plan.stages))]

    # V by stage, from the last
    own_s, onwards_s = 0.0, np.where(np.arange(len(cuts)) == len(cuts) - 1, 0.0, np.inf)
    choices: list[IntArray] = []
    for here, table in zip(reversed(list(pairwise(own))), _times_s(problem, plan, inside, crossing), strict=True):
        own_s = max(own_s, float(table[here]))
        slowest_s = np.maximum(table, onwards_s)
        choices.insert(0, slowest_s.argmin(axis=1))
        onwards_s = slowest_s.min(axis=1)
    if onwards_s[0] >= own_s * (1 - WORTH_IT):
        return None

    path = [0]
    for choice in choices:
        path.append(int(choice[path[-1]]))
    place = {block: index for index, block in enumerate(graph.order)}
    stages = (members(cuts[stop] & ~cuts[start]) for start, stop in pairwise(path))
    return tuple(block for stage in stages for block in sorted(stage, key=lambda block: place[block]))


def _times_s(problem: PlanningProblem, plan: Plan, inside: FloatArray, crossing: FloatArray) -> Iterator[FloatArray]:
    """T of every stage, the last one first, by the cuts before and after it; infinite where these enclose no block."""
    sizes = inside.sum(axis=1)
    no_stage = np.where((inside @ inside.T == sizes[:, None]) & (sizes[:, None] < sizes), 0.0, np.inf)
    crossed = boundary_crossings(problem.cluster, pairwise(ranks_by_stage(plan.placement)))
    moved_s = [boundary_bytes(1.0) * crossing / link.bandwidth_bytes_per_s for link, _ in crossed]
    ends = list(pairwise([np.zeros(len(sizes)), *moved_s, np.zeros(len(sizes))]))
    shared = schedule_named(plan.schedule).update == "minibatch"
    for stage, (before_s, after_s) in zip(reversed(plan.stages), reversed(ends), strict=True):
        measured = problem.profile_on(stage.device).at(plan.microbatch_size)
        compute_s = [(1 + stage.recompute) * block.forward_s + block.backward_s for block in measured]
        seconds = inside @ np.asarray(compute_s)
        if shared:
            yield np.maximum((seconds - seconds[:, None]) / stage.replicas, after_s) + no_stage
        else:
            yield (seconds + after_s) - (seconds - before_s)[:, None] + no_stage
