"""The fewest stages of a pipeline: what is ruled out by them has no split."""

from itertools import accumulate, pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from pipeplan.documents.cluster import Cluster
from pipeplan.planners.chain import profiled
from pipeplan.planners.problem import ACCOUNTINGS, Options, PlanningProblem
from pipeplan.planners.two_bw.candidate import Evaluator
from pipeplan.planners.two_bw.fewest import FewestStages
from pipeplan.planners.two_bw.terms import PipelineShape
from pipeplan.schedules.registry import schedule_named
from tests.pipeplan.builders import Cell, cells, cluster, clusters, profile
from tests.pipeplan.planners.every_partition import compositions
from tests.properties import examples


@examples(200)
@given(
    st.lists(cells(), min_size=2, max_size=6),
    clusters(6),
    st.sampled_from(["pipedream-2bw", "1f1b", "gpipe"]),
    st.sampled_from([None, True, False]),
    st.sampled_from(ACCOUNTINGS),
    st.data(),
)
def test_what_has_a_split_is_possible_in_its_time_and_not_in_less_than_its_stages_compute(
    blocks: list[Cell], machines: Cluster, schedule: str, recompute: bool | None, memory: str, data: st.DataObject
) -> None:
    problem = PlanningProblem(
        profile=profile(blocks), cluster=machines, batch_size=8, options=Options(schedule=schedule, memory=memory)
    )
    depth = data.draw(st.integers(1, min(len(blocks), machines.devices)))
    recompute = True if schedule_named(schedule).recomputes else recompute
    shape = PipelineShape(
        schedule=schedule, width=1, depth=depth, microbatch_size=1, microbatches=8, recompute=recompute
    )
    evaluator = Evaluator(problem=problem, measured=profiled(problem))
    found = evaluator.fastest(shape)
    assume(found is not None)
    assert found is not None
    step_s = found.time_per_microbatch_s / shape.slots
    assert evaluator.possible(shape, step_s)
    longest_s = max(block.forward_s + block.backward_s for block in problem.profile.at(1))
    assert not evaluator.possible(shape, longest_s * 0.99)
    assert evaluator.possible(shape, step_s)  # a larger limit is not judged by what a smaller one showed


@given(st.lists(cells(), min_size=1, max_size=7), st.integers(1, 40).map(lambda halves: halves / 2 + 0.1))
def test_with_plenty_of_memory_the_count_is_that_of_all_splits(blocks: list[Cell], limit_s: float) -> None:
    problem = PlanningProblem(profile=profile(blocks), cluster=cluster((8, 1.0), memory_bytes=10**12), batch_size=8)
    evaluator = Evaluator(problem=problem, measured=profiled(problem))
    chain = evaluator.chain(1)
    count = FewestStages(
        problem=problem,
        chain=chain,
        laws=schedule_named("pipedream-2bw"),
        modes=(False,),
        microbatches=8,
        master_weights=False,
    )
    within = [
        len(lengths)
        for depth in range(1, len(blocks) + 1)
        for lengths in compositions(len(blocks), depth)
        if all(
            chain.compute_s[stop] - chain.compute_s[start] <= limit_s
            for start, stop in pairwise([0, *accumulate(lengths)])
        )
    ]
    fewest = min(within, default=float("inf"))
    assert count.within(limit_s, len(blocks)) == fewest
    assert count.within(limit_s, len(blocks) - 1) == (fewest if fewest < len(blocks) else float("inf"))
