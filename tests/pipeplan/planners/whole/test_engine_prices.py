"""What the same degrees take and hold in each engine: its host, its gathers, its exchanges, its copies."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from pipeplan.costs.groups import links_among
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.engines import ENGINES, EngineTimes, TrainingEngine
from pipeplan.documents.forms import Form, ModelForm
from pipeplan.documents.plan import Plan, Worker
from pipeplan.documents.profile import Profile
from pipeplan.planners.complete import play
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.whole.degrees import Degrees, Recipe
from pipeplan.planners.whole.made import PlanMaker
from pipeplan.planners.whole.split import Splitter
from pipeplan.planners.whole.terms import RecipeTerms, ReplicaTerms
from tests.pipeplan.model_forms import transformer

LAYERS, OPERATIONS = 6, 40
MODEL = transformer(layers=LAYERS, hidden=1024, heads=16, sequence=512, vocabulary=4096, tensors=(1, 2), sizes=(1,))
FOUR = transformer(layers=LAYERS, hidden=1024, heads=16, sequence=512, vocabulary=4096, tensors=(2, 4), sizes=(1,))
QUICK = EngineTimes()
"""Neither host nor gaps nor exchanges take anything of the compute."""


def cluster(profile: Profile) -> Cluster:
    levels = (
        Level(size=4, bandwidth_bytes_per_s=200e9, latency_s=2e-6),
        Level(size=4, bandwidth_bytes_per_s=10e9, latency_s=1e-5),
    )
    return Cluster(device=profile.device, levels=levels)


def terms(
    engine: TrainingEngine,
    *,
    profile: Profile = MODEL,
    form: Form = Form(),  # noqa: B008 (frozen)
    recompute: str = "none",
    sharding: str = "none",
    replicate: int = 1,
    graphs: bool = False,
) -> RecipeTerms:
    options = Options(optimizer="adam", engine=engine.name)
    problem = PlanningProblem(profile=profile, cluster=cluster(profile), batch_size=16, options=options)
    model = next(each for each in profile.forms if each.form == form)
    recipe = Recipe(
        form=form, microbatch_size=1, recompute=recompute, sharding=sharding, replicate=replicate, graphs=graphs
    )
    return RecipeTerms(problem=problem, engine=engine, model=model, recipe=recipe)


def shared_by(tensor: int, profile: Profile) -> Form:
    return next(each.form for each in profile.forms if each.form.tensor == tensor)


def with_times(name: str, times: EngineTimes) -> TrainingEngine:
    return replace(ENGINES[name], times=times)


def launching(profile: Profile, *, dynamic: int = 0) -> Profile:
    """The profile with operations in every pass, some of them in layers of dynamic shapes."""

    def with_operations(form: ModelForm) -> ModelForm:
        kinds = []
        for kind in form.kinds:
            (m,) = kind.measurements
            m = replace(m, forward_operations=OPERATIONS, backward_operations=2 * OPERATIONS)
            if m.selective:
                m = replace(m, dynamic_forward_operations=dynamic, dynamic_backward_operations=2 * dynamic)
            kinds.append(replace(kind, measurements=(m,)))
        return replace(form, kinds=tuple(kinds))

    return replace(profile, forms=tuple(map(with_operations, profile.forms)))


def plan(
    own: RecipeTerms, *, pipeline: int, data: int, chunks: int = 1, microbatches: int = 8, inside: int = 0
) -> Plan:
    here = own.at(data, pipelined=pipeline > 1)
    degrees = Degrees(recipe=own.recipe, pipeline=pipeline, chunks=chunks, data=data, microbatches=microbatches)
    splitter = Splitter(terms=here, degrees=degrees, device_bytes=inf)
    maker = PlanMaker(problem=own.problem, engine=own.engine, terms=here, degrees=degrees, splitter=splitter)
    blocks = LAYERS + 2
    made = maker.plan([blocks * (s + 1) // degrees.depth for s in range(degrees.depth)], inside=inside or data)
    assert made is not None
    return made


def test_a_host_that_launches_slowly_decides() -> None:
    profile = launching(MODEL)
    device = terms(with_times("megatron", QUICK), profile=profile)
    host = terms(with_times("megatron", EngineTimes(host_s=1e-3)), profile=profile)
    gaps = terms(with_times("megatron", EngineTimes(gap_s=1e-6)), profile=profile)
    assert host.forward_s == pytest.approx(np.full(LAYERS + 2, OPERATIONS * 1e-3))
    assert host.backward_s == pytest.approx(np.full(LAYERS + 2, 2 * OPERATIONS * 1e-3))
    assert gaps.forward_s == pytest.approx(device.forward_s + OPERATIONS * 1e-6)
    assert terms(with_times("megatron", QUICK)).forward_s == pytest.approx(device.forward_s)


def test_a_host_that_launches_slowly_launches_while_devices_exchange() -> None:
    host = with_times("megatron", EngineTimes(host_s=1e-3))
    both = terms(host, profile=launching(MODEL), form=shared_by(2, MODEL))
    exchanged = [each for m in both.measured for each in m.forward_collectives]
    assert exchanged
    assert both.forward_s == pytest.approx(np.full(LAYERS + 2, OPERATIONS * 1e-3))


@pytest.mark.parametrize("dynamic", [0, 7])
def test_the_host_launches_a_graph_a_layer_and_what_has_no_fixed_shapes(dynamic: int) -> None:
    """Layers alone are in graphs; a microbatch in flight has a layer's output in the graph's own memory, too."""
    host_s, profile = 1e-3, launching(MODEL, dynamic=dynamic)
    slow = with_times("megatron", EngineTimes(host_s=host_s))
    eager, graphs = (terms(slow, profile=profile, graphs=on) for on in (False, True))
    for name, times in (("forward_s", 1), ("backward_s", 2)):
        own_s, eager_s = getattr(graphs, name), getattr(eager, name)
        kernels_s = getattr(terms(with_times("megatron", QUICK), profile=profile), name)
        assert eager_s == pytest.approx(np.full(LAYERS + 2, times * OPERATIONS * host_s))
        assert own_s[[0, -1]] == pytest.approx(eager_s[[0, -1]])
        launched_s = (1 + times * dynamic) * host_s
        assert own_s[1:-1] == pytest.approx(np.maximum(kernels_s[1:-1], launched_s))
    for way in ("none", "attention"):
        held, held_eager = (terms(slow, profile=profile, graphs=on, recompute=way).kept_bytes for on in (True, False))
        outputs = [0, *(eager.edge_bytes[2:-1]), 0]
        assert held - held_eager == pytest.approx(outputs)


def test_layers_alone_are_run_again() -> None:
    whole, attention = (terms(with_times("megatron", QUICK), recompute=way) for way in ("block", "attention"))
    assert whole.again_s[[0, -1]].tolist() == [0.0, 0.0] == attention.again_s[[0, -1]].tolist()
    assert whole.again_s[1:-1] == pytest.approx(whole.forward_s[1:-1])
    assert (attention.again_s[1:-1] > 0).all() and (attention.again_s[1:-1] < whole.again_s[1:-1]).all()
    kept = terms(with_times("megatron", QUICK)).kept_bytes
    assert whole.kept_bytes[[0, -1]] == pytest.approx(kept[[0, -1]])
    assert (whole.kept_bytes[1:-1] < attention.kept_bytes[1:-1]).all()


def gathered(own: ReplicaTerms, block: int, kind: str) -> float:
    size = 2 * own.states.parameters[0].outside[block]
    return links_among(own.terms.problem.cluster, own.data, 1).seconds(kind, float(size))


@pytest.mark.parametrize("sharding", ["gradients", "weights"])
def test_groups_of_replicas_gather_among_themselves_and_sum_their_shares(sharding: str) -> None:
    """Zhao et al. 2023, section 3.2.2; a group is a server here. An exchange takes all of its own time."""
    waiting = with_times("fsdp", EngineTimes(beside=1.0))
    own, all_together = (terms(waiting, sharding=sharding, replicate=n) for n in (4, 1))
    groups, flat, four = (
        own.at(16, pipelined=False),
        all_together.at(16, pipelined=False),
        all_together.at(4, pipelined=False),
    )
    inside, among = links_among(own.problem.cluster, 4, 1), links_among(own.problem.cluster, 4, 4)
    for block in range(LAYERS + 2):
        size = 2.0 * float(flat.states.parameters[0].outside[block])
        gathered_s = inside.seconds("all-gather", size)
        assert np.diff(groups.forward_s)[block] - own.forward_s[block] == pytest.approx(gathered_s)
        exchanged_s = gathered_s * (sharding == "weights") + inside.seconds("reduce-scatter", size)
        exchanged_s += among.seconds("all-reduce", size / 4)
        assert np.diff(groups.backward_s)[block] - own.backward_s[block] == pytest.approx(exchanged_s)
    states, alone = groups.states, four.states
    assert states.ledger == alone.ledger != flat.states.ledger, "a device holds what it would hold in its group alone"
    assert states.fixed_bytes[-1] == pytest.approx(alone.fixed_bytes[-1])
    assert states.exchanged_bytes[-1] == 0.0 and states.update_s[-1] == pytest.approx(alone.update_s[-1])
    made = plan(own, pipeline=1, data=16)
    assert (made.replicate, made.width, made.sharding) == (4, 16, sharding)


def test_an_exchange_beside_the_compute_slows_it() -> None:
    own = terms(with_times("fsdp", EngineTimes(beside=0.5)), sharding="weights").at(4, pipelined=False)
    forward_s = np.diff(own.forward_s)
    for block in range(LAYERS + 2):
        gather_s = gathered(own, block, "all-gather")
        computing_s = own.terms.forward_s[block]
        assert forward_s[block] == pytest.approx(max(computing_s + 0.5 * gather_s, gather_s))


def test_shares_in_a_pipeline_are_gathered_once_a_batch() -> None:
    engine = with_times("fsdp", EngineTimes(beside=0.5))
    own, alone = terms(engine, sharding="weights"), terms(with_times("fsdp", QUICK))
    one, several = own.at(4, pipelined=False), own.at(4, pipelined=True)
    assert one.states.exchanged_bytes[-1] == 0.0 < several.states.exchanged_bytes[-1]
    assert several.step_s[-1] == pytest.approx(float((alone.forward_s + alone.backward_s).sum()))
    whole = 2 + 4  # weights of 16 bits and gradients of 32
    parameters = float(one.states.parameters[0].outside.sum())
    assert several.states.fixed_bytes[-1] - one.states.fixed_bytes[-1] == pytest.approx(whole * parameters)
    few, many = (plan(own, pipeline=2, data=4, microbatches=m) for m in (8, 16))
    assert [stage.reduce_s for stage in few.costs] == [stage.reduce_s for stage in many.costs]
    assert min(stage.reduce_s for stage in few.costs) > 0


def tied(profile: Profile) -> Profile:
    """The profile whose head uses the embedding's weights."""

    def with_copy(form: ModelForm) -> ModelForm:
        embedding, layer, head = form.kinds
        return replace(form, kinds=(embedding, layer, replace(head, parameters=0, tied_parameters=head.parameters)))

    return replace(profile, forms=tuple(map(with_copy, profile.forms)))


