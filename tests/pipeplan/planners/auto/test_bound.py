"""The bounds of the search: no play is faster, whatever the problem."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.costs.memory import rank_bytes
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Overheads
from pipeplan.documents.tied import TiedWeights
from pipeplan.errors import InvalidInputError
from pipeplan.planners.auto.chunks import CHUNKED, ChunkedSpace
from pipeplan.planners.auto.model import SearchedModel
from pipeplan.planners.auto.proposals import Proposal, Proposer
from pipeplan.planners.auto.ranking import Ranking
from pipeplan.planners.auto.space import PlayedSpace
from pipeplan.planners.batches import one_pipeline
from pipeplan.planners.bound import _stage_times, least_batch_s, most_samples_per_s, played_turns_s
from pipeplan.planners.complete import complete, play
from pipeplan.planners.pipedream.parts import LevelPart, priced
from pipeplan.planners.pipedream.planner import cut_model, decided
from pipeplan.planners.pipedream.terms import search
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.programs.instructions import Backward, Forward, Update
from pipeplan.schedules.registry import schedule_named
from pipeplan.simulation.predict import predict
from tests.pipeplan.builders import Cell, cells, cluster, clusters, profile
from tests.pipeplan.planners.auto.random_problems import random_problem
from tests.pipeplan.planners.auto.test_auto import split
from tests.properties import examples

ROUNDING = 1 + 1e-6

ALTERNATING = 1.01
"""Without a flush batches may take more and less time in turn, and a window may hold one short one more."""

OVERHEADS = Overheads(
    forward_without_graph=0.8,
    recompute=0.9,
    backward_after_forward=0.7,
    exchange_factor=0.5,
    instruction_s=0.01,
    message_s_per_byte=0.05,
)
"""Of a profile whose stages are faster than its blocks."""


def ties(blocks: Sequence[Cell]) -> st.SearchStrategy[tuple[TiedWeights, ...]]:
    """None; or all of the first block's weights, which the last block uses as well."""
    if len(blocks) == 1 or not blocks[0].weight_bytes:
        return st.just(())
    tied = TiedWeights(block=0, also=(len(blocks) - 1,), weight_bytes=blocks[0].weight_bytes)
    return st.sampled_from([(), (tied,)])


@examples(120)
@given(
    blocks=st.lists(cells(), min_size=1, max_size=6),
    machines=clusters(8),
    batch_size=st.sampled_from([1, 4, 8, 24]),
    latency_s=st.sampled_from([0.0, 0.01, 0.5]),
    recompute=st.sampled_from([None, False, True]),
    is_split=st.booleans(),
    overheads=st.sampled_from([Overheads(), OVERHEADS]),
    data=st.data(),
)
def test_no_play_is_faster_than_its_bounds(
    blocks: Sequence[Cell],
    machines: Cluster,
    batch_size: int,
    latency_s: float,
    recompute: bool | None,
    is_split: bool,
    overheads: Overheads,
    data: st.DataObject,
) -> None:
    levels = tuple(replace(level, latency_s=latency_s) for level in machines.levels)
    model = replace(profile(blocks), overheads=overheads, tied=data.draw(ties(blocks)))
    problem = PlanningProblem(
        profile=split(model) if is_split else model,
        cluster=replace(machines, levels=levels),
        batch_size=batch_size,
        options=Options(recompute=recompute),
    )
    try:
        configurations = list(PlayedSpace(problem=problem).configurations())
    except InvalidInputError:
        return
    places = st.integers(0, max(len(configurations) - 1, 0))
    for place in data.draw(st.lists(places, max_size=min(6, len(configurations)), unique=True)):
        configuration = configurations[place]
        stops = configuration.split()
        fused = None if stops is None else configuration.plan(stops)
        for plan in () if fused is None else Ranking(problem=problem).variants(fused):
            simulated = play(plan, instructions=200_000)
            assert simulated is not None
            rate = simulated.throughput_samples_per_s
            above = ROUNDING if schedule_named(plan.schedule).flushes else ALTERNATING
            assert rate <= most_samples_per_s(plan) * ROUNDING
            assert rate <= configuration.most * above


