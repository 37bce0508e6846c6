"""The planner exact on ranks that hold several stages: against every partition, and against what its plans play."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.errors import InvalidInputError
from pipeplan.planners.chain import profiled
from pipeplan.planners.complete import play
from pipeplan.planners.exact.planner import exact
from pipeplan.planners.interleaved.even import nearly_even
from pipeplan.planners.interleaved.shape import ChunkedShape
from pipeplan.planners.interleaved.terms import ChunkedTerms
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.planners.two_bw.candidate import Evaluator
from pipeplan.planners.two_bw.placements import orientations
from pipeplan.programs.pipeline import pipeline_of
from pipeplan.schedules.registry import schedule_named
from tests.pipeplan.builders import PLENTY, Cell, cells, cluster, clusters, profile
from tests.properties import examples
from tests.schedules import CHUNKED, INTERLEAVED, V_SHAPED


def problem_of(
    blocks: Sequence[Cell], machines: Cluster, schedule: str, batch_size: int, **asked: object
) -> PlanningProblem:
    options = Options(schedule=schedule, **asked)  # type: ignore[arg-type]
    return PlanningProblem(profile=profile(blocks), cluster=machines, batch_size=batch_size, options=options)


def plan_of(problem: PlanningProblem) -> Plan:
    answer = exact(problem)
    assert isinstance(answer, Plan)
    return answer


def stages_by_rank(plan: Plan) -> list[list[int]]:
    """By rank of a pipeline, from what the runtime says of its chunks."""
    pipeline = replace(pipeline_of(plan, batches=1), v_shaped=schedule_named(plan.schedule).v_shaped)
    return [[pipeline.stage_of(rank, chunk) for chunk in range(plan.chunks)] for rank in range(pipeline.span)]


def rank_bytes(plan: Plan) -> list[int]:
    return [sum(plan.stages[stage].memory_bytes for stage in stages) for stages in stages_by_rank(plan)]


def every_step(problem: PlanningProblem, ranks: int, chunks: int) -> Iterator[float]:
    """The slowest rank of every partition that fits, by its own arithmetic: one pipeline on one level."""
    options, blocks = problem.options, problem.profile.at(1)
    speed = problem.cluster.levels[0].bandwidth_bytes_per_s
    evaluator = Evaluator(problem=problem, measured=profiled(problem))
    shape = ChunkedShape(
        schedule=options.schedule or "",
        ranks=ranks,
        chunks=chunks,
        width=1,
        microbatch_size=1,
        microbatches=problem.batch_size,
        recompute=options.recompute,
    )
    links = orientations(problem.cluster, 1, ranks)[0]
    terms = ChunkedTerms(problem=problem, shape=shape, links=links, chain=evaluator.chain(1))
    depth, count = ranks * chunks, len(blocks)
    for cuts in combinations(range(1, count), depth - 1):
        if not set(options.forced_cuts) <= set(cuts) or set(options.forbidden_cuts) & set(cuts):
            continue
        starts, stops = (0, *cuts), (*cuts, count)
        owner = {stage: rank for rank in range(ranks) for stage in shape.stages_of(rank)}
        slowest_s = 0.0
        for rank in range(ranks):
            ways = [inf]
            for recompute in shape.modes:
                if terms.rank_bytes(rank, stops, recompute=recompute) > problem.cluster.device.usable_bytes:
                    continue
                seconds = 0.0
                for stage in shape.stages_of(rank):
                    for block in blocks[starts[stage] : stops[stage]]:
                        seconds += block.forward_s * (2 if recompute else 1) + block.backward_s
                    if stage > 0 and owner[stage - 1] != rank:
                        seconds += 2 * blocks[starts[stage] - 1].output_bytes / speed
                    if stage < depth - 1 and owner[stage + 1] != rank:
                        seconds += 2 * blocks[stops[stage] - 1].output_bytes / speed
                ways.append(seconds)
            slowest_s = max(slowest_s, min(ways))
        yield slowest_s


@examples(300)
@given(
    blocks=st.lists(cells(), min_size=4, max_size=9),
    schedule=st.sampled_from(sorted(CHUNKED)),
    ranks=st.integers(1, 3),
    chunks=st.integers(1, 3),
    memory_bytes=st.one_of(st.just(PLENTY), st.integers(10, 150)),
    recompute=st.sampled_from([None, False, True]),
    optimizer=st.sampled_from(["sgd", "adam"]),
    data=st.data(),
)
def test_it_proves_the_least_bottleneck_of_every_partition(
    blocks: list[Cell],
    schedule: str,
    ranks: int,
    chunks: int,
    memory_bytes: int,
    recompute: bool | None,
    optimizer: str,
    data: st.DataObject,
) -> None:
    chunks = 2 if schedule in V_SHAPED else chunks
    if ranks * chunks > len(blocks) or not schedule_named(schedule).takes(
        ranks=ranks, chunks=chunks, microbatches=6 * ranks
    ):
        return
    cuts = data.draw(st.lists(st.integers(1, len(blocks) - 1), unique=True, max_size=2))
    forced = data.draw(st.integers(0, len(cuts)))
    problem = problem_of(
        blocks,
        cluster((ranks, 2.0), memory_bytes=memory_bytes),
        schedule,
        6 * ranks,
        stages=ranks,
        chunks=chunks,
        recompute=recompute,
        optimizer=optimizer,
        forced_cuts=tuple(cuts[:forced]),
        forbidden_cuts=tuple(cuts[forced:]),
    )
    least_s = min(every_step(problem, ranks, chunks), default=inf)
    answer = exact(problem)
    assert isinstance(answer, Infeasible) == (least_s == inf)
    if isinstance(answer, Infeasible):
        assert answer.reasons
        return
    assert answer.certificate is not None
    assert answer.certificate.gap <= 1e-7
    idle = schedule_named(schedule).idle_steps(ranks=ranks, chunks=chunks)
    assert answer.closed_form.time_per_microbatch_s == pytest.approx(
        least_s * (6 * ranks + idle) / (6 * ranks), rel=1e-7
    )
    by_rank = [sum(answer.stages[stage].time_s for stage in stages) for stages in stages_by_rank(answer)]
    assert max(by_rank) == pytest.approx(least_s, rel=1e-7)
    assert max(rank_bytes(answer)) <= problem.cluster.device.usable_bytes
    starts = {stage.start for stage in answer.stages}
    assert set(cuts[:forced]) <= starts
    assert not set(cuts[forced:]) & starts


@examples(120)
@given(
    blocks=st.lists(cells(), min_size=4, max_size=8),
    machines=clusters(6),
    schedule=st.sampled_from(sorted(CHUNKED)),
    batch_size=st.sampled_from([4, 8, 12, 24]),
    recompute=st.sampled_from([None, False, True]),
)
def test_a_rank_holds_what_its_stages_say_and_no_more(
    blocks: list[Cell], machines: Cluster, schedule: str, batch_size: int, recompute: bool | None
) -> None:
    answer = exact(problem_of(blocks, machines, schedule, batch_size, recompute=recompute))
    if isinstance(answer, Infeasible):
        return
    simulated = play(answer, instructions=10**6)
    assert simulated is not None
    held = rank_bytes(answer)
    assert max(held) <= machines.device.usable_bytes
    kept = [
        sum(item.total - item.buffers - item.transient for stage in stages if (item := answer.stages[stage].memory))
        for stages in stages_by_rank(answer)
    ]
    gradients = [sum(answer.costs[stage].own_gradient_bytes for stage in stages) for stages in stages_by_rank(answer)]
    for worker, peak_bytes in zip(answer.placement, simulated.peak_memory_bytes, strict=True):
        most_bytes = kept[worker.stage]  # with the gradients of all its stages, which may not be there at the peak
        assert most_bytes - gradients[worker.stage] <= peak_bytes <= most_bytes <= held[worker.stage]


@examples(60)
@given(
    blocks=st.lists(cells(), min_size=4, max_size=7),
    schedule=st.sampled_from(sorted(CHUNKED)),
    memory_bytes=st.one_of(st.just(PLENTY), st.integers(10, 100)),
)
def test_what_is_left_open_is_chosen_as_if_each_was_asked_for(
    blocks: list[Cell], schedule: str, memory_bytes: int
) -> None:
    machines = cluster((2, 2.0), (2, 1.0), memory_bytes=memory_bytes)
    free = exact(problem_of(blocks, machines, schedule, 8))
    rates = [0.0]
    for stages in range(1, 5):
        for chunks in (2,) if schedule in V_SHAPED else range(1, len(blocks) // stages + 1):
            if stages * chunks <= len(blocks):
                asked = exact(problem_of(blocks, machines, schedule, 8, stages=stages, chunks=chunks))
                rates += [] if isinstance(asked, Infeasible) else [asked.closed_form.throughput_samples_per_s]
    found = 0.0 if isinstance(free, Infeasible) else free.closed_form.throughput_samples_per_s
    assert found == pytest.approx(max(rates), rel=1e-7)


def unequal(count: int) -> list[Cell]:
    """Blocks whose seconds and weights differ by a factor of 10, in an order without any."""
    return [
        Cell(
            forward_s=1.0 + (37 * k * k + 11 * k) % 101 / 11,
            backward_s=2.0 + (53 * k * k + 29 * k) % 97 / 6,
            weight_bytes=10**6 * (1 + (31 * k) % 17),
            output_bytes=1000,
            activation_bytes=10**5 * (1 + (17 * k) % 13),
        )
        for k in range(count)
    ]


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", sorted(CHUNKED))
def test_a_deep_model_on_sixteen_ranks_is_proven(schedule: str) -> None:
    answer = plan_of(problem_of(unequal(96), cluster((16, 1e7)), schedule, 64, stages=16, chunks=2))
    assert answer.certificate is not None
    assert answer.certificate.gap <= 1e-7
    assert (answer.depth, answer.chunks, answer.workers) == (32, 2, 16)
    even_s = sum(cell.forward_s + cell.backward_s for cell in unequal(96)) / 16
    assert max(sum(answer.stages[s].time_s for s in stages) for stages in stages_by_rank(answer)) < 1.1 * even_s


def test_beyond_its_time_it_gives_an_honest_gap() -> None:
    problem = problem_of(unequal(60), cluster((10, 1e7)), INTERLEAVED, 40, stages=10, chunks=3, time_limit_s=0.3)
    answer = plan_of(problem)
    assert answer.certificate is not None
    even_s = sum(cell.forward_s + cell.backward_s for cell in unequal(60)) / 10
    bound_s = even_s * (40 + 9 / 3) / 40
    assert answer.certificate.bound >= bound_s * (1 - 1e-9)
    assert answer.certificate.value == pytest.approx(1 / answer.closed_form.throughput_samples_per_s)
    assert answer.certificate.gap > 0


def test_uneven_chunks_beat_stages_of_equal_numbers_of_blocks() -> None:
    """An output layer as long as four blocks: the last rank's other stage is short."""
    blocks = [Cell()] * 15 + [Cell(forward_s=4.0, backward_s=8.0)]
    answer = plan_of(problem_of(blocks, cluster((4, 1e9)), INTERLEAVED, 8, stages=4, chunks=2))
    by_rank = [sum(answer.stages[s].stop - answer.stages[s].start for s in ranks) for ranks in stages_by_rank(answer)]
    assert by_rank == [5, 5, 4, 2]
    assert "equal numbers of blocks: slower" in answer.alternatives[0].reason


