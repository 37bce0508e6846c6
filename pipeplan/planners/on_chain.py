"""On a chain: applies planners that need a chain to a model that is a graph.

The graph's blocks are put in one order. The blocks between two places of the order become a block of the chain, which
receives and forwards everything that crosses there: a stage forwards what it does not read. A stage of the answer is
then [start, stop) in the order. `Options.cuts` chooses the places:

- `any`: all places of the order in which the fewest bytes cross them (`costs.graph_order`): the default, unless the
  chain has more than `blocks_at_most` blocks.
- `single-tensor`: the places that one tensor crosses, of the order that `graph.line_of` gives.

The first order keeps the places of the second, under the same numbers. But a graph with branches has more cuts than an
order has places. So with `any` the planner runs again on an order through better cuts for its answer, if there are any
(`through_cuts`). The answer that is faster by its closed form is kept.

The guarantee: the planner's own guarantee holds among the places of its order. For pipedream-2bw and exact, no other
cuts of the graph make the slowest stage of the answer's shape faster by more than 1e-4, if the graph has few cuts
(`through_cuts`) and neither memory nor gradient exchanges decide where stages end. Nothing is proven about other
shapes on other orders, nor about gpipe, which minimises the variance.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from pipeplan.costs.graph import crossing_bytes, graph_of, line_of, loaded_bytes
from pipeplan.costs.graph_order import least_order
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import Answer, Plan
from pipeplan.documents.profile import Block, Profile
from pipeplan.documents.tied import TiedWeights
from pipeplan.errors import InvalidInputError, require
from pipeplan.planners.problem import MAX_BLOCKS, CutGraph, Planner, PlanningProblem
from pipeplan.planners.through_cuts import order_through_cuts


def on_chain(planner: Planner, *, blocks_at_most: int = MAX_BLOCKS) -> Planner:
    """A planner of chains, for profiles that are chains or graphs; it answers for a graph in terms of its blocks.

    A graph of more blocks than `blocks_at_most` is cut where one tensor crosses unless `cuts` is set. With forced or
    forbidden cuts, which are places of the first order, no other order is tried. A time limit counts for each order.
    Raises InvalidInputError for what the planner refuses, and for a forced cut that is no place of the chain.
    """

    def on_any(problem: PlanningProblem) -> Answer:
        chain = chained(problem, blocks_at_most=blocks_at_most)
        answer = planner(chain)
        if not isinstance(answer, Plan) or not may_be_reordered(chain):
            return answer
        order = better_order(chain, answer)
        if order is None:
            return answer
        try:
            other = planner(reordered(chain, order))
        except InvalidInputError:  # a solver whose time was up before it had a plan
            return answer
        return max(answer, other, key=_rate) if isinstance(other, Plan) else answer

    return on_any


def _rate(plan: Plan) -> float:
    return plan.closed_form.throughput_samples_per_s


def may_be_reordered(chain: PlanningProblem) -> bool:
    """Whether the chain is of a graph that may be cut anywhere. Forced and forbidden cuts are places of one order."""
    graph, options = chain.graph, chain.options
    if graph is None or options.forced_cuts or options.forbidden_cuts:
        return False
    return graph.problem.options.cuts != "single-tensor" and len(graph.places) > len(graph.order)


def better_order(chain: PlanningProblem, plan: Plan) -> tuple[int, ...] | None:
    """An order of the graph's blocks with better cuts for the stages of a plan of it; None where there is none."""
    if chain.graph is None:
        return None
    own = plan.order or tuple(range(len(chain.graph.order)))
    return order_through_cuts(replace(chain.graph, order=own), plan)


def reordered(chain: PlanningProblem, order: Sequence[int]) -> PlanningProblem:
    """The problem on the chain of another order of its graph, which may be cut between all of its blocks."""
    if chain.graph is None:
        return chain
    return _on_graph(chain, replace(chain.graph, order=order))


def chained(problem: PlanningProblem, *, blocks_at_most: int = MAX_BLOCKS) -> PlanningProblem:
    """The problem on the chain of the first order, whose plans are those of the graph (`complete`).

    A problem whose model is a chain is unchanged. Raises InvalidInputError for cuts that the chain does not have.
    """
    profile, options = problem.profile, problem.options
    if profile.edges is None:
        return problem
    few = len(profile.blocks) <= blocks_at_most
    order, places = _order_and_places(profile, options.cuts or ("any" if few else "single-tensor"))
    number = {place: index for index, place in enumerate(places)}
    last = len(profile.blocks) - 1
    for field in ("forced_cuts", "forbidden_cuts"):
        for cut in getattr(options, field):
            require(1 <= cut <= last, field, f"must be places in the order in which a graph is cut, 1 to {last}", cut)
    for cut in options.forced_cuts:
        rule = f"must be places that one tensor crosses, {list(places[1:-1])}"
        require(cut in number, "forced_cuts", rule, cut)
    options = replace(
        options,
        cuts=None,
        forced_cuts=tuple(number[cut] for cut in options.forced_cuts),
        forbidden_cuts=tuple(number[cut] for cut in options.forbidden_cuts if cut in number),
    )
    return _on_graph(replace(problem, options=options), CutGraph(problem=problem, order=order, places=places))