def test_the_last_stage_holds_and_exchanges_a_copy_of_tied_weights() -> None:
    engine = with_times("megatron", QUICK)
    apart, shared = terms(engine), terms(engine, profile=tied(MODEL))
    copied = float(apart.at(2, pipelined=False).states.parameters[0].outside[-1])
    one, several = (
        [float(own.at(2, pipelined=on).states.fixed_bytes[-1]) for own in (apart, shared)] for on in (False, True)
    )
    assert one[0] - one[1] == pytest.approx(18 * copied)
    assert several[0] == several[1]
    without, having = (plan(own, pipeline=4, data=1) for own in (apart, shared))
    extra = [b.update_s - a.update_s for a, b in zip(without.costs, having.costs, strict=True)]
    assert extra[0] > 0 and extra[-1] > 0 and extra[1:-1] == [0.0, 0.0]


@pytest.mark.parametrize(("inside", "stride"), [(1, 1), (2, 2), (4, 4)])
def test_copies_of_tied_weights_meet_where_the_placement_has_them(inside: int, stride: int) -> None:
    engine = with_times("megatron", QUICK)
    made = [plan(own, pipeline=2, data=4, inside=inside) for own in (terms(engine), terms(engine, profile=tied(MODEL)))]
    assert made[1].placement.index(Worker(stage=1, replica=0)) == stride
    own = terms(engine, profile=tied(MODEL))
    gradients = float(own.at(4, pipelined=True).states.tied_bytes[-1])
    alone_s = links_among(cluster(MODEL), 2, stride).seconds("all-reduce", gradients)
    extra = [b.reduce_inside_s - a.reduce_inside_s for a, b in zip(*(each.costs for each in made), strict=True)]
    assert extra[0] == pytest.approx(alone_s)