@examples(120)
@given(
    blocks=st.lists(cells(), min_size=1, max_size=6),
    machines=clusters(8),
    batch_size=st.sampled_from([4, 8, 24]),
    recompute=st.sampled_from([None, False, True]),
    is_split=st.booleans(),
    overheads=st.sampled_from([Overheads(), OVERHEADS]),
    data=st.data(),
)
def test_what_a_needed_rate_leaves_out_plays_no_faster_with_any_stages(
    blocks: Sequence[Cell],
    machines: Cluster,
    batch_size: int,
    recompute: bool | None,
    is_split: bool,
    overheads: Overheads,
    data: st.DataObject,
) -> None:
    model = replace(profile(blocks), overheads=overheads)
    options = Options(recompute=recompute, memory=data.draw(st.sampled_from(["training", "paper"])))
    problem = PlanningProblem(
        profile=split(model) if is_split else model, cluster=machines, batch_size=batch_size, options=options
    )
    space = PlayedSpace(problem=problem)
    configurations = list(space.configurations())
    if not configurations:
        return
    configuration = data.draw(st.sampled_from(configurations))
    every = list(combinations(range(1, len(blocks)), configuration.shape.depth - 1))
    fused = configuration.plan((*data.draw(st.sampled_from(every)), len(blocks)))
    for plan in () if fused is None else Ranking(problem=problem).variants(fused):
        simulated = play(plan, instructions=200_000)
        assert simulated is not None
        rate = simulated.throughput_samples_per_s
        above = ROUNDING if schedule_named(plan.schedule).flushes else ALTERNATING
        same = [each for each in configurations if each.shape == configuration.shape]
        assert max(each.most for each in same) * above >= rate


@examples(120)
@given(
    blocks=st.lists(cells(), min_size=2, max_size=9),
    machines=clusters(8),
    batch_size=st.sampled_from([4, 8, 12, 24]),
    latency_s=st.sampled_from([0.0, 0.01, 0.5]),
    recompute=st.sampled_from([None, False, True]),
    is_split=st.booleans(),
    schedule=st.sampled_from(CHUNKED),
    data=st.data(),
)
def test_no_play_of_ranks_with_several_stages_is_faster_than_its_bounds(
    blocks: Sequence[Cell],
    machines: Cluster,
    batch_size: int,
    latency_s: float,
    recompute: bool | None,
    is_split: bool,
    schedule: str,
    data: st.DataObject,
) -> None:
    levels = tuple(replace(level, latency_s=latency_s) for level in machines.levels)
    model = replace(profile(blocks), tied=data.draw(ties(blocks)))
    problem = PlanningProblem(
        profile=split(model) if is_split else model,
        cluster=replace(machines, levels=levels),
        batch_size=batch_size,
        options=Options(recompute=recompute, schedule=schedule),
    )
    space = ChunkedSpace(model=SearchedModel(problem=problem), schedules=(schedule,))
    families = list(space.families())
    if not families:
        return
    for place in data.draw(st.lists(st.integers(0, len(families) - 1), min_size=1, max_size=4, unique=True)):
        for configuration in space.members(families[place]):
            plan = configuration.plan(configuration.split())
            assert plan is not None
            simulated = play(plan, instructions=200_000)
            assert simulated is not None
            rate = simulated.throughput_samples_per_s
            assert rate <= most_samples_per_s(plan) * ROUNDING
            assert rate <= configuration.most_of(configuration.split()) * ROUNDING
            assert rate <= configuration.most * ROUNDING
            assert rate <= configuration.most_of_any() * ROUNDING
            assert configuration.most <= families[place].most * ROUNDING
            assert max(rank_bytes(plan)) <= machines.device.usable_bytes


@examples(120)
@given(
    blocks=st.lists(cells(), min_size=4, max_size=12),
    machines=clusters(8),
    batch_size=st.sampled_from([4, 8, 12, 24]),
    latency_s=st.sampled_from([0.0, 0.01, 0.5, 5.0]),
    recompute=st.sampled_from([None, False, True]),
    data=st.data(),
)
def test_no_interleaved_batch_is_shorter_than_its_ranks_take_turns(
    blocks: Sequence[Cell],
    machines: Cluster,
    batch_size: int,
    latency_s: float,
    recompute: bool | None,
    data: st.DataObject,
) -> None:
    """A price is cut at the bound: these are the batches of the play itself, on the first stage."""
    levels = tuple(replace(level, latency_s=latency_s) for level in machines.levels)
    problem = PlanningProblem(
        profile=profile(blocks),
        cluster=replace(machines, levels=levels),
        batch_size=batch_size,
        options=Options(recompute=recompute, schedule="1f1b-interleaved"),
    )
    space = ChunkedSpace(model=SearchedModel(problem=problem), schedules=("1f1b-interleaved",))
    families = list(space.families())
    if not families:
        return
    for configuration in space.members(data.draw(st.sampled_from(families))):
        plan = configuration.plan(configuration.split())
        assert plan is not None
        lane = one_pipeline(plan, batches=2).lanes[0]
        for batch in range(2):
            own = [e for e in lane.events() if isinstance(e.instruction, Forward | Backward)]
            own = [e for e in own if e.instruction.chunk == 0 and e.instruction.version == batch]  # type: ignore[union-attr]
            batch_s = own[-1].end_s - own[0].start_s
            assert played_turns_s(plan, _stage_times(plan)) <= batch_s * ROUNDING


