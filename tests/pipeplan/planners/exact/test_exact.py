"""The planner exact against the recurrences on what both express."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.errors import InvalidInputError
from pipeplan.planners.exact.planner import exact
from pipeplan.planners.problem import Options, PlanningProblem, SearchProgress
from tests.pipeplan.builders import PLENTY, Cell, cells, cluster, clusters, profile
from tests.pipeplan.planners.exact.mixed import Gpu, mixed_problem
from tests.pipeplan.planners.on_paper import on_paper
from tests.properties import examples

SIZES = (1, 2)

pipelines = st.builds(
    Options,
    schedule=st.sampled_from(["pipedream-2bw", "1f1b", "gpipe"]),
    memory=st.sampled_from(["training", "paper"]),
    optimizer=st.sampled_from(["sgd", "momentum", "adam"]),
    recompute=st.sampled_from([None, False, True]),
    recompute_factor=st.sampled_from([None, 1.5]),
    stages=st.sampled_from([None, None, 2]),
)
paper_pipedream = st.builds(
    Options,
    schedule=st.just("pipedream"),
    memory=st.sampled_from(["training", "paper"]),
    optimizer=st.sampled_from(["sgd", "adam"]),
    synchronisation=st.sampled_from([None, "parameter-server"]),
    straight=st.booleans(),
    fewer_machines=st.booleans(),
    microbatch_size=st.just(1),
)
chains = st.lists(cells(), min_size=2, max_size=7)
flat = st.builds(
    lambda devices, bandwidth, memory: cluster((devices, bandwidth), memory_bytes=memory),
    st.integers(1, 6),
    st.sampled_from([0.5, 1.0, 2.0, 8.0]),
    st.one_of(st.just(PLENTY), st.integers(10, 120)),
)


def plan_of(problem: PlanningProblem) -> Plan:
    answer = exact(problem)
    assert isinstance(answer, Plan)
    return answer


@examples(250)
@given(chains, clusters(6), st.sampled_from([2, 4, 6, 12]), pipelines)
def test_it_proves_the_optimum_that_two_bws_recurrence_finds(
    blocks: list[Cell], machines: Cluster, batch_size: int, options: Options
) -> None:
    if machines.devices == 1:
        options = replace(options, stages=None)
    if options.schedule == "gpipe" and options.recompute is None:
        options = replace(options, recompute=True)  # 2BW's default for GPipe; exact chooses for each stage
    problem = PlanningProblem(
        profile=profile(blocks, sizes=SIZES), cluster=machines, batch_size=batch_size, options=options
    )
    _same_optimum(problem, "pipedream-2bw")


@examples(250)
@given(chains, flat, paper_pipedream)
def test_it_proves_the_optimum_that_pipedreams_recurrence_finds(
    blocks: list[Cell], machines: Cluster, options: Options
) -> None:
    if machines.devices > len(blocks):
        options = replace(options, straight=False)
    problem = PlanningProblem(profile=profile(blocks), cluster=machines, batch_size=1, options=options)
    asked = replace(problem, options=replace(options, recompute=False))
    _same_optimum(problem, "pipedream", asked)


def _same_optimum(problem: PlanningProblem, recurrence: str, asked: PlanningProblem | None = None) -> None:
    """Both fit or neither does; the rates agree to the precision that is proven, and so do the nearest misses."""
    theirs, ours = on_paper(recurrence, problem), exact(asked or problem)
    assert isinstance(ours, Plan) == isinstance(theirs, Plan)
    if isinstance(ours, Plan) and isinstance(theirs, Plan):
        assert ours.closed_form.throughput_samples_per_s == pytest.approx(
            theirs.closed_form.throughput_samples_per_s, rel=1e-6
        )
        assert ours.certificate is not None
        assert ours.certificate.gap <= 1e-6
        assert all(stage.memory_bytes <= problem.cluster.device.usable_bytes for stage in ours.stages)
    elif isinstance(ours, Infeasible) and isinstance(theirs, Infeasible):
        assert ours.reasons


def test_stages_recompute_only_where_memory_makes_them() -> None:
    # 1F1B of three stages holds 3, 2 and 1 microbatches of 4 bytes: 8 bytes are enough for the last two as they are.
    blocks = [Cell(activation_bytes=4)] * 3
    options = Options(schedule="1f1b", stages=3)
    plan = plan_of(
        PlanningProblem(
            profile=profile(blocks), cluster=cluster((3, 1.0), memory_bytes=8), batch_size=6, options=options
        )
    )
    assert [stage.recompute for stage in plan.stages] == [True, False, False]
    assert [stage.memory_bytes for stage in plan.stages] == [4, 8, 4]
    assert "without recomputation: memory: stage 0 misses 4 B" in [other.reason for other in plan.alternatives]


def test_a_forbidden_cut_keeps_two_blocks_together() -> None:
    """Tied embeddings: whoever forbids every cut between the two has them on one stage."""
    problem = PlanningProblem(
        profile=profile([Cell()] * 4),
        cluster=cluster((2, 1.0)),
        batch_size=8,
        options=Options(schedule="1f1b", stages=2, forbidden_cuts=(2,)),
    )
    plan = plan_of(problem)
    assert [stage.stop for stage in plan.stages] in ([1, 4], [3, 4])
    free = plan_of(replace(problem, options=Options(schedule="1f1b", stages=2)))
    assert [stage.stop for stage in free.stages] == [2, 4]


def test_a_forced_cut_is_made() -> None:
    options = Options(schedule="1f1b", forced_cuts=(1,))
    plan = plan_of(
        PlanningProblem(profile=profile([Cell()] * 4), cluster=cluster((2, 1.0)), batch_size=8, options=options)
    )
    assert [stage.stop for stage in plan.stages] == [1, 4]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (Options(forced_cuts=(1, 2), stages=2), "2 stages are asked for, the forced cuts make at least 3 stages"),
        (Options(forced_cuts=(1, 2, 3)), "the forced cuts make at least 4 stages"),
        (Options(forbidden_cuts=(1, 2, 3), stages=2), "the forbidden ones leave at most 1"),
    ],
)
def test_cuts_that_leave_no_stages_are_the_reason(options: Options, text: str) -> None:
    answer = exact(
        PlanningProblem(profile=profile([Cell()] * 4), cluster=cluster((2, 1.0)), batch_size=8, options=options)
    )
    assert isinstance(answer, Infeasible)
    assert text in answer.reasons[0].detail


def test_the_nearest_miss_names_its_stage_and_bytes() -> None:
    # Two stages of 10 bytes of weights each with 2BW: 2 versions and gradients are 30 bytes, of which 8 are missing.
    options = Options(stages=2)
    machines = cluster((2, 1.0), memory_bytes=22)
    answer = exact(
        PlanningProblem(profile=profile([Cell(weight_bytes=10)] * 2), cluster=machines, batch_size=2, options=options)
    )
    assert isinstance(answer, Infeasible)
    assert (answer.reasons[0].stage, answer.reasons[0].missing_bytes) == (0, 8)


def uneven(blocks: int) -> list[Cell]:
    return [
        Cell(
            forward_s=10.0 + 7 * i % 11,
            backward_s=20.0 + 5 * i % 13,
            weight_bytes=10 + i % 7,
            output_bytes=1 + i % 5,
            activation_bytes=10 + 3 * i % 8,
        )
        for i in range(blocks)
    ]


def test_when_time_is_up_the_best_plan_comes_with_its_gap() -> None:
    options = Options(schedule="pipedream", time_limit_s=0.02)
    gpus = [Gpu(name="fast", count=6), Gpu(name="slow", count=6, slowness=2.0)]
    problem = mixed_problem(uneven(30), gpus, levels=((4, 20.0), (3, 0.5)), batch_size=1, options=options)
    plan = plan_of(problem)
    assert plan.certificate is not None
    assert "within 0.02 deterministic seconds" in plan.certificate.claim
    assert plan.certificate.gap > 1e-6
    proven = plan_of(replace(problem, options=Options(schedule="pipedream"))).certificate
    assert proven is not None and proven.proven
    assert plan.certificate.bound <= proven.value <= plan.certificate.value


def test_time_that_is_up_before_there_is_an_answer_is_not_called_infeasible() -> None:
    options = Options(schedule="pipedream", time_limit_s=1e-6)
    machines = cluster((8, 1.0), memory_bytes=40)
    problem = PlanningProblem(profile=profile(uneven(16)), cluster=machines, batch_size=1, options=options)
    with pytest.raises(InvalidInputError, match="in this time no plan was found, and no proof that none fits"):
        exact(problem)


def test_the_same_problem_gives_the_same_plan_to_the_byte() -> None:
    for limit_s in (0.05, None):
        options = Options(schedule="pipedream", time_limit_s=limit_s)
        machines = cluster((6, 20.0), memory_bytes=900)
        problem = PlanningProblem(profile=profile(uneven(16)), cluster=machines, batch_size=1, options=options)
        assert content_id(exact(problem)) == content_id(exact(problem))


def test_ninety_six_blocks_on_sixteen_stages_are_proven() -> None:
    options = Options(schedule="1f1b", stages=16, time_limit_s=5.0)
    problem = PlanningProblem(profile=profile(uneven(96)), cluster=cluster((16, 10.0)), batch_size=64, options=options)
    certificate = plan_of(problem).certificate
    assert certificate is not None
    assert certificate.gap <= 1e-6


def test_who_watches_sees_the_best_and_the_bound_come_together() -> None:
    seen: list[SearchProgress] = []
    options = Options(schedule="pipedream")
    machines = cluster((4, 20.0))
    plan = exact(
        PlanningProblem(profile=profile(uneven(8)), cluster=machines, batch_size=1, options=options), seen.append
    )
    assert isinstance(plan, Plan)
    assert seen[-1].open_shapes == 0
    assert seen[-1].best_s == pytest.approx(1 / plan.closed_form.throughput_samples_per_s)
    assert seen[-1].bound_s == pytest.approx(seen[-1].best_s, rel=1e-6)
    bests = [progress.best_s for progress in seen if progress.best_s is not None]
    assert bests == sorted(bests, reverse=True)


@pytest.mark.parametrize(
    ("blocks", "machines", "options", "field"),
    [
        (600, cluster((2, 1.0)), Options(), "profile.blocks"),
        (2, cluster((131_072, 1.0)), Options(), "cluster.levels"),
        (2, cluster((128, 1.0)), Options(schedule="pipedream"), "cluster.levels"),
        (2, cluster((2, 1.0)), Options(schedule="naive"), "schedule"),
        (2, cluster((2, 1.0)), Options(forced_cuts=(2,)), "forced_cuts"),
        (2, cluster((2, 1.0)), Options(forbidden_cuts=(9,)), "forbidden_cuts"),
        (2, cluster((2, 1.0)), Options(stages=3), "stages"),
        (2, cluster((2, 1.0)), Options(straight=True), "straight"),
        (2, cluster((2, 1.0)), Options(synchronisation="all-reduce"), "synchronisation"),
        (2, cluster((2, 1.0)), Options(split_backward=True), "split_backward"),
        (2, cluster((2, 1.0)), Options(microbatch_size=3), "microbatch_size"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_its_name(
    blocks: int, machines: Cluster, options: Options, field: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        exact(PlanningProblem(profile=profile([Cell()] * blocks), cluster=machines, batch_size=8, options=options))
    assert caught.value.field == field


def test_blocks_that_take_no_time_are_planned_around() -> None:
    blocks = [Cell(forward_s=0.0, backward_s=0.0), Cell(), Cell(forward_s=0.0, backward_s=0.0)]
    plan = plan_of(
        PlanningProblem(
            profile=profile(blocks), cluster=cluster((2, 1.0)), batch_size=8, options=Options(schedule="pipedream")
        )
    )
    assert plan.closed_form.throughput_samples_per_s == pytest.approx(2 / 3.0)


def test_one_block_on_one_device_is_a_plan() -> None:
    plan = plan_of(PlanningProblem(profile=profile([Cell()]), cluster=cluster((1, 1.0)), batch_size=1))
    assert (plan.depth, plan.width) == (1, 1)
    assert plan.closed_form.throughput_samples_per_s == pytest.approx(1 / 3.0)