def test_devices_that_hold_the_same_output_send_a_share_each() -> None:
    form = Form(tensor=2, sequence_parallel=True)
    whole = next(each for each in MODEL.forms if each.form == form)
    plain = replace(MODEL, forms=(replace(whole, form=Form(tensor=2)),))
    engine = with_times("megatron", QUICK)
    split, same = terms(engine, form=form), terms(engine, profile=plain, form=Form(tensor=2))
    assert same.edge_bytes == pytest.approx(split.edge_bytes / 2)
    assert same.regathered_s(2) > 0.0 == split.regathered_s(2)
    a, b = (plan(own, pipeline=2, data=1) for own in (split, same))
    assert b.costs[0].activation_transfer_s == pytest.approx(a.costs[0].activation_transfer_s / 2)
    extra_s = same.regathered_s(4)
    assert b.costs[0].activation_latency_s == pytest.approx(a.costs[0].activation_latency_s + extra_s)
    assert b.costs[1].gradient_latency_s == pytest.approx(a.costs[1].gradient_latency_s + extra_s)
    assert (b.costs[0].gradient_latency_s, b.costs[1].activation_latency_s) == (0.0, 0.0)


def test_an_engine_without_overlap_shows_its_whole_exchange() -> None:
    after = plan(terms(with_times("deepspeed", QUICK)), pipeline=1, data=8, microbatches=2)
    (own,) = after.costs
    hidden_s = own.backward_s / 2
    beside = replace(after, engine="pipeplan", costs=(replace(own, reduce_tail_s=own.reduce_s - hidden_s),))
    shown, hidden = play(after), play(beside)
    assert shown is not None and hidden is not None
    computed_s = 2 * (own.forward_s + own.backward_s) + own.update_s
    assert 16 / shown.throughput_samples_per_s == pytest.approx(computed_s + own.reduce_s)
    assert 16 / hidden.throughput_samples_per_s == pytest.approx(computed_s + own.reduce_s - hidden_s)
