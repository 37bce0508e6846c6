"""The whole space: against every play of small problems, against the papers' planners, and by its certificate."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.engines import engine_named
from pipeplan.documents.forms import FormMeasurement
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError
from pipeplan.planners.auto.ranking import CLOSE
from pipeplan.planners.batches import one_pipeline
from pipeplan.planners.bound import least_batch_s, most_samples_per_s
from pipeplan.planners.complete import play
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.planners.verify import verify
from pipeplan.planners.whole import planner
from pipeplan.planners.whole.budget import WholeBudget
from pipeplan.planners.whole.planner import whole_space
from pipeplan.planners.whole.space import PlacedDegrees
from pipeplan.programs.timeline import batch_ends_s, flushed_batch_s
from tests.pipeplan.model_forms import transformer, with_modules
from tests.properties import examples

GIB = 2**30


def model(*, layers: int = 4, contexts: tuple[int, ...] = (1,), flops: float = 1e14) -> Profile:
    return transformer(
        layers=layers,
        hidden=1024,
        heads=16,
        sequence=512,
        vocabulary=4096,
        tensors=(1, 2, 4),
        contexts=contexts,
        sizes=(1, 2),
        flops=flops,
    )


def in_part(held: Profile, unit: str) -> Profile:
    """The profile in which this part of blocks runs again instead of attention's core."""

    def changed(measured: FormMeasurement) -> FormMeasurement:
        return replace(measured, selective=measured.selective and replace(measured.selective, unit=unit))

    forms = []
    for form in held.forms:
        kinds = [replace(kind, measurements=tuple(map(changed, kind.measurements))) for kind in form.kinds]
        forms.append(replace(form, kinds=tuple(kinds)))
    return replace(held, forms=tuple(forms))


def cluster(
    profile: Profile, *, servers: int = 2, inside: int = 4, memory_gib: float = 80.0, network: float = 25e9
) -> Cluster:
    device = replace(profile.device, memory_bytes=int(memory_gib * GIB))
    levels = (
        Level(size=inside, bandwidth_bytes_per_s=200e9, latency_s=2e-6),
        Level(size=servers, bandwidth_bytes_per_s=network, latency_s=1e-5),
    )
    return Cluster(device=device, levels=levels)


def problem(
    profile: Profile, machines: Cluster, *, batch_size: int = 16, engine: str = "megatron", **fixed: Any
) -> PlanningProblem:
    options = Options(engine=engine, **({"optimizer": "adam"} | fixed))
    return PlanningProblem(profile=profile, cluster=machines, batch_size=batch_size, options=options)


def answered(asked: PlanningProblem) -> Plan:
    answer = solve("auto", asked)
    assert isinstance(answer, Plan), answer
    return answer


def every_plan(asked: PlanningProblem) -> Iterator[tuple[PlacedDegrees, Plan]]:
    space, _ = whole_space(asked)
    for placed in space.configurations():
        stops = placed.split()
        plan = None if stops is None else placed.plan(stops)
        if plan is not None:
            yield placed, plan


def asked_of(layers: int, servers: int, network: float, memory_gib: float, batch: int, engine: str) -> PlanningProblem:
    held = model(layers=layers)
    machines = cluster(held, servers=servers, network=network, memory_gib=memory_gib)
    return problem(held, machines, batch_size=batch, engine=engine)


problems = st.builds(
    asked_of,
    st.integers(1, 6),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1e8, 1e9, 2e10, 2e11]),
    st.sampled_from([0.6, 1.5, 80.0]),
    st.sampled_from([8, 12, 16]),
    st.sampled_from(["megatron", "deepspeed", "fsdp"]),
)


@examples(5)
@given(problems)
@example(asked_of(6, 4, 1e9, 80.0, 16, "megatron"))  # hundreds of bounds allow pipelines that the network slows down
def test_no_configuration_plays_faster_than_the_answer(asked: PlanningProblem) -> None:
    answer = solve("auto", asked)
    space, ranking = whole_space(asked)
    limit = asked.cluster.device.memory_bytes
    best = 0.0
    for _, plan in every_plan(asked):
        simulated = play(plan)
        if simulated is not None and max(simulated.peak_memory_bytes) <= limit:
            best = max(best, simulated.throughput_samples_per_s)
    if isinstance(answer, Infeasible):
        assert best == 0.0
    else:
        assert (answer.throughput_samples_per_s or 0.0) >= best * (1 - CLOSE)
    assert ranking.left > 0
    assert space.considered == answer.configurations_considered or isinstance(answer, Plan)