def chains(problem: PlanningProblem, *, blocks_at_most: int = MAX_BLOCKS) -> tuple[PlanningProblem, ...]:
    """The problem on all chains whose plans are played: the first order's, and that of single tensors.

    Played transfers between branches take longer than the closed form predicts. With fewer places, the closed form errs
    for fewer stages. Raises InvalidInputError as `chained`.
    """
    first = chained(problem, blocks_at_most=blocks_at_most)
    if first.graph is None or len(first.graph.places) <= len(first.graph.order) or problem.options.forced_cuts:
        return (first,)
    single = replace(problem, options=replace(problem.options, cuts="single-tensor"))
    fewest = problem.options.stages or 1
    second = chained(single)
    return (first, second) if len(second.profile.blocks) >= fewest else (first,)


def _on_graph(problem: PlanningProblem, graph: CutGraph) -> PlanningProblem:
    """The problem with the chains of the graph's profiles: those of all types of devices are cut at the same places."""
    profile, *others = (
        _chain(each, graph.order, graph.places) for each in (graph.problem.profile, *graph.problem.other_profiles)
    )
    return replace(problem, profile=profile, other_profiles=tuple(others), graph=graph)


def chain_of(profile: Profile) -> Profile:
    """The chain of a profile that is a graph: a block for what lies between two places that one tensor crosses."""
    return _chain(profile, *_order_and_places(profile, "single-tensor"))


def _order_and_places(profile: Profile, cuts: str) -> tuple[Sequence[int], Sequence[int]]:
    """The order of a graph's blocks, and the places in it that may be cut, both ends among them.

    The bytes that cross are those of the largest measured size.
    """
    graph = graph_of(len(profile.blocks), profile.edges or ())
    output_bytes = [max(m.output_bytes for m in block.measurements) for block in profile.blocks]
    line = line_of(graph, output_bytes)
    if cuts == "single-tensor":
        return line.order, line.single_tensor
    return least_order(graph, output_bytes, line), range(len(graph) + 1)


def _chain(profile: Profile, order: Sequence[int], places: Sequence[int]) -> Profile:
    """A block for what lies between two places that are cut."""
    graph = graph_of(len(profile.blocks), profile.edges or ())
    at = {size: profile.at(size) for size in profile.microbatch_sizes}
    boundaries: dict[int, list[int]] = {}
    for size, measured in at.items():
        crossing = crossing_bytes(graph, order, [m.output_bytes for m in measured])
        boundaries[size] = [int(crossing[place]) for place in places]

    blocks = []
    for index, (start, stop) in enumerate(pairwise(places)):
        between = order[start:stop]
        measurements = tuple(
            _measurement(
                [measured[place] for place in between],
                input_bytes=boundaries[size][index] if index else loaded_bytes(graph, measured),
                output_bytes=boundaries[size][index + 1],
            )
            for size, measured in at.items()
        )
        inside = [profile.blocks[place] for place in between]
        first, last = inside[0].name, inside[-1].name
        blocks.append(
            Block(
                name=first if len(inside) == 1 else f"{first}..{last}",
                weight_bytes=sum(block.weight_bytes for block in inside),
                update_s=sum(block.update_s for block in inside),
                cast_bytes=sum(block.cast_bytes for block in inside),
                frozen_bytes=sum(block.frozen_bytes for block in inside),
                buffer_bytes=sum(block.buffer_bytes for block in inside),
                measurements=measurements,
            )
        )
    tied, tied_frozen = (_tied(every, order, places) for every in (profile.tied, profile.tied_frozen))
    return replace(profile, blocks=tuple(blocks), edges=None, tied=tied, tied_frozen=tied_frozen)


def _tied(every: Sequence[TiedWeights], order: Sequence[int], places: Sequence[int]) -> tuple[TiedWeights, ...]:
    """The weights among these that several blocks of the chain use."""
    within = {order[at]: index for index, (start, stop) in enumerate(pairwise(places)) for at in range(start, stop)}
    found = []
    for tied in every:
        block = within[tied.block]
        also = tuple(sorted({within[other] for other in tied.also} - {block}))
        if also:
            found.append(TiedWeights(block=block, also=also, weight_bytes=tied.weight_bytes))
    return tuple(found)


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
