"""Auto: never slower than what it asks, the same every time, and open about what it left out."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import answer_document, dump
from pipeplan.documents.plan import Answer, Infeasible, Plan, Simulated
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError
from pipeplan.planners.auto import ranking
from pipeplan.planners.auto.chunks import CHUNKED, SQUEEZED_BLOCKS, ChunkedSpace
from pipeplan.planners.auto.model import SearchedModel
from pipeplan.planners.auto.planner import played_spaces
from pipeplan.planners.auto.proposals import Proposal, Proposer
from pipeplan.planners.bound import most_samples_per_s
from pipeplan.planners.complete import play
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.planners.verify import verify
from pipeplan.programs.check import check
from pipeplan.programs.instructions import BackwardInput, BackwardWeight
from pipeplan.simulation.predict import predict, program_of
from tests.pipeplan.builders import Cell, cells, cluster, clusters, profile
from tests.properties import examples
from tests.schedules import INTERLEAVED, V_SHAPED

SINGLE = (
    ("pipedream", None),
    ("pipedream-2bw", None),
    ("pipedream-2bw", "1f1b"),
    ("pipedream-2bw", "gpipe"),
    ("pipedream-2bw", "data-parallel"),
    ("gpipe", None),
)


def split(whole: Profile) -> Profile:
    """With p1 and p2 half of the backward each."""
    blocks = tuple(
        replace(
            block,
            measurements=tuple(
                replace(m, backward_input_s=m.backward_s / 2, backward_weight_s=m.backward_s / 2)
                for m in block.measurements
            ),
        )
        for block in whole.blocks
    )
    return replace(whole, blocks=blocks)


def rate(plan: Plan) -> float:
    return plan.simulated.throughput_samples_per_s if plan.simulated else plan.closed_form.throughput_samples_per_s


def transformer(*, memory_bytes: int = 3_000, latency_s: float = 0.01, blocks: int = 8) -> PlanningProblem:
    """Equal blocks on two servers of four, whose network is the bottleneck."""
    cell = Cell(forward_s=1.0, backward_s=2.0, weight_bytes=100, output_bytes=10, activation_bytes=50)
    return PlanningProblem(
        profile=profile([cell] * blocks),
        cluster=cluster((4, 400.0), (2, 40.0), memory_bytes=memory_bytes, latency_s=latency_s),
        batch_size=16,
    )


def fits_the_batch(plan: Plan, problem: PlanningProblem) -> bool:
    return max(plan.replicas) * plan.microbatch_size <= problem.batch_size


def single_answers(problem: PlanningProblem) -> list[Answer]:
    answers: list[Answer] = []
    for planner, schedule in SINGLE:
        try:
            answers.append(solve(planner, replace(problem, options=replace(problem.options, schedule=schedule))))
        except InvalidInputError:
            continue
    return answers


@examples(40)
@given(
    blocks=st.lists(cells(), min_size=1, max_size=5),
    machines=clusters(6),
    batch_size=st.sampled_from([1, 4, 6, 12]),
    latency_s=st.sampled_from([0.0, 0.5]),
)
@example(  # the closed form's partition has more replicas than the batch has samples; one move leads to the fastest
    blocks=[Cell(backward_s=seconds, weight_bytes=size) for seconds, size in ((1, 3), (1, 0), (4, 0), (1, 0), (1, 0))],
    machines=cluster((3, 0.5), (2, 8.0)),
    batch_size=4,
    latency_s=0.0,
)
def test_the_answer_is_never_slower_when_played_than_any_planners(
    blocks: Sequence[Cell], machines: Cluster, batch_size: int, latency_s: float
) -> None:
    levels = tuple(replace(level, latency_s=latency_s) for level in machines.levels)
    problem = PlanningProblem(profile=profile(blocks), cluster=replace(machines, levels=levels), batch_size=batch_size)
    best, answers = solve("auto", problem), single_answers(problem)
    plans = [a for a in answers if isinstance(a, Plan) and fits_the_batch(a, problem)]
    assert isinstance(best, Plan) or not plans  # PipeDream on some of the devices may be the only one that fits
    if isinstance(best, Plan):
        assert best.planner == "auto"
        # A short play without a flush may read a little more than any long one: none exceeds its bound.
        fastest = max((min(rate(plan), most_samples_per_s(plan)) for plan in plans), default=0.0)
        assert rate(best) >= fastest * (1 - 1e-6)
        assert best.pareto[0].throughput_samples_per_s == rate(best)
        check(program_of(best, batches=2))


@pytest.mark.parametrize("memory_bytes", [600, 3_000, 10**9])
def test_the_same_problem_gives_the_same_bytes(memory_bytes: int) -> None:
    problem = transformer(memory_bytes=memory_bytes)
    documents = [dump(answer_document(solve("auto", problem))) for _ in range(2)]
    assert documents[0] == documents[1]


def test_every_loser_says_why() -> None:
    plan = solve("auto", transformer())
    assert isinstance(plan, Plan)
    assert plan.alternatives
    for other in plan.alternatives:
        assert other.reason
        if other.throughput_samples_per_s is not None:
            assert other.throughput_samples_per_s <= rate(plan)
            assert other.reason.startswith(("slower when played", "as fast when played", "too long"))


def test_plans_that_differ_in_stages_or_places_only_are_one_loser() -> None:
    uneven = random.Random(0)
    blocks = [
        Cell(
            forward_s=uneven.uniform(0.5, 3),
            backward_s=uneven.uniform(1, 6),
            weight_bytes=uneven.randrange(50, 500),
            output_bytes=uneven.randrange(1, 60),
            activation_bytes=50,
        )
        for _ in range(10)
    ]
    machines = cluster((4, 400.0), (2, 40.0), memory_bytes=10**9, latency_s=0.1)
    plan = solve("auto", PlanningProblem(profile=profile(blocks), cluster=machines, batch_size=32))
    assert isinstance(plan, Plan)
    played = [other for other in plan.alternatives if other.throughput_samples_per_s is not None]
    kinds = [
        (o.schedule, o.depth, o.width, o.microbatch_size, o.recompute, o.chunks, "2BP" in o.reason) for o in played
    ]
    assert len(played) > 2
    assert len(set(kinds)) == len(kinds)


def test_the_front_is_that_of_all_that_fit() -> None:
    plan = solve("auto", transformer())
    assert isinstance(plan, Plan)
    points = [(rate(plan), max(stage.memory_bytes for stage in plan.stages))]
    points += [
        (other.throughput_samples_per_s, other.memory_bytes or 0)
        for other in plan.alternatives
        if other.throughput_samples_per_s is not None
    ]
    unbeaten = {p for p in points if not any(o[0] >= p[0] and o[1] <= p[1] and o != p for o in points)}
    assert {(other.throughput_samples_per_s, other.memory_bytes) for other in plan.pareto} == unbeaten


def test_more_memory_is_never_slower() -> None:
    rates = []
    for memory_bytes in (400, 600, 900, 1_500, 3_000, 10_000):
        answer = solve("auto", transformer(memory_bytes=memory_bytes))
        rates.append(rate(answer) if isinstance(answer, Plan) else 0.0)
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_more_devices_are_never_slower() -> None:
    rates = []
    for devices in range(1, 9):
        problem = replace(transformer(), cluster=cluster((devices, 400.0), memory_bytes=3_000))
        answer = solve("auto", problem)
        rates.append(rate(answer) if isinstance(answer, Plan) else 0.0)
    assert rates == sorted(rates)


def test_planners_that_cannot_respect_an_option_are_left_out_with_a_line() -> None:
    problem = replace(transformer(), options=Options(synchronisation="all-reduce"))
    plan = solve("auto", problem)
    assert isinstance(plan, Plan)
    assert plan.cost_model.startswith("pipedream: ")
    assert plan.cost_model.endswith("/all-reduce")
    left_out = [other.reason for other in plan.alternatives if other.depth == 0]
    assert any(
        reason.startswith("gpipe is left out: synchronisation: is not an option of the planner gpipe")
        for reason in left_out
    )


def test_a_schedule_that_is_asked_for_is_kept() -> None:
    plan = solve("auto", replace(transformer(), options=Options(schedule="1f1b")))
    assert isinstance(plan, Plan)
    assert plan.schedule == "1f1b"
    assert all("left out" not in other.reason for other in plan.alternatives)  # who names a schedule knows that


def test_what_no_planner_can_be_asked_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="microbatch_size"):
        solve("auto", replace(transformer(), options=Options(microbatch_size=3)))


def test_nothing_fits_is_an_answer_with_the_nearest_miss_first() -> None:
    answer = solve("auto", transformer(memory_bytes=10))
    assert isinstance(answer, Infeasible)
    assert answer.planner == "auto"
    missing = [reason.missing_bytes for reason in answer.reasons if reason.missing_bytes is not None]
    assert missing == sorted(missing)
    assert ":" in answer.reasons[0].detail


def test_2bp_is_chosen_where_its_play_is_faster_unless_it_is_turned_off() -> None:
    problem = replace(
        transformer(memory_bytes=10**9), cluster=cluster((4, 1e6)), options=Options(schedule="1f1b", stages=4)
    )
    problem = replace(problem, profile=split(problem.profile))
    plan = solve("auto", problem)
    assert isinstance(plan, Plan)
    assert plan.split_backward
    fused = solve("auto", replace(problem, options=replace(problem.options, split_backward=False)))
    assert isinstance(fused, Plan)
    assert not fused.split_backward
    assert not any("2BP" in other.reason for other in fused.alternatives)
    assert rate(plan) > rate(fused)


def test_the_streams_of_a_plan_with_2bp_are_split_and_what_they_hold_is_in_its_memory() -> None:
    options = Options(schedule="1f1b", stages=4, split_backward=True)
    problem = replace(transformer(memory_bytes=10**9), cluster=cluster((4, 1e6)), options=options)
    plan = solve("auto", replace(problem, profile=split(problem.profile)))
    assert isinstance(plan, Plan)
    program = program_of(plan, batches=2)
    check(program)
    kinds = {type(instruction) for stream in program.streams for instruction in stream.instructions}
    assert {BackwardInput, BackwardWeight} <= kinds
    lanes = predict(plan, batches=2).lanes
    assert all(lane.peak_memory_bytes <= plan.stages[lane.stage].memory_bytes for lane in lanes)


def test_2bps_memory_saving_variant_is_taken_where_2bp_alone_does_not_fit() -> None:
    problem = replace(
        transformer(memory_bytes=10**9), cluster=cluster((4, 1e6)), options=Options(schedule="1f1b", stages=4)
    )
    problem = replace(problem, profile=split(problem.profile))
    fast = solve("auto", problem)
    assert isinstance(fast, Plan)
    assert (fast.split_backward, fast.split_backward_half_way) == (True, False)
    asked = solve("auto", replace(problem, options=replace(problem.options, split_backward_half_way=True)))
    assert isinstance(asked, Plan)
    assert asked.split_backward_half_way
    saving_bytes, most_bytes = (max(stage.memory_bytes for stage in plan.stages) for plan in (asked, fast))
    assert saving_bytes < most_bytes
    small = replace(problem, cluster=cluster((4, 1e6), memory_bytes=most_bytes - 1))
    plan = solve("auto", small)
    assert isinstance(plan, Plan)
    assert (plan.split_backward, plan.split_backward_half_way) == (True, True)
    assert all(stage.memory_bytes < most_bytes for stage in plan.stages)


def test_2bp_is_not_chosen_where_the_halves_take_longer_than_they_fill_of_the_bubble() -> None:
    """As on tiny blocks, where a split backward takes more processor time than a whole one."""
    problem = replace(
        transformer(memory_bytes=10**9), cluster=cluster((4, 1e6)), options=Options(schedule="1f1b", stages=4)
    )
    profile = split(problem.profile)
    blocks = tuple(
        replace(
            block,
            measurements=tuple(
                replace(each, backward_input_s=each.backward_s, backward_weight_s=each.backward_s)
                for each in block.measurements
            ),
        )
        for block in profile.blocks
    )
    plan = solve("auto", replace(problem, profile=replace(profile, blocks=blocks)))
    assert isinstance(plan, Plan)
    assert not plan.split_backward


def test_a_play_with_a_split_backward_ranks_the_same_stages_with_a_whole_one() -> None:
    """The search spent its plays on splits that did not fit, and never ranked the 1F1B plan that it had played."""
    whole = Options(schedule="1f1b", stages=4, split_backward=False)
    problem = replace(transformer(memory_bytes=10**9), cluster=cluster((4, 1e6)), options=whole)
    problem = replace(problem, profile=split(problem.profile))
    fused = solve("auto", problem)
    assert isinstance(fused, Plan)
    most_bytes = max(stage.memory_bytes for stage in fused.stages)
    halves = Proposal(plan=replace(fused, split_backward=True, simulated=None), proposer=Proposer("auto"), order=0)

    for memory_bytes, fits, plays in ((most_bytes, True, 3), (most_bytes - 1, False, 1)):
        found = ranking.Ranking(problem=replace(problem, cluster=cluster((4, 1e6), memory_bytes=memory_bytes)))
        found.add(halves)
        assert [rate(each.plan) for each in found.fitting] == [rate(fused)] * fits
        assert all(each.over for each in found.exceeding)
        assert found.plays == plays


def test_zb_h1_is_chosen_where_its_play_is_fastest_unless_the_user_wants_another_backward() -> None:
    """Two versions of the weights do not fit, so that it is 1F1B or a split of it: a block a stage leaves no chunks."""
    problem = replace(transformer(memory_bytes=10**9, blocks=4), cluster=cluster((4, 1e6)), options=Options(stages=4))
    problem = replace(problem, profile=split(problem.profile))
    roomy = solve("auto", problem)
    assert isinstance(roomy, Plan)
    assert roomy.schedule == "pipedream-2bw"
    most_bytes = max(stage.memory_bytes for stage in roomy.stages)
    problem = replace(problem, cluster=cluster((4, 1e6), memory_bytes=most_bytes - 1))
    plan = solve("auto", problem)
    assert isinstance(plan, Plan)
    assert (plan.schedule, plan.split_backward) == ("zb-h1", False)
    check(program_of(plan, batches=2))
    lanes = predict(plan, batches=3).lanes
    assert all(lane.peak_memory_bytes <= plan.stages[lane.stage].memory_bytes < most_bytes for lane in lanes)
    for other in (Options(stages=4, schedule="1f1b"), Options(stages=4, split_backward=False)):
        without = solve("auto", replace(problem, options=other))
        assert isinstance(without, Plan)
        assert "zb-h1" not in {without.schedule, *(each.schedule for each in without.alternatives)}
        assert rate(without) < rate(plan)


def test_zb_h1_that_is_asked_for_is_the_only_schedule() -> None:
    """It was refused, as a schedule that the planner pipedream-2bw does not know."""
    problem = replace(transformer(memory_bytes=10**9), cluster=cluster((4, 1e6)), options=Options(schedule="zb-h1"))
    problem = replace(problem, profile=split(problem.profile))
    plan = solve("auto", problem)
    assert isinstance(plan, Plan)
    assert plan.schedule == "zb-h1"
    assert {each.schedule for each in plan.alternatives if each.throughput_samples_per_s is not None} <= {"zb-h1"}
    check(program_of(plan, batches=2))
    assert all(finding.holds for finding in verify(plan, problem))
    most_bytes = max(stage.memory_bytes for stage in plan.stages)
    smaller = solve("auto", replace(problem, cluster=cluster((4, 1e6), memory_bytes=most_bytes - 1)))
    assert isinstance(smaller, Infeasible) or smaller.schedule == "zb-h1"
    assert isinstance(solve("auto", replace(problem, cluster=cluster((4, 1e6), memory_bytes=500))), Infeasible)


def test_zb_h1_without_a_split_backward_is_refused() -> None:
    asked = replace(transformer(), options=Options(schedule="zb-h1"))
    with pytest.raises(InvalidInputError, match="schedule: needs a profile with backward_input_s"):
        solve("auto", asked)
    off = replace(asked, profile=split(asked.profile), options=Options(schedule="zb-h1", split_backward=False))
    with pytest.raises(InvalidInputError, match="split_backward: must not be off for zb-h1"):
        solve("auto", off)


def test_auto_refuses_with_the_reason_of_the_planner_that_knows_the_schedule() -> None:
    """It said that the planner pipedream-2bw does not know it."""
    asked = replace(transformer(), options=Options(schedule="pipedream-vertical-sync"))
    with pytest.raises(InvalidInputError, match="straight: must be planned straight"):
        solve("auto", asked)


def test_an_option_that_the_planner_of_the_schedule_does_not_have_is_what_is_refused() -> None:
    problem = replace(transformer(), options=Options(schedule="pipedream", stages=2))
    with pytest.raises(InvalidInputError, match="stages: is not an option of the planner pipedream, got 2"):
        solve("auto", problem)


def test_2bp_of_a_profile_that_was_not_measured_split_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="split_backward: needs a profile with backward_input_s"):
        solve("auto", replace(transformer(), options=Options(split_backward=True)))


FORCED = [
    Options(schedule=schedule, stages=stages, microbatch_size=1)
    for schedule in ("1f1b", "pipedream-2bw", "gpipe")
    for stages in (1, 2, 3, 4)
] + [
    Options(schedule="data-parallel", microbatch_size=1),
    Options(schedule="naive", stages=2, microbatch_size=1),
    Options(schedule=INTERLEAVED, chunks=2),
    Options(schedule=INTERLEAVED, stages=2, chunks=3, microbatch_size=1),
    Options(chunks=2),
]


@examples(25)
@given(
    blocks=st.lists(cells(), min_size=2, max_size=8),
    machines=clusters(8),
    batch_size=st.sampled_from([4, 8]),
    latency_s=st.sampled_from([0.0, 0.1, 2.0]),
    forced=st.sampled_from(FORCED),
    devices=st.integers(1, 8),
)
def test_no_schedule_depth_or_number_of_devices_that_is_forced_plays_faster(
    blocks: Sequence[Cell], machines: Cluster, batch_size: int, latency_s: float, forced: Options, devices: int
) -> None:
    """The devices are the first ones of the cluster, as a plan uses them that leaves others idle."""
    levels = tuple(replace(level, latency_s=latency_s) for level in machines.levels)
    problem = PlanningProblem(profile=profile(blocks), cluster=replace(machines, levels=levels), batch_size=batch_size)
    best = solve("auto", problem)
    try:
        other = solve("auto", replace(problem, options=forced))
    except InvalidInputError:
        return
    if isinstance(other, Plan):
        assert isinstance(best, Plan)
        assert rate(best) >= 0.995 * rate(other)
    first = replace(levels[0], size=min(devices, levels[0].size))
    fewer = solve("auto", replace(problem, cluster=replace(machines, levels=(first,))))
    if isinstance(fewer, Plan):
        assert isinstance(best, Plan)
        assert rate(best) >= 0.995 * rate(fewer)


def in_chunks(**asked: object) -> PlanningProblem:
    """Few microbatches, so that filling and draining takes long."""
    blocks = [Cell(forward_s=1.0, backward_s=2.0, weight_bytes=1000, output_bytes=10)] * 16
    return PlanningProblem(
        profile=profile(blocks),
        cluster=cluster((4, 1e5)),
        batch_size=4,
        options=Options(**asked),  # type: ignore[arg-type]
    )


def test_ranks_with_several_stages_are_searched() -> None:
    """Four microbatches on four ranks: 4 x 12 s, and to fill and drain 36 s with one stage a rank, 9 s with four."""
    rates = {}
    for chunks in (1, 2, 4):
        plan = solve("auto", in_chunks(schedule=INTERLEAVED, stages=4, chunks=chunks))
        assert isinstance(plan, Plan)
        assert (plan.schedule, plan.chunks, plan.depth) == (INTERLEAVED, chunks, 4 * chunks)
        rates[chunks] = rate(plan)
    assert 4 / rates[4] == pytest.approx(57, rel=1e-3)
    assert rates[1] < rates[2] < rates[4]
    free = solve("auto", in_chunks(schedule=INTERLEAVED))
    assert isinstance(free, Plan)
    assert rate(free) >= rates[4] * (1 - 1e-9)


def chunked_space(problem: PlanningProblem, *schedules: str) -> ChunkedSpace:
    """The space of these schedules, or of all whose ranks hold several stages."""
    return ChunkedSpace(model=SearchedModel(problem=problem), schedules=schedules or CHUNKED)


@pytest.mark.parametrize("schedule", sorted(V_SHAPED))
def test_a_schedule_in_a_v_is_kept_and_searched_where_the_backward_was_measured_split(schedule: str) -> None:
    problem = in_chunks(schedule=schedule, stages=2)
    plan = solve("auto", replace(problem, profile=split(problem.profile)))
    assert isinstance(plan, Plan)
    assert (plan.schedule, plan.chunks, plan.depth) == (schedule, 2, 4)
    free = replace(problem, options=Options(stages=2))
    whole, halves = (
        {name for space in played_spaces(each, CHUNKED) if isinstance(space, ChunkedSpace) for name in counted(space)}
        for each in (free, replace(free, profile=split(free.profile)))
    )
    assert schedule not in whole
    assert schedule in halves


def counted(space: ChunkedSpace) -> Sequence[str]:
    """The schedules of which a certificate speaks."""
    return space.schedules if space.counted_on else ()


def test_schedules_in_a_v_are_tried_without_a_measured_split_and_promise_nothing() -> None:
    beside = [each for each in played_spaces(in_chunks(stages=2), CHUNKED) if isinstance(each, ChunkedSpace)][-1]
    assert set(beside.schedules) == V_SHAPED
    assert list(beside.configurations())
    assert (beside.considered, beside.beyond) == (0, 0.0)


def test_stages_that_time_did_not_allow_to_fit_count_as_possible() -> None:
    """Two heavy blocks at the start: equal compute gives the first rank too much, other stages fit."""
    blocks = [Cell(weight_bytes=60)] * 2 + [Cell(weight_bytes=5)] * 10
    problem = PlanningProblem(
        profile=profile(blocks),
        cluster=cluster((2, 1e9), memory_bytes=210),
        batch_size=4,
        options=Options(schedule=INTERLEAVED, stages=2, chunks=2),
    )
    space = chunked_space(problem, INTERLEAVED)
    (family,) = space.families()
    assert list(space.members(family))
    assert (space.squeezed, space.beyond) == (1, 0.0)
    hurried = chunked_space(problem, INTERLEAVED)
    hurried.squeezed = SQUEEZED_BLOCKS
    assert list(hurried.members(family)) == []
    assert hurried.beyond == family.most


def test_chunks_that_no_schedule_takes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="must be one of 1f1b-interleaved"):
        solve("auto", in_chunks(schedule="1f1b", chunks=2))
    with pytest.raises(InvalidInputError, match="memory"):
        solve("auto", in_chunks(chunks=2, memory="paper"))
    answer = solve("auto", in_chunks(schedule=INTERLEAVED, stages=3, chunks=2))
    assert isinstance(answer, Infeasible)
    assert answer.reasons


def test_one_device_is_the_answer_where_the_way_to_others_is_long() -> None:
    """Eight blocks of 0.2 ms and 40 kB between them on two devices 10 ms apart: one device plays 625 samples/s."""
    cell = Cell(forward_s=0.0002 / 3, backward_s=0.0004 / 3, output_bytes=40_000)
    slow = cluster((2, 1e9), latency_s=0.01)
    plan = solve("auto", PlanningProblem(profile=profile([cell] * 8), cluster=slow, batch_size=8))
    assert isinstance(plan, Plan)
    assert plan.workers == 1
    assert rate(plan) == pytest.approx(625)


def test_replicas_share_servers_with_stages_where_that_is_fastest() -> None:
    """Four stages of four replicas on four servers, by what a server's port sends for a batch of 16 x 4 microbatches.

    Pipelines in the servers: four exchanges of 1.5 x 8,000 bytes. Replicas in the servers: 16 x 4 tensors of 400 bytes,
    each way. Two replicas of two stages: two exchanges of 8,000 bytes, and half of the tensors one way.
    """
    cell = Cell(forward_s=1.0, backward_s=2.0, weight_bytes=4_000, output_bytes=400, activation_bytes=1)
    machines = cluster((4, 1e6), (4, 250.0))
    problem = PlanningProblem(
        profile=profile([cell] * 8),
        cluster=machines,
        batch_size=64,
        options=Options(schedule="pipedream-2bw", stages=4),
    )
    plan = solve("auto", problem)
    assert isinstance(plan, Plan)
    served = [
        {(worker.stage, worker.replica) for worker in plan.placement[first : first + 4]} for first in (0, 4, 8, 12)
    ]
    assert {(len({s for s, _ in each}), len({r for _, r in each})) for each in served} == {(2, 2)}
    assert plan.certificate is not None
    assert plan.certificate.gap < 0.05


def test_what_is_too_long_to_be_played_is_no_answer_and_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of the best depth cannot be played: others are the answer, and the gap covers what is not known of them."""
    problem = replace(transformer(memory_bytes=10**9), options=Options(microbatch_size=1))
    whole = solve("auto", problem)
    assert isinstance(whole, Plan)
    depth = whole.depth

    def too_long(plan: Plan, *, instructions: int, needed: float = 0.0) -> Simulated | None:
        return None if plan.depth == depth else play(plan, instructions=instructions, needed=needed)

    monkeypatch.setattr(ranking, "play", too_long)
    plan = solve("auto", problem)
    assert isinstance(plan, Plan)
    assert plan.simulated is not None
    assert plan.depth != depth
    assert plan.certificate is not None
    assert 1 / plan.certificate.bound >= rate(whole)


def test_more_stages_a_rank_than_blocks_are_not_called_a_lack_of_memory() -> None:
    options = Options(schedule="1f1b-interleaved", stages=2, chunks=3)
    problem = PlanningProblem(profile=profile([Cell()] * 4), cluster=cluster((2, 1.0)), batch_size=4, options=options)
    answer = solve("auto", problem)
    assert isinstance(answer, Infeasible)
    assert answer.reasons[0].rule.startswith("every stage must have a block, every rank a device")


def test_options_that_no_planner_takes_together_are_named_with_every_planners_reason() -> None:
    """It said that the planner pipedream-2bw, which nobody had asked for, has no forced cuts."""
    problem = replace(transformer(), options=Options(schedule="naive", forced_cuts=(1,)))
    with pytest.raises(InvalidInputError, match="forced_cuts: is an option that no planner takes together") as raised:
        solve("auto", problem)
    assert "exact: schedule: must be one of pipedream-2bw, 1f1b" in str(raised.value)