def test_nearly_even_stages_are_no_better_than_the_proven_ones() -> None:
    problem = problem_of(unequal(40), cluster((5, 1e7)), INTERLEAVED, 20, stages=5, chunks=2)
    evaluator = Evaluator(problem=problem, measured=profiled(problem))
    shape = ChunkedShape(schedule=INTERLEAVED, ranks=5, chunks=2, width=1, microbatch_size=1, microbatches=20)
    links = orientations(problem.cluster, 1, 5)[0]
    terms = ChunkedTerms(problem=problem, shape=shape, links=links, chain=evaluator.chain(1))
    stops = nearly_even(terms)
    assert stops is not None
    slowest_s = max(terms.rank_s(rank, stops, recompute=False) for rank in range(5))
    proven_s = shape.step_s(1 / plan_of(problem).closed_form.throughput_samples_per_s)
    assert proven_s * (1 - 1e-9) <= slowest_s <= 1.3 * proven_s


def test_the_nearest_miss_is_named() -> None:
    """Six blocks of 10 bytes and their gradients: a rank of two has 3 x 20, and keeps more."""
    blocks = [Cell(weight_bytes=10)] * 6
    machines = cluster((2, 1.0), memory_bytes=50)
    answer = exact(problem_of(blocks, machines, "zb-v", 8, stages=2, recompute=False))
    assert isinstance(answer, Infeasible)
    nearest = answer.reasons[0]
    assert (nearest.missing_bytes, nearest.stage) == (10, 0)
    assert "2 ranks x 2 chunks" in nearest.detail