@examples(5)
@given(problems)
@example(asked_of(3, 4, 1e8, 80.0, 16, "megatron"))  # all that counts is what passes the network
@example(asked_of(2, 4, 2e11, 80.0, 16, "fsdp"))  # a network as fast as what is inside of servers
def test_no_play_exceeds_its_bounds(asked: PlanningProblem) -> None:
    for placed, plan in every_plan(asked):
        simulated = play(plan)
        if simulated is None:
            continue
        rate = simulated.throughput_samples_per_s * (1 - 1e-6)
        stops = tuple(stage.stop for stage in plan.stages)
        assert rate <= placed.most
        assert rate <= placed.most_of(stops)
        assert rate <= most_samples_per_s(plan)


@examples(5)
@given(problems)
@example(asked_of(6, 4, 1e8, 80.0, 16, "megatron"))  # ranks wait for the network between them
def test_no_batch_is_shorter_than_ranks_take_turns(asked: PlanningProblem) -> None:
    """A price is cut at the bound: this is the play itself."""
    for placed, plan in every_plan(asked):
        if plan.depth == 1 or plan.chunks > 1:
            continue
        batch_s = flushed_batch_s(batch_ends_s(one_pipeline(plan, batches=3)))
        assert least_batch_s(plan) <= batch_s * (1 + 1e-6)
        assert placed.most * batch_s * (1 + 1e-6) >= plan.batch_size


@examples(5)
@given(problems)
@example(asked_of(4, 2, 1e9, 1.5, 16, "deepspeed"))
def test_states_held_whole_play_no_faster_than_the_same_stages_with_shared_ones(asked: PlanningProblem) -> None:
    """The search leaves them out, and gives their value among the others of the answer's degrees."""
    space, _ = whole_space(asked)
    assert all(each.degrees.recipe.sharding != "none" or each.degrees.data == 1 for each in space.configurations())
    for placed in islice(space.likely(beaten=True), 60):
        stops, recipe = placed.split(), placed.degrees.recipe
        whole = None if stops is None else placed.plan(stops)
        if whole is None or recipe.sharding != "none" or placed.degrees.data == 1:
            continue
        assert stops is not None
        sharing = replace(placed.degrees, recipe=replace(recipe, sharding="optimizer"))
        shared = space.maker(sharing).plan(stops, inside=placed.inside)
        assert shared is not None
        plays = play(whole), play(shared)
        if plays[0] is not None and plays[1] is not None:
            assert plays[0].throughput_samples_per_s <= plays[1].throughput_samples_per_s * (1 + 1e-6)


def test_a_pipeline_that_shares_weights_is_one_that_shares_gradients() -> None:
    """Its weights are whole until a batch ends (torchtitan). The search plays one of both unless it is asked."""
    held = model()
    space, _ = whole_space(problem(held, cluster(held), engine="fsdp"))
    pipelined = [each for each in space.likely() if each.degrees.pipeline > 1]
    assert {each.degrees.recipe.sharding for each in pipelined} == {"gradients"}
    assert {each.degrees.recipe.sharding for each in space.configurations()} == {"gradients", "weights"}
    for placed in pipelined[:20]:
        stops, recipe = placed.split(), placed.degrees.recipe
        assert stops is not None
        sharing = replace(placed.degrees, recipe=replace(recipe, sharding="weights"))
        shared, plan = space.maker(sharing).plan(stops, inside=placed.inside), placed.plan(stops)
        assert plan is not None and shared == replace(plan, sharding="weights")

    asked = whole_space(problem(held, cluster(held), engine="fsdp", sharding="weights", stages=2))[0]
    assert {each.degrees.recipe.sharding for each in asked.configurations()} == {"weights"}


@examples(8)
@given(problems, st.integers(0, 40))
@example(asked_of(6, 1, 2e11, 0.6, 8, "deepspeed"), 0)  # memory decides where the stages end
@example(asked_of(6, 4, 1e8, 80.0, 8, "megatron"), 0)  # so does the exchange of the last stage
def test_no_stages_that_fit_play_faster_than_the_bound_of_any(asked: PlanningProblem, first: int) -> None:
    space, _ = whole_space(asked)
    blocks = len(asked.profile.blocks)
    pipelines = (each for each in space.configurations() if each.degrees.pipeline > 1 == each.degrees.chunks)
    for placed in islice(pipelines, first, first + 6):
        found = placed.split()
        most, by_blocks = placed.most_of_any(), space.most_of_any(placed.degrees)
        for cuts in combinations(range(1, blocks), placed.degrees.pipeline - 1):
            stops = (*cuts, blocks)
            plan = placed.plan(stops)
            if plan is None:
                continue
            assert found is not None
            assert placed.most_of(stops) <= by_blocks
            simulated = play(plan)
            if simulated is not None:
                assert simulated.throughput_samples_per_s <= most


SLOW_ENDS = transformer(
    layers=8, hidden=512, heads=8, sequence=256, tensors=(1, 2), contexts=(1, 2), sizes=(1,), flops=1e14
)
"""Its embedding and its head have states that take longer to exchange and to update than its layers take to train."""