def one_server(depth: int, schedule: str, **cell: float) -> Plan:
    """Equal blocks, a stage each, on one server of fast links."""
    blocks = [Cell(forward_s=1.0, backward_s=2.0, output_bytes=1, **cell)] * depth  # type: ignore[arg-type]
    problem = PlanningProblem(profile=profile(blocks), cluster=cluster((depth, 1e9)), batch_size=8)
    space = PlayedSpace(problem=problem, schedules=(schedule,))
    plans = (
        each.plan(each.split() or ())
        for each in space.configurations()
        if (each.shape.depth, each.shape.width) == (depth, 1)
    )
    plan = next(plan for plan in plans if plan is not None)
    return replace(plan, simulated=play(plan))


@pytest.mark.parametrize(("schedule", "batch_s"), [("gpipe", 33.0), ("1f1b", 33.0), ("pipedream-2bw", 24.0)])
def test_the_bound_of_equal_stages_is_what_is_played(schedule: str, batch_s: float) -> None:
    """Eight microbatches of 3 s on four stages: (8 + 3) x 3 s with a flush, 8 x 3 s without."""
    plan = one_server(4, schedule)
    assert plan.simulated is not None
    assert least_batch_s(plan) == pytest.approx(batch_s, rel=1e-6)
    assert 8 / plan.simulated.throughput_samples_per_s == pytest.approx(batch_s, rel=1e-6)


def in_chunks(chunks: int, *, latency_s: float) -> tuple[Plan, float]:
    """Eight equal blocks of 3 s on two ranks, interleaved, and the bound of their configuration with these stages."""
    blocks = [Cell(forward_s=1.0, backward_s=2.0, output_bytes=1)] * 8
    problem = PlanningProblem(
        profile=profile(blocks),
        cluster=cluster((2, 1e9), latency_s=latency_s),
        batch_size=8,
        options=Options(schedule="1f1b-interleaved", stages=2, chunks=chunks),
    )
    space = ChunkedSpace(model=SearchedModel(problem=problem), schedules=("1f1b-interleaved",))
    (configuration,) = (each for family in space.families() for each in space.members(family))
    plan = configuration.plan(configuration.split())
    assert plan is not None
    return plan, configuration.most_of(configuration.split())


@pytest.mark.parametrize(("chunks", "batch_s"), [(1, 108.0), (2, 102.0), (4, 99.0)])
def test_the_bound_of_equal_chunks_is_what_is_played(chunks: int, batch_s: float) -> None:
    """Eight microbatches of 12 s on two ranks of four blocks: 96 s, and 12 s over the chunks to fill and drain."""
    plan, most = in_chunks(chunks, latency_s=0.0)
    simulated = play(plan)
    assert simulated is not None
    assert least_batch_s(plan) == pytest.approx(batch_s, rel=1e-6)
    assert 8 / simulated.throughput_samples_per_s == pytest.approx(batch_s, rel=1e-6)
    assert 8 / most == pytest.approx(batch_s, rel=1e-6)


@pytest.mark.parametrize(("chunks", "hops"), [(2, 3), (4, 7)])
def test_the_hops_between_several_stages_of_a_rank_count_where_the_pipeline_fills_and_drains(
    chunks: int, hops: int
) -> None:
    """No rank has a backward before a microbatch has hopped through all stages, which takes 0.1 s more a hop."""
    plan, _ = in_chunks(chunks, latency_s=0.1)
    simulated = play(plan)
    assert simulated is not None
    batch_s = 96.0 + 12.0 / chunks + 2 * 0.1 * hops
    assert least_batch_s(plan) == pytest.approx(batch_s, rel=1e-6)
    assert least_batch_s(plan) <= 8 / simulated.throughput_samples_per_s * ROUNDING


def test_a_plan_that_is_too_long_to_be_played_stays_so() -> None:
    """Its bound counts among what was not played, however often its turn comes."""
    problem = PlanningProblem(profile=profile([Cell()] * 4), cluster=cluster((4, 1e9)), batch_size=8)
    ranking, plan = Ranking(problem=problem, longest=1), replace(one_server(4, "1f1b"), simulated=None)
    proposal = Proposal(plan=plan, proposer=Proposer("auto"), order=0)
    assert [ranking.add(proposal), ranking.add(proposal)] == [False, False]
    assert ranking.best_rate == 0.0


def test_what_is_left_neither_shortens_a_play_nor_is_remembered() -> None:
    """A batch of 32 microbatches was extrapolated from 8 and 12 where little was left, and was never played again."""
    problem = PlanningProblem(profile=profile([Cell()] * 4), cluster=cluster((4, 1e9)), batch_size=32)
    plan = replace(one_server(4, "1f1b"), simulated=None, microbatches=32, batch_size=32)
    first, other = (
        Proposal(plan=each, proposer=Proposer("auto"), order=0) for each in (plan, replace(plan, microbatches=16))
    )
    ranking = Ranking(problem=problem, left=1_500)
    assert ranking.add(first)
    assert ranking.best is not None and ranking.best.plan.simulated == play(plan)
    assert not ranking.add(other)
    ranking.left = 1_500
    assert ranking.add(other)


