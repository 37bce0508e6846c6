"""On a chain: planners that need one, asked about a model that is a graph.

The graph becomes a chain whose blocks are what lies between two places that one tensor crosses (`graph.line_of`). The
stages of the answer are then translated back into places in the graph's order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pipeplan.costs.graph import Line, crossing_bytes, graph_of, line_of, loaded_bytes
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Answer, Plan
from pipeplan.documents.profile import Block, Measurement, Profile
from pipeplan.errors import require
from pipeplan.planners.problem import Planner, PlanningProblem


def on_chain(planner: Planner) -> Planner:
    """A planner of chains, for profiles that are chains or graphs; it answers for a graph in terms of its blocks.

    Raises InvalidInputError for what the planner refuses, for cuts of a graph other than those of the chain, and for
    a forced cut where the chain has none. Profiles of other types of devices are cut at the same places.
    """

    def on_any(problem: PlanningProblem) -> Answer:
        chained = Chained.of(problem)
        answer = planner(chained.problem)
        return chained.back(answer) if isinstance(answer, Plan) else answer

    return on_any


@dataclass(frozen=True, slots=True)
class Chained:
    """A problem whose model is a chain, and the graph's `line` that it was made from; None where it was a chain."""

    problem: PlanningProblem
    line: Line | None
    profile: Profile

    @classmethod
    def of(cls, problem: PlanningProblem) -> "Chained":
        """The problem on a chain. Raises InvalidInputError for cuts that the chain does not have."""
        profile, options = problem.profile, problem.options
        if profile.edges is None:
            return cls(problem, None, profile)
        line = line_of_profile(profile)
        rule = "must be single-tensor for a planner of chains"
        require(options.cuts in (None, "single-tensor"), "cuts", rule, options.cuts)
        places = line.single_tensor
        number = {place: index for index, place in enumerate(places)}
        rule = f"must be places that one tensor crosses, {list(places[1:-1])}"
        for cut in options.forced_cuts:
            require(cut in number, "forced_cuts", rule, cut)
        options = replace(
            options,
            cuts=None,
            forced_cuts=tuple(number[cut] for cut in options.forced_cuts),
            forbidden_cuts=tuple(number[cut] for cut in options.forbidden_cuts if cut in number),
        )
        others = tuple(_chain(other, line) for other in problem.other_profiles)
        chain = replace(problem, profile=_chain(profile, line), other_profiles=others, options=options)
        return cls(chain, line, profile)

    def back(self, plan: Plan) -> Plan:
        """A plan of the chain in terms of the graph's blocks."""
        if self.line is None:
            return plan
        places = self.line.single_tensor
        stages = tuple(replace(each, start=places[each.start], stop=places[each.stop]) for each in plan.stages)
        return replace(plan, stages=stages, order=self.line.order, profile_id=content_id(self.profile))


def chain_of(profile: Profile) -> Profile:
    """The chain of a profile that is a graph."""
    return _chain(profile, line_of_profile(profile))


def line_of_profile(profile: Profile) -> Line:
    """The order of a graph's blocks, with the places that one tensor crosses, at all sizes that were measured."""
    graph = graph_of(len(profile.blocks), profile.edges or ())
    return line_of(graph, [max(m.output_bytes for m in block.measurements) for block in profile.blocks])


def _chain(profile: Profile, line: Line) -> Profile:
    """A block for what lies between two places that one tensor crosses."""
    graph = graph_of(len(profile.blocks), profile.edges or ())
    at = {size: profile.at(size) for size in profile.microbatch_sizes}
    boundaries: dict[int, list[int]] = {}
    for size, measured in at.items():
        crossing = crossing_bytes(graph, line.order, [m.output_bytes for m in measured])
        boundaries[size] = [int(crossing[place]) for place in line.single_tensor]

    blocks = []
    for index, (start, stop) in enumerate(pairwise(line.single_tensor)):
        places = line.order[start:stop]
        measurements = tuple(
            _measurement(
                [measured[place] for place in places],
                input_bytes=boundaries[size][index] if index else loaded_bytes(graph, measured),
                output_bytes=boundaries[size][index + 1],
            )
            for size, measured in at.items()
        )
        inside = [profile.blocks[place] for place in places]
        first, last = inside[0].name, inside[-1].name
        blocks.append(
            Block(
                name=first if len(inside) == 1 else f"{first}..{last}",
                weight_bytes=sum(block.weight_bytes for block in inside),
                measurements=measurements,
            )
        )
    return replace(profile, blocks=tuple(blocks), edges=None)


def _measurement(blocks: Sequence[Measurement], *, input_bytes: int, output_bytes: int) -> Measurement:
    """Blocks as one. Those without a split backward have none together."""
    split = all(block.backward_input_s is not None for block in blocks)
    kept = all(block.weight_gradient_bytes is not None for block in blocks)
    return Measurement(
        microbatch_size=blocks[0].microbatch_size,
        forward_s=sum(block.forward_s for block in blocks),
        backward_s=sum(block.backward_s for block in blocks),
        backward_input_s=sum(block.backward_input_s or 0.0 for block in blocks) if split else None,
        backward_weight_s=sum(block.backward_weight_s or 0.0 for block in blocks) if split else None,
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        activation_bytes=sum(block.activation_bytes for block in blocks),
        workspace_bytes=max(block.workspace_bytes for block in blocks),
        weight_gradient_bytes=sum(block.weight_gradient_bytes or 0 for block in blocks) if kept else None,
    )