def test_stages_are_made_for_what_follows_the_last_backward_too() -> None:
    """One microbatch a batch: equal stages idle while the embedding and the head are updated; few ranks wait less."""
    machines = cluster(SLOW_ENDS, servers=8, inside=8)
    every = answered(problem(SLOW_ENDS, machines, batch_size=1))
    for stages in range(1, 9):
        fixed = answered(problem(SLOW_ENDS, machines, batch_size=1, stages=stages))
        assert (fixed.throughput_samples_per_s or 0.0) <= (every.throughput_samples_per_s or 0.0) * (1 + CLOSE)


def test_the_stages_are_cut_for_the_links_between_their_ranks() -> None:
    """20 blocks on 16 ranks, two to a server: ranks of two blocks were next to slow links and waited for them."""
    held = transformer(layers=18, hidden=4096, heads=32, sequence=2048, tensors=(4,), sizes=(1,))
    machines = cluster(held, servers=8, inside=8, network=3e9)
    fixed: dict[str, Any] = {"stages": 16, "chunks": 1, "recompute": False}
    space, _ = whole_space(problem(held, machines, batch_size=64, **fixed))
    placed = next(space.configurations())
    rates = []
    for stops in (placed.split(), space.maker(placed.degrees).splitter.several[0]):
        plan = None if stops is None else placed.plan(stops)
        simulated = None if plan is None else play(plan)
        assert simulated is not None
        rates.append(simulated.throughput_samples_per_s)
    assert rates[0] > 1.03 * rates[1]


@examples(5)
@given(problems)
def test_the_most_even_stages_are_among_those_compared(asked: PlanningProblem) -> None:
    """Ranks that take turns over slow links are the faster for it: by 15 % of 7B on 64 GPUs with 25 Gb/s."""
    for placed in islice(whole_space(asked)[0].likely(), 60):
        even, splits = placed.most_even(), placed.splits()
        assert (even in splits) if even else not splits


@pytest.mark.campaign
def test_the_cuts_of_the_fastest_plans_are_moved_too() -> None:
    """Moves of plans that were too slow to be played used up the budget of all moves: 1.3 % slower than if forced."""
    held = transformer(
        layers=24,
        hidden=2048,
        heads=16,
        sequence=2048,
        vocabulary=51200,
        tensors=(1, 2),
        contexts=(1,),
        sizes=(1, 2, 4),
    )
    machines = cluster(held, servers=4, network=6.25e9)
    fixed: tuple[dict[str, Any], ...] = ({}, {"stages": 4})
    free, forced = (answered(problem(held, machines, batch_size=64, **each)) for each in fixed)
    assert (free.throughput_samples_per_s or 0.0) >= (forced.throughput_samples_per_s or 0.0) * (1 - CLOSE)


