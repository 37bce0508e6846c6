"""Experts on tensor ranks: published layouts have more expert-parallel devices than replicas (Megatron-LM's
`--expert-tensor-parallel-size 1`), and each expert has its own number of copies.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipeplan.costs.groups import links_among, sends_tokens_once
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.engines import engine_named
from pipeplan.documents.forms import Collective, Form, ModelForm, Routing
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError
from pipeplan.exports.formats import format_named
from pipeplan.exports.source import ExportSource
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.planners.verify import verify
from pipeplan.planners.whole.degrees import Degrees
from pipeplan.planners.whole.planner import whole_space
from pipeplan.planners.whole.terms import ReplicaTerms
from tests.pipeplan.model_forms import transformer
from tests.pipeplan.planners.whole.test_whole import answered

EXPERT_PARAMETERS = 64 * 2**20


def _shared(model: ModelForm, expert: int, own: int | None) -> ModelForm:
    """The form with experts in its layers, shared so."""
    form = replace(model.form, expert=expert, expert_tensor=own)
    traded = (Collective(kind="all-to-all", axis="expert", size_bytes=2**22 // form.tensor, count=2),) * (expert > 1)
    cut = (Collective(kind="all-gather", axis="tensor", size_bytes=2**22),) * (form.expert_tensor_degree > 1)
    first, layer, last = model.kinds
    measured = tuple(
        replace(
            each,
            forward_collectives=each.forward_collectives + traded + cut,
            backward_collectives=each.backward_collectives + traded + cut,
        )
        for each in layer.measurements
    )
    layer = replace(layer, expert_parameters=EXPERT_PARAMETERS // form.expert_devices, measurements=measured)
    return replace(model, form=form, kinds=(first, layer, last))


def _mixture() -> Profile:
    held = transformer(layers=4, hidden=1024, heads=16, sequence=512, tensors=(1, 2, 4), contexts=(1, 2), sizes=(1,))
    ways = [(1, None), (2, None), (8, None), (16, None), (2, 1), (8, 1), (16, 1)]
    forms = [
        _shared(each, expert, own) for each in held.forms for expert, own in ways if own is None or each.form.tensor > 1
    ]
    return replace(held, forms=tuple(forms))


PROFILE = _mixture()
CLUSTER = Cluster(
    device=PROFILE.device,
    levels=(
        Level(size=8, bandwidth_bytes_per_s=200e9, latency_s=2e-6),
        Level(size=4, bandwidth_bytes_per_s=100e9, latency_s=1e-5),
    ),
)


def _problem(engine: str = "megatron", **fixed: Any) -> PlanningProblem:
    options = Options(engine=engine, optimizer="adam", **fixed)
    return PlanningProblem(profile=PROFILE, cluster=CLUSTER, batch_size=64, options=options)


def _answer(**fixed: Any) -> Plan:
    problem = _problem(**fixed)
    plan = solve("auto", problem)
    assert isinstance(plan, Plan), plan
    assert all(each.holds for each in verify(plan, problem))
    return plan


def _terms(form: Form, data: int, sharding: str = "optimizer", engine: str = "megatron") -> ReplicaTerms:
    fixed = {"tensor": form.tensor, "context": form.context, "expert": form.expert, "sharding": sharding}
    space, _ = whole_space(_problem(engine, data=data, stages=1, expert_tensor=form.expert_tensor_degree, **fixed))
    recipe = Degrees.of(_answer(engine=engine, data=data, stages=1, **fixed)).recipe
    return space.terms(replace(recipe, form=form)).at(data, pipelined=False)


def test_more_devices_share_experts_than_replicas_exist() -> None:
    plan = _answer(tensor=4, context=1, stages=1, data=4, expert=16)
    assert plan.form == Form(tensor=4, sequence_parallel=True, expert=16, expert_tensor=1)
    assert plan.degrees["expert"] == 16 and plan.degrees["expert_tensor"] == 1
    with pytest.raises(InvalidInputError) as raised:
        _answer(tensor=4, context=1, stages=1, data=4, expert=16, expert_tensor=4)
    assert raised.value.field == "expert"
    assert "at most 8: a stage has at most 32 devices, and an expert 4 of them" in str(raised.value)


@pytest.mark.parametrize(
    ("fixed", "field"),
    [
        ({"tensor": 4, "expert_tensor": 2}, "expert_tensor"),
        ({"tensor": 2, "context": 1, "stages": 1, "data": 4, "expert": 16}, "expert"),
        ({"engine": "deepspeed", "expert_tensor": 1, "tensor": 2}, "expert_tensor"),
        ({"engine": "pipeplan", "expert_tensor": 2}, "expert_tensor"),
    ],
)
def test_experts_that_a_stage_cannot_share_are_refused_by_name(fixed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        _answer(**fixed)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"engine": "fsdp"}, "only megatron overlaps"),
        ({"expert": 1}, "without expert parallelism"),
        ({"recompute": True, "recompute_unit": "block"}, "where whole blocks run again"),
        ({"stages": 2, "chunks": 1}, "whose ranks hold one stage each"),
        ({"engine": "pipeplan"}, "must be left out for the engine pipeplan"),
    ],
)
def test_exchanges_that_cannot_overlap_are_refused(fixed: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words) as raised:
        solve("auto", _problem(**{"engine": "megatron", **fixed}, a2a_overlap=True))
    assert raised.value.field == "a2a_overlap"


@pytest.mark.parametrize(("stages", "chunks", "alone"), [(1, 1, 1 / 16), (2, 2, 1.5 * 2 / 32)])
def test_experts_exchange_beside_the_other_pass_of_the_same_layer(stages: int, chunks: int, alone: float) -> None:
    """All but the batch's first forwards and last backwards have one; a microbatch of a stage is held for it."""
    fixed: dict[str, Any] = {"tensor": 4, "context": 2, "expert": 16, "expert_tensor": 1}
    fixed |= {"stages": stages, "chunks": chunks}
    fixed |= {"data": 4 // stages, "recompute": False}
    quick = Level(size=32, bandwidth_bytes_per_s=1e12, latency_s=1e-7)
    problem = replace(_problem(**fixed), cluster=replace(CLUSTER, levels=(quick,)))
    problems = [replace(problem, options=replace(problem.options, a2a_overlap=on)) for on in (False, True)]
    plain, paired = plans = [answered(each) for each in problems]
    assert all(each.holds for plan, asked in zip(plans, problems, strict=True) for each in verify(plan, asked))
    assert plain.form == paired.form and paired.a2a_overlap and not plain.a2a_overlap
    own, beside = (
        whole_space(problem)[0].terms(Degrees.of(each).recipe).at(4 // stages, pipelined=stages > 1) for each in plans
    )
    kind = own.terms.model.blocks[1]
    layer = own.terms.measured[kind]
    links = own.terms.links["expert"]
    traded_s = sum(
        each.count * links.seconds(each.kind, each.size_bytes)
        for each in layer.forward_collectives + layer.backward_collectives
        if each.axis == "expert"
    )
    whole_s, paired_s = (float(np.diff(each.step_s)[1]) for each in (own, beside))
    computed_s = whole_s - traded_s
    assert 0 < traded_s < computed_s, "all of it can be hidden"
    assert paired_s == pytest.approx(computed_s + alone * traded_s)
    kept = [each.stages[0].memory.activations for each in (plain, paired) if each.stages[0].memory]
    flight = 1.0 if stages == 1 else 2.5
    assert kept[1] / kept[0] == pytest.approx((flight + 1 / chunks) / flight, rel=1e-6)
    assert "--overlap-moe-expert-parallel-comm" in _exported(paired) and "overlap-moe" not in _exported(plain)


def test_what_exchanges_do_not_hide_behind_is_waited_for() -> None:
    """A pair of passes takes as long as its exchanges where these take longer."""
    fixed: dict[str, Any] = {"tensor": 2, "context": 1, "expert": 16, "expert_tensor": 1, "stages": 1, "data": 16}
    slow = replace(CLUSTER, levels=tuple(replace(each, bandwidth_bytes_per_s=1e9) for each in CLUSTER.levels))
    problem = replace(_problem(**fixed, a2a_overlap=True), cluster=slow)
    plan = solve("auto", problem)
    assert isinstance(plan, Plan) and plan.a2a_overlap
    recipe = Degrees.of(plan).recipe
    terms = whole_space(problem)[0].terms(recipe)
    layer = terms.measured[terms.model.blocks[1]]
    passes = (layer.forward_collectives, layer.backward_collectives)
    traded_s = sum(
        each.count * terms.links["expert"].seconds(each.kind, each.size_bytes)
        for side in passes
        for each in side
        if each.axis == "expert"
    )
    both_s = float(terms.forward_s[1] + terms.backward_s[1])
    assert traded_s > layer.forward_s + layer.backward_s
    assert both_s == pytest.approx(traded_s), "the first and the last passes of a batch, which run alone, left out"


def _exported(plan: Plan) -> str:
    names = tuple(each.name for each in PROFILE.blocks)
    source = ExportSource(plan_id="plan", plan=plan, cluster=CLUSTER, block_names=names)
    return format_named("megatron").write(source)


def test_a_search_finds_whole_experts_where_cut_ones_exchange_more() -> None:
    free, cut = _answer(tensor=4, expert=8), _answer(tensor=4, expert=8, expert_tensor=4)
    assert free.form.expert_tensor == 1 and cut.form.expert_tensor is None
    assert (free.throughput_samples_per_s or 0) > (cut.throughput_samples_per_s or 0)
    assert any(each.degree == "expert_tensor" and each.instead == "as tensor" for each in free.choices)


@pytest.mark.parametrize("context", [1, 2])
def test_each_expert_has_as_many_copies_as_its_devices_leave(context: int) -> None:
    """T x C x D devices hold (T x C x D) / (E x ETP) copies of an expert, which share its optimizer's states."""
    form = Form(tensor=2, sequence_parallel=True, context=context, expert=8, expert_tensor=1)
    data = 16 // context
    held = _terms(form, data).states.parameters[0]
    assert form.expert_replicas(data) == 4
    assert held.ledger.kept == 6 + 12 / 16 and held.expert_ledger.kept == 6 + 12 / 4


def test_experts_of_one_copy_exchange_nothing() -> None:
    form = Form(tensor=2, sequence_parallel=True, expert=16, expert_tensor=1)
    alone, shared = (_terms(each, 8).states for each in (form, replace(form, expert=8)))
    whole = (alone.ledger.exchanged + alone.ledger.gathered) / 2  # gradients are reduced, weights are gathered
    outside = whole * alone.parameters[0].outside.sum()
    assert alone.exchanged_bytes[-1] == pytest.approx(outside)
    assert shared.exchanged_bytes[-1] > whole * shared.parameters[0].outside.sum()


def test_copies_of_experts_inside_one_replica_sum_their_gradients() -> None:
    form = Form(tensor=4, sequence_parallel=True, expert=2, expert_tensor=1)
    plan = _answer(tensor=4, context=1, stages=1, data=1, expert=2, expert_tensor=1)
    exchanged_s = links_among(CLUSTER, 2, 2).seconds("all-reduce", 4 * EXPERT_PARAMETERS / 2)
    assert plan.form == form and plan.costs[0].reduce_inside_s >= 4 * exchanged_s * (1 - 1e-9)
    cut = _answer(tensor=4, context=1, stages=1, data=1, expert=1)
    assert cut.costs[0].reduce_inside_s == 0.0


def test_fsdp_gathers_experts_among_their_copies() -> None:
    form = Form(tensor=2, sequence_parallel=True, expert=16, expert_tensor=1)
    alone, shared = (_terms(each, 8, "weights", "fsdp").states for each in (form, replace(form, expert=8)))
    size_bytes = 2 * EXPERT_PARAMETERS / 8
    own_s = links_among(CLUSTER, 2, 8).seconds("all-gather", size_bytes)
    assert shared.gathered_s[0][1] - alone.gathered_s[0][1] == pytest.approx(own_s)


@pytest.mark.parametrize(
    ("routing", "units", "reached"),
    [
        (Routing(experts=8, chosen=1), 4, 1.0),
        (Routing(experts=8, chosen=8), 4, 4.0),
        (Routing(experts=4, chosen=2), 2, 2 * (1 - 1 / 6)),  # both choices are in one half for 1 of 6 pairs
        (Routing(experts=8, chosen=4, groups=4, chosen_groups=2), 4, 2.0),  # two whole groups
        (Routing(experts=256, chosen=8, groups=8, chosen_groups=4), 8, 3.631),  # DeepSeek-V3: at most four nodes
        (Routing(experts=256, chosen=8, groups=8, chosen_groups=4), 16, 5.341),
    ],
)
def test_a_token_reaches_the_units_that_have_an_expert_of_its_choice(
    routing: Routing, units: int, reached: float
) -> None:
    assert routing.units_reached(units) == pytest.approx(reached, rel=1e-3)


def test_tokens_that_are_sent_once_cross_the_network_once_for_each_node() -> None:
    levels = tuple(replace(level, latency_s=0.0) for level in CLUSTER.levels)
    routing, size_bytes = Routing(experts=64, chosen=8), 8e6
    links = links_among(replace(CLUSTER, levels=levels), 32, 1)
    copies = links.seconds("all-to-all", size_bytes)
    once = links.seconds("all-to-all", size_bytes, routing)
    per_device = levels[1].bandwidth_bytes_per_s / 8
    assert copies == pytest.approx(size_bytes * (7 / 32 / 200e9 + 24 / 32 / per_device))
    token_bytes = size_bytes / 8
    inside_s = token_bytes * routing.units_reached(32) * 7 / 8 / 200e9
    assert once == pytest.approx(inside_s + token_bytes * routing.units_reached(4) * 3 / 4 / per_device)
    assert once < copies


@pytest.mark.parametrize(
    ("name", "once"), [("H100-SXM5-80GB", True), ("GB200-186GB", True), ("A100-SXM4-80GB", False), ("mine", False)]
)
def test_tokens_are_sent_once_where_deepep_runs(name: str, once: bool) -> None:
    """On other devices, and where tensor groups cut experts, each expert gets a copy of the token."""
    whole = Form(tensor=2, expert=8, expert_tensor=1)
    for engine in ("megatron", "fsdp"):
        assert sends_tokens_once(engine_named(engine), whole, name) == once
        assert not sends_tokens_once(engine_named(engine), replace(whole, expert_tensor=None), name)
    assert not sends_tokens_once(engine_named("deepspeed"), Form(expert=8), name)


def test_plans_are_priced_with_tokens_that_are_sent_once() -> None:
    forms = []
    for model in PROFILE.forms:
        layer = model.kinds[1]
        routed = tuple(
            replace(
                each,
                forward_collectives=tuple(
                    replace(one, routing=Routing(experts=64, chosen=8) if one.axis == "expert" else None)
                    for one in each.forward_collectives
                ),
            )
            for each in layer.measurements
        )
        forms.append(replace(model, kinds=(model.kinds[0], replace(layer, measurements=routed), model.kinds[2])))
    routed_profile = replace(PROFILE, forms=tuple(forms))
    seconds = []
    for name in ("A100-SXM4-80GB", "H100-SXM5-80GB"):
        device = replace(PROFILE.device, name=name)
        problem = replace(
            _problem(tensor=1, context=1, stages=1, expert=16),
            profile=replace(routed_profile, device=device),
            cluster=replace(CLUSTER, device=device),
        )
        plan = solve("auto", problem)
        assert isinstance(plan, Plan)
        seconds.append(plan.costs[0].forward_s)
    assert seconds[1] < seconds[0]