def test_a_busy_rank_that_falls_behind_for_two_batches_is_priced_at_its_compute() -> None:
    """The last of four ranks in a V computes for 2.539 s a batch; the first ended its second batch after 2.533 s."""
    _, problem = random_problem(21564)
    space = ChunkedSpace(model=SearchedModel(problem=problem), schedules=("zb-v",))
    configuration = next(
        each
        for family in space.families()
        for each in space.members(family)
        if (each.terms.shape.ranks, each.terms.shape.width, each.terms.shape.microbatch_size) == (4, 1, 1)
    )
    plan = configuration.plan(tuple(range(1, 9)))
    assert plan is not None
    simulated = play(plan)
    assert simulated is not None
    assert 12 / simulated.throughput_samples_per_s == pytest.approx(2.5388, rel=1e-4)


def on_replicas(problem: PlanningProblem, stages: Sequence[tuple[int, int]]) -> Plan:
    """A plan of PipeDream whose stages have so many blocks and replicas."""
    model = cut_model(problem)
    stops = list(accumulate(blocks for blocks, _ in stages))
    parts = tuple(
        LevelPart(start=stop - blocks, stop=stop, units=replicas)
        for stop, (blocks, replicas) in zip(stops, stages, strict=True)
    )
    wanted = search(problem, model.states)
    return complete(problem, decided(model, wanted, priced(wanted, parts)))


def test_the_bound_of_stages_of_unequal_replicas_counts_their_turns() -> None:
    """Stages of 2 s, the last on two devices in 4 s; 3 s there and 3 s back between the first two.

    The first stage has 4 minibatches in flight, the second one 3: a round trip of 10 s between them is that of two.
    """
    blocks = [
        Cell(forward_s=1.0, backward_s=1.0, output_bytes=3),
        Cell(forward_s=1.0, backward_s=1.0, output_bytes=0),
        Cell(forward_s=2.0, backward_s=2.0, output_bytes=0),
    ]
    problem = PlanningProblem(profile=profile(blocks), cluster=cluster((4, 1.0)), batch_size=1)
    plan = on_replicas(problem, [(1, 1), (1, 1), (1, 2)])
    simulated = play(plan)
    assert simulated is not None
    assert most_samples_per_s(plan) == pytest.approx(1 / 5, rel=1e-6)
    assert simulated.throughput_samples_per_s == pytest.approx(1 / 5, rel=1e-6)


@examples(120)
@given(
    stages=st.lists(st.tuples(cells(), st.integers(1, 5)), min_size=1, max_size=5),
    latency_s=st.sampled_from([0.0, 0.01, 0.5]),
    servers=st.sampled_from([1, 2, 4]),
)
def test_no_play_of_stages_of_unequal_replicas_is_faster_than_its_bound(
    stages: Sequence[tuple[Cell, int]], latency_s: float, servers: int
) -> None:
    devices = sum(replicas for _, replicas in stages)
    inside = (devices // servers, 100.0) if devices % servers == 0 else (1, 100.0)
    problem = PlanningProblem(
        profile=profile([cell for cell, _ in stages]),
        cluster=cluster(inside, (devices // inside[0], 10.0), latency_s=latency_s),
        batch_size=1,
    )
    plan = on_replicas(problem, [(1, replicas) for _, replicas in stages])
    simulated = play(plan)
    if simulated is not None:
        assert simulated.throughput_samples_per_s <= most_samples_per_s(plan) * ALTERNATING


def test_a_played_window_may_hold_a_short_batch_more_than_the_bound_allows_in_the_long_run() -> None:
    """Batches take 1.02 and 1 s in turn, and three replicas end them: a window of three times n begins amid a pair."""
    blocks = [Cell(forward_s=0.0, backward_s=1.0, output_bytes=0)] * 4
    problem = PlanningProblem(profile=profile(blocks), cluster=cluster((8, 100.0), latency_s=0.01), batch_size=1)
    plan = on_replicas(problem, [(1, 3), (1, 3), (1, 1), (1, 1)])
    simulated = play(plan)
    assert simulated is not None
    assert most_samples_per_s(plan) == pytest.approx(1 / 1.01, rel=1e-6)
    assert 1 < simulated.throughput_samples_per_s * 1.01 < ALTERNATING
    last = next(lane for lane in predict(plan, batches=400).lanes if lane.stage == 3)
    ends_s = [end_s for one, end_s in zip(last.instructions, last.end_s, strict=True) if isinstance(one, Update)]
    assert (ends_s[-1] - ends_s[-201]) / 200 == pytest.approx(1.01)