@pytest.mark.parametrize(
    ("schedule", "asked", "field"),
    [
        ("zb-v", {"chunks": 3}, "chunks"),
        ("1f1b", {"chunks": 2}, "chunks"),
        (INTERLEAVED, {"stages": 4, "chunks": 3}, "chunks"),
        (INTERLEAVED, {"memory": "paper"}, "memory"),
        (INTERLEAVED, {"straight": True}, "straight"),
    ],
)
def test_it_refuses_what_it_has_no_use_for(schedule: str, asked: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        exact(problem_of([Cell()] * 8, cluster((4, 1.0)), schedule, 8, **asked))
    assert error.value.field == field


def test_a_batch_that_the_ranks_cannot_share_is_infeasible() -> None:
    answer = exact(problem_of([Cell()] * 8, cluster((3, 1.0)), INTERLEAVED, 8, stages=3, chunks=2))
    assert isinstance(answer, Infeasible)
    assert "3 ranks asked for" in answer.reasons[0].detail


def test_replicas_exchange_on_every_chunk() -> None:
    blocks = [Cell(weight_bytes=10)] * 8
    plan = solve("exact", problem_of(blocks, cluster((2, 8.0), (2, 1.0)), INTERLEAVED, 8, stages=2, chunks=2))
    assert isinstance(plan, Plan)
    assert (plan.width, plan.workers, plan.depth) == (2, 4, 4)
    assert plan.simulated is not None
    assert all(own.reduce_s > 0 for own in plan.costs)