@pytest.mark.parametrize("memory_gib", [1.4, 1.8])
def test_the_first_play_is_of_stages_that_memory_allows(memory_gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    held = model(layers=24)
    asked = problem(held, cluster(held, memory_gib=memory_gib), batch_size=256, stages=8, tensor=1)
    fastest = answered(asked).throughput_samples_per_s
    least = WholeBudget(first_plays=1, played_instructions=1, step_instructions=0, climb_instructions=0)
    monkeypatch.setattr(planner, "BUDGET", least)
    # With equal stages, other recipes would be faster: only uneven ones fit, and play 15 % slower.
    assert answered(asked).throughput_samples_per_s == pytest.approx(fastest, rel=0.02)


def test_even_stages_end_where_the_blocks_do() -> None:
    """The share of the last stage was, by rounding, more than what was left: it ended past the last block."""
    for layers, slower in ((3, 11), (5, 3), (6, 5), (7, 3)):
        held = transformer(
            layers=layers, hidden=256, heads=4, sequence=256, tensors=(1,), sizes=(1,), flops=1e14 / slower
        )
        space, _ = whole_space(problem(held, cluster(held, servers=1), engine="fsdp"))
        for placed in space.configurations():
            assert (placed.split() or (layers + 2,))[-1] == layers + 2


def test_the_bound_counts_the_exchanges_of_a_ranks_stages_one_after_the_other() -> None:
    held = model(layers=6)
    slow = cluster(held, servers=4, inside=2, network=1e9)
    plan = answered(problem(held, slow, stages=2, chunks=2, data=4, tensor=1, recompute=False, sharding="none"))
    rank = [plan.costs[stage] for stage in (0, 2)]
    exchanged_s = sum(each.reduce_s for each in rank)
    computed_s = plan.microbatches * sum(each.forward_s + each.backward_s for each in rank)
    assert exchanged_s > computed_s / 10
    assert least_batch_s(plan) >= (computed_s + exchanged_s) * (1 - 1e-6)
    assert (plan.throughput_samples_per_s or 0.0) <= most_samples_per_s(plan)


@examples(4)
@given(problems)
def test_two_batches_say_what_three_do_where_exchanges_follow_the_backward(asked: PlanningProblem) -> None:
    assume(not engine_named(asked.options.engine or "").overlaps)
    for _, plan in islice(every_plan(asked), 12):
        two, three = (flushed_batch_s(batch_ends_s(one_pipeline(plan, batches=batches))) for batches in (2, 3))
        assert two == pytest.approx(three, rel=1e-9)


@examples(4)
@given(problems)
def test_a_device_holds_what_its_stages_say(asked: PlanningProblem) -> None:
    """The play counts microbatches in flight in the stream; interleaved stages are estimated as equal."""
    for _, plan in every_plan(asked):
        if plan.chunks > 1 or (simulated := play(plan)) is None:
            continue
        for worker, peak_bytes in zip(plan.placement, simulated.peak_memory_bytes, strict=True):
            assert peak_bytes <= plan.stages[worker.stage].memory_bytes * 1.001 + 1000


def test_the_certificate_holds_when_the_space_is_searched_again() -> None:
    held = model()
    asked = problem(held, cluster(held))
    plan = answered(asked)
    assert all(finding.holds for finding in verify(plan, asked))
    assert plan.certificate is not None
    slower = min((each for _, each in every_plan(asked)), key=most_samples_per_s)
    lie = replace(slower, simulated=play(slower), certificate=plan.certificate)
    assert not all(finding.holds for finding in verify(lie, asked))


def test_optimal_is_said_of_all_stages_alone() -> None:
    """Few of the stages were compared that many layers on a slow network can have: others are bounded, not excluded."""
    held = model(layers=22)
    asked = problem(held, cluster(held, network=1e9), stages=4, chunks=1)
    plan = answered(asked)
    assert plan.certificate is not None and plan.certificate.bound_of_all is not None
    assert plan.certificate.bound_of_all < plan.certificate.bound
    assert plan.certificate.gap < plan.certificate.gap_of_all
    assert "whatever they are, none plays more than" in plan.certificate.claim
    assert all(finding.holds for finding in verify(plan, asked))
    for lie in (None, plan.certificate.bound * 0.9999, plan.certificate.bound * 1.1):
        claimed = replace(plan, certificate=replace(plan.certificate, bound_of_all=lie))
        (finding,) = (each for each in verify(claimed, asked) if each.what == "optimality")
        assert not finding.holds


@examples(6)
@given(problems, st.integers(0, 30))
def test_no_stages_play_faster_than_a_certificate_says(asked: PlanningProblem, first: int) -> None:
    answer = solve("auto", asked)
    if isinstance(answer, Infeasible) or answer.certificate is None:
        return
    held, blocks = answer.certificate, len(asked.profile.blocks)
    most = 1 / (held.bound if held.bound_of_all is None else held.bound_of_all)
    space, _ = whole_space(asked)
    for placed in islice(space.configurations(), first, first + 4):
        for cuts in islice(combinations(range(1, blocks), placed.degrees.depth - 1), 40):
            plan = placed.plan((*cuts, blocks))
            simulated = None if plan is None else play(plan)
            if simulated is not None and max(simulated.peak_memory_bytes) <= asked.cluster.device.memory_bytes:
                assert simulated.throughput_samples_per_s <= most * (1 + 1e-6)


def test_memory_and_seconds_that_the_profile_does_not_give_are_named() -> None:
    held = model()
    asked = problem(held, cluster(held))
    plan = answered(asked)
    first, *others = plan.stages
    lighter = replace(plan, stages=(replace(first, time_s=first.time_s / 2), *others))
    faster = replace(plan, costs=(replace(plan.costs[0], recompute_s=1.0), *plan.costs[1:]))
    found = [finding for wrong in (lighter, faster) for finding in verify(wrong, asked) if finding.what == "costs"]
    assert [finding.holds for finding in found] == [False, False]
    assert [finding.detail.split(" is ")[0] for finding in found] == ["stages[0].time_s", "costs[0].recompute_s"]


def test_whole_blocks_and_states_play_as_our_own_stages_do() -> None:
    """With one device a stage both build the same costs: the play of the same stages is the same."""
    held = replace(model(layers=8), overheads=replace(model().overheads, update_s_per_byte=0.0))
    machines = cluster(held, servers=1)
    fixed: dict[str, Any] = {"schedule": "1f1b", "stages": 4, "microbatch_size": 1, "recompute": False}
    ours = solve("pipedream-2bw", replace(problem(held, machines), options=Options(optimizer="adam", **fixed)))
    theirs = answered(problem(held, machines, **fixed, tensor=1, sharding="none", chunks=1))
    assert isinstance(ours, Plan)
    assert theirs.throughput_samples_per_s == pytest.approx(ours.throughput_samples_per_s, rel=2e-3)
    same = [
        stage for stage in theirs.stages if (stage.start, stage.stop) == (ours.stages[0].start, ours.stages[0].stop)
    ]
    for stage in same:
        memory = stage.memory
        assert memory is not None
        assert memory.weights + memory.gradients + memory.master_weights + memory.optimizer_states == 18 * sum(
            block.weight_bytes // 2 for block in held.blocks[stage.start : stage.stop]
        )


@pytest.mark.each_case
@pytest.mark.parametrize(
    "fixed",
    [
        {"tensor": 2},
        {"stages": 2, "tensor": 1},
        {"data": 2},
        {"sharding": "optimizer"},
        {"chunks": 2},
        {"recompute": True, "recompute_unit": "attention"},
        {"recompute": True, "recompute_unit": "block"},
        {"recompute": False},
        {"microbatch_size": 2},
        {"context": 2},
        {"sequence_parallel": True, "tensor": 4},
    ],
)
def test_a_degree_that_is_fixed_is_kept(fixed: dict[str, Any]) -> None:
    held = model(contexts=(1, 2))
    plan = answered(problem(held, cluster(held), **fixed))
    has = plan.degrees | {
        "stages": plan.depth // plan.chunks,
        "chunks": plan.chunks,
        "sharding": plan.sharding,
        "recompute": plan.recompute,
        "recompute_unit": plan.stages[0].recompute_unit,
        "microbatch_size": plan.microbatch_size,
    }
    assert {name: has[name] for name in fixed} == fixed
    assert plan.engine == "megatron"
    assert plan.workers <= 8
    assert {each.degree for each in plan.choices}.isdisjoint(fixed)


@pytest.mark.parametrize("engine", ["megatron", "deepspeed", "fsdp"])
def test_other_engines_train_with_adamw_unless_asked_otherwise(engine: str) -> None:
    held = model(layers=4)
    asked = problem(held, cluster(held), engine=engine)
    unasked, adamw, sgd = (
        answered(replace(asked, options=replace(asked.options, optimizer=name))) for name in (None, "adamw", "sgd")
    )
    assert unasked == adamw
    assert sgd.optimizer == "sgd" and sgd.stages != adamw.stages


@pytest.mark.parametrize(
    ("field", "fixed"),
    [
        ("tensor", {"tensor": 3}),
        ("context", {"context": 4}),
        ("expert", {"expert": 2}),
        ("schedule", {"schedule": "gpipe"}),
        ("synchronisation", {"synchronisation": "all-reduce"}),
        ("memory", {"memory": "paper"}),
        ("sharding", {"sharding": "weights"}),
        ("data", {"data": 7}),
        ("stages", {"stages": 100}),
        ("chunks", {"stages": 2, "chunks": 12}),
        ("stages", {"tensor": 4, "stages": 4}),
        ("expert", {"expert": 3}),
        ("data", {"data": 8, "tensor": 2}),
        ("data", {"data": 4, "stages": 4}),
        ("stages", {"tensor": 2, "context": 1, "stages": 5}),
        ("chunks", {"chunks": 4}),
        ("chunks", {"stages": 1, "chunks": 2}),
        ("chunks", {"engine": "deepspeed", "chunks": 2}),
        ("chunks", {"schedule": "1f1b", "chunks": 2}),
        ("chunks", {"schedule": "1f1b-interleaved", "chunks": 1}),
        ("chunks", {"data": 2, "stages": 3, "chunks": 2, "microbatch_size": 1}),
        ("stages", {"schedule": "1f1b", "stages": 1}),
        ("stages", {"schedule": "data-parallel", "stages": 2}),
        ("sharding", {"engine": "deepspeed", "stages": 2, "sharding": "weights"}),
        ("sharding", {"engine": "fsdp", "stages": 1, "sharding": "none"}),
        ("schedule", {"engine": "deepspeed", "schedule": "1f1b-interleaved"}),
        ("microbatch_size", {"microbatch_size": 8}),
        ("microbatch_size", {"data": 8, "microbatch_size": 2, "batch_size": 8}),
        ("microbatch_size", {"microbatch_size": 3}),
        ("sharding", {"optimizer": "sgd", "sharding": "optimizer"}),
        ("sequence_parallel", {"engine": "deepspeed", "sequence_parallel": True}),
        ("sequence_parallel", {"tensor": 1, "sequence_parallel": True}),
        ("master_weights", {"master_weights": False}),
        ("recompute_unit", {"recompute_unit": "stage"}),
        ("graphs", {"engine": "fsdp", "graphs": True}),
        ("a2a_overlap", {"a2a_overlap": True}),
        ("graphs", {"graphs": True, "recompute": True, "recompute_unit": "block"}),
        ("graphs", {"graphs": True, "offload": "activations"}),
        ("replicate", {"replicate": 2}),
        ("replicate", {"engine": "fsdp", "stages": 1, "data": 8, "replicate": 3}),
        ("replicate", {"engine": "fsdp", "stages": 1, "data": 8, "replicate": 8}),
        ("recompute_unit", {"engine": "deepspeed", "recompute_unit": "attention"}),
        ("tensor", {"engine": "deepspeed", "tensor": 2}),
        ("sequence_parallel", {"tensor": 2, "sequence_parallel": False}),
    ],
)
def test_what_the_engine_or_the_profile_lacks_is_named(field: str, fixed: dict[str, Any]) -> None:
    held = model()
    with pytest.raises(InvalidInputError) as raised:
        solve("auto", problem(held, cluster(held), **fixed))
    assert raised.value.field == field


def test_a_profile_without_forms_is_refused() -> None:
    held = replace(model(), forms=())
    with pytest.raises(InvalidInputError) as raised:
        solve("auto", problem(held, cluster(held)))
    assert raised.value.field == "profile.forms"


def test_degrees_need_an_engine_that_has_them() -> None:
    held = model()
    with pytest.raises(InvalidInputError, match="name an --engine") as raised:
        solve("auto", problem(held, cluster(held), engine="pipeplan", tensor=2))
    assert raised.value.field == "tensor"
    with pytest.raises(InvalidInputError, match="must be auto"):
        solve("gpipe", problem(held, cluster(held)))


def test_what_nothing_fits_by_is_said_of_fewer_replicas_than_devices() -> None:
    """Rounds of two stages a rank leave devices idle: no configuration uses all, and none fits."""
    held = model(layers=2)
    answer = solve("auto", problem(held, cluster(held, servers=8, memory_gib=0.01), batch_size=6, chunks=2))
    assert isinstance(answer, Infeasible)
    assert (answer.reasons[0].missing_bytes or 0) > 0


def test_what_nothing_fits_by_is_said() -> None:
    held = model()
    answer = solve("auto", problem(held, cluster(held, memory_gib=0.01)))
    assert isinstance(answer, Infeasible)
    assert (answer.reasons[0].missing_bytes or 0) > 0
    assert "tensor" in answer.reasons[0].detail


@pytest.mark.parametrize(
    ("fixed", "named", "law"),
    [
        ({"stages": 3, "chunks": 2}, ["stages 3", "chunks 2"], "whole rounds of the ranks"),
        ({"chunks": 3, "batch_size": 7, "stages": 2}, ["chunks 3"], "whole rounds of the ranks"),
        ({"schedule": "1f1b-interleaved", "batch_size": 7, "tensor": 2}, ["schedule 1f1b-interleaved"], "whole rounds"),
        ({"engine": "deepspeed", "data": 1, "sharding": "optimizer"}, ["sharding optimizer", "data 1"], "several"),
    ],
)
def test_the_options_that_leave_nothing_are_named(fixed: dict[str, Any], named: list[str], law: str) -> None:
    """It was said of all that degrees must divide the devices."""
    held = model()
    answer = solve("auto", problem(held, cluster(held), **fixed))
    assert isinstance(answer, Infeasible)
    found = {reason.detail.partition(" configurations without ")[2].partition(",")[0] for reason in answer.reasons}
    assert found == set(named)
    assert law in answer.reasons[0].rule
    for name in named:
        field = name.partition(" ")[0]
        assert isinstance(solve("auto", problem(held, cluster(held), **(fixed | {field: None}))), Plan)


def test_a_batch_of_no_whole_microbatches_is_named() -> None:
    held = transformer(layers=2, hidden=64, heads=2, sequence=32, vocabulary=64, tensors=(1, 2), sizes=(2, 4))
    answer = solve("auto", problem(held, cluster(held), batch_size=7, tensor=2))
    assert isinstance(answer, Infeasible)
    assert answer.reasons[0].rule.startswith("the batch must be whole microbatches of 2, 4 samples")


@pytest.mark.parametrize("recompute", [None, True])
@pytest.mark.parametrize(("engine", "unit"), [("megatron", "attention"), ("fsdp", "operation")])
def test_a_part_of_which_the_profile_says_nothing_cannot_be_recomputed(
    engine: str, unit: str, recompute: bool | None
) -> None:
    """Fused kernels keep no scores: the answer was that degrees must divide the devices."""
    held = in_part(model(), unit)
    forms = []
    for form in held.forms:
        kinds = [
            replace(kind, measurements=tuple(replace(m, selective=None) for m in kind.measurements))
            for kind in form.kinds
        ]
        forms.append(replace(form, kinds=tuple(kinds)))
    fused = replace(held, forms=tuple(forms))
    with pytest.raises(InvalidInputError, match=r"recompute_unit: must be left out or block"):
        solve("auto", problem(fused, cluster(fused), engine=engine, recompute=recompute, recompute_unit=unit))
    plan = solve("auto", problem(held, cluster(held), engine=engine, recompute=True, recompute_unit=unit))
    assert isinstance(plan, Plan) and plan.recomputes == f"by {unit}"


def test_replicas_of_fsdp_share_states_in_one_group_or_in_one_for_each_server() -> None:
    held, fixed = model(), {"engine": "fsdp", "stages": 1, "tensor": 1}
    asked = problem(held, cluster(held, servers=4, inside=2), **fixed)  # type: ignore[arg-type]
    plan = answered(asked)
    tried = {str(plan.replicate), *(each.instead for each in plan.choices if each.degree == "replicate")}
    assert tried == {"1", "4"} and plan.workers == 8
    for replicate in (1, 2, 4):
        one = replace(asked, options=replace(asked.options, replicate=replicate, sharding="weights"))
        forced = answered(one)
        assert forced.replicate == replicate and all(finding.holds for finding in verify(forced, one))
        memory = forced.stages[0].memory
        assert memory is not None
        assert memory.optimizer_states == pytest.approx(
            replicate * 8 * sum(b.weight_bytes for b in held.blocks) / 2 / 8
        )
    other = replace(asked, options=replace(asked.options, replicate=2, sharding="weights"))
    assert not all(finding.holds for finding in verify(plan, other))


def launching(held: Profile, operations: int) -> Profile:
    """The profile with `operations` in every pass."""
    forms = []
    for form in held.forms:
        kinds = [
            replace(
                kind,
                measurements=tuple(
                    replace(m, forward_operations=operations, backward_operations=2 * operations)
                    for m in kind.measurements
                ),
            )
            for kind in form.kinds
        ]
        forms.append(replace(form, kinds=tuple(kinds)))
    return replace(held, forms=tuple(forms))


def test_graphs_are_launched_where_the_host_is_what_a_layer_waits_for() -> None:
    fixed: dict[str, Any] = {"tensor": 1, "stages": 1, "microbatch_size": 1}
    slow, quick = launching(model(), 500), launching(model(flops=1e12), 5)
    asked = problem(slow, cluster(slow), **fixed)
    plan = answered(asked)
    assert plan.graphs == ("full",) and plan.stages[0].memory is not None
    (other,) = [each for each in plan.choices if each.degree == "graphs"]
    assert other.instead == "off" and (other.throughput_samples_per_s or 0) < (plan.throughput_samples_per_s or 0)
    assert all(finding.holds for finding in verify(plan, asked))
    eager = answered(replace(asked, options=replace(asked.options, graphs=False)))
    assert eager.graphs == () and eager.throughput_samples_per_s == other.throughput_samples_per_s
    assert answered(problem(quick, cluster(quick), **fixed)).graphs == ()
    assert answered(problem(quick, cluster(quick), graphs=True, **fixed)).graphs == ("full",)


def test_modules_run_again_where_that_alone_fits_and_is_cheapest() -> None:
    """Rows of mixtures ran so; the answer was whole layers."""
    held = with_modules(model(), "layernorm", "moe_act")
    fixed: dict[str, Any] = {"tensor": 1, "stages": 1, "microbatch_size": 2}
    roomy, tight = (cluster(held, memory_gib=size) for size in (80.0, 0.75))
    assert not answered(problem(held, roomy, **fixed)).recompute
    asked = problem(held, tight, **fixed)
    plan = answered(asked)
    assert (plan.recomputes, plan.recompute_modules) == ("by modules", ("layernorm", "moe_act"))
    without = answered(problem(model(), tight, **fixed))
    assert without.recomputes in ("by attention", "by block") and without.recompute_modules == ()
    assert (plan.throughput_samples_per_s or 0) > (without.throughput_samples_per_s or 0)
    assert plan.stages[0].memory is not None and plan.stages[0].memory.activations > 0
    assert all(finding.holds for finding in verify(plan, asked)), "made again from its profile, it is the same"
    with pytest.raises(InvalidInputError, match="recompute_unit: must be left out or block: modules are norms"):
        solve("auto", problem(model(), tight, recompute_unit="modules"))
    with pytest.raises(InvalidInputError, match="recompute_unit: must be one of block, operation"):
        solve("auto", problem(held, roomy, engine="fsdp", recompute_unit="modules"))


def test_torchs_1f1b_has_a_microbatch_for_every_stage() -> None:
    """torch refuses fewer at the start of the run; Megatron-LM and DeepSpeed do not."""
    held = model()
    slow, tight = cluster(held, network=1e7), cluster(held, memory_gib=0.4)
    for machines, fixed in ((slow, {}), (tight, {}), (slow, {"stages": 4}), (slow, {"stages": 2, "chunks": 2})):
        plan = answered(problem(held, machines, batch_size=4, engine="fsdp", **fixed))
        assert plan.microbatches >= plan.depth // plan.chunks
    with pytest.raises(InvalidInputError, match="stages: must be at most 2 for the engine fsdp"):
        solve("auto", problem(held, slow, batch_size=2, engine="fsdp", stages=4))
    assert answered(problem(held, slow, batch_size=2, stages=4)).microbatches < 4


def test_other_values_of_a_degree_are_no_faster() -> None:
    held = model(contexts=(1, 2))
    plan = answered(problem(held, cluster(held)))
    assert {each.degree for each in plan.choices} >= {"tensor", "pipeline", "microbatch_size", "recomputed"}
    for choice in plan.choices:
        if choice.throughput_samples_per_s is not None:
            assert choice.throughput_samples_per_s <= (plan.throughput_samples_per_s or 0.0) * (1 + CLOSE)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_ranks_hold_several_stages_of_uneven_length(chunks: int) -> None:
    """14 blocks on 2 ranks: stages need not be equal, and idle less than those of ranks with one stage."""
    held = model(layers=12)
    machines = cluster(held, servers=1, inside=2)
    fixed: dict[str, Any] = {"tensor": 1, "stages": 2, "microbatch_size": 1, "recompute": False, "sharding": "none"}
    plan = answered(problem(held, machines, batch_size=4, **fixed, chunks=chunks))
    alone = answered(problem(held, machines, batch_size=4, **fixed, chunks=1))
    assert plan.depth == 2 * chunks
    assert max(stage.stop - stage.start for stage in plan.stages) <= -(-14 // (2 * chunks)) + 1
    assert (plan.throughput_samples_per_s or 0.0) > (alone.throughput_samples_per_s or 0.0)


def test_ranks_of_several_stages_that_do_not_fit_when_even_give_blocks_away() -> None:
    """The head's states weigh as much as many layers. On a device that the fuller rank exceeds by 3 % layers move."""
    held = transformer(
        layers=24, hidden=256, heads=8, sequence=128, vocabulary=50000, tensors=(1,), sizes=(1,), flops=1e14
    )
    fixed: dict[str, Any] = {"stages": 2, "chunks": 2, "microbatch_size": 1, "recompute": False, "sharding": "none"}
    even = answered(problem(held, cluster(held, servers=1, inside=2), batch_size=2, **fixed))
    fuller = max(sum(stage.memory_bytes for stage in even.stages[rank::2]) for rank in range(2))
    tight = cluster(held, servers=1, inside=2, memory_gib=0.97 * fuller / GIB)
    moved = answered(problem(held, tight, batch_size=2, **fixed))
    assert moved.stages != even.stages
    assert moved.simulated is not None
    assert max(moved.simulated.peak_memory_bytes) <= tight.device.memory_bytes


def test_sharded_weights_pay_for_their_gathers() -> None:
    """On a slow network sharding all of the states loses to keeping them whole, where both fit."""
    held = model()
    machines = cluster(held, network=1e9)
    fixed: dict[str, Any] = {
        "engine": "deepspeed",
        "stages": 1,
        "tensor": 1,
        "data": 8,
        "microbatch_size": 1,
        "recompute": False,
    }
    sharded = answered(problem(held, machines, **fixed, sharding="weights"))
    kept = answered(problem(held, machines, **fixed, sharding="none"))
    assert (sharded.throughput_samples_per_s or 0.0) < (kept.throughput_samples_per_s or 0.0)
    assert sharded.stages[0].memory_bytes < kept.stages[0].memory_bytes


@pytest.mark.parametrize(
    ("precision", "sharding", "bytes_more", "gathered"),
    [("fp8", "none", 2.0, 1.0), ("fp8", "optimizer", 0.0, 0.5), ("nvfp4", "optimizer", -0.875, 0.28125)],
)
def test_weights_kept_narrow_count_in_rows_and_columns(
    precision: str, sharding: str, bytes_more: float, gathered: float
) -> None:
    """Beside 2 bytes a weight, or alone; a gather of rows is half of an all-reduce."""
    wide, narrow = (
        next(
            placed.space.maker(placed.degrees).terms
            for placed, _ in every_plan(
                problem(
                    replace(model(), dtype="bfloat16", precision=kind),
                    cluster(model()),
                    data=8,
                    tensor=1,
                    stages=1,
                    sharding=sharding,
                )
            )
        )
        for kind in (None, precision)
    )
    layers = slice(1, -1)
    parameters = wide.states.parameters[0].outside[layers]
    more = (np.diff(narrow.states.fixed_bytes) - np.diff(wide.states.fixed_bytes))[layers]
    assert more == pytest.approx(bytes_more * parameters)
    less = (np.diff(wide.states.exchanged_bytes) - np.diff(narrow.states.exchanged_bytes))[layers]
    expected = 0.0 if sharding == "none" else 1.0 - gathered
    assert less == pytest.approx(expected * parameters)
    for each in (0, -1):
        assert np.diff(narrow.states.fixed_bytes)[each] == np.diff(wide.states.fixed_bytes)[each]
