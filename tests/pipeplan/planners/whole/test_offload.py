"""Offloading: what it saves on the device, what it costs, and that the search finds it where it is needed."""

from collections import defaultdict
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeplan.cli.plan_tables import show_plan
from pipeplan.documents.cluster import Cluster, Host
from pipeplan.documents.engines import engine_named, require_offload
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.errors import InvalidInputError
from pipeplan.exports.formats import format_named
from pipeplan.exports.source import ExportSource
from pipeplan.formats import four_digits
from pipeplan.planners.auto.ranking import CLOSE
from pipeplan.planners.bound import most_samples_per_s
from pipeplan.planners.complete import play
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.planners.verify import verify
from pipeplan.planners.whole.planner import whole_space
from pipeplan.planners.whole.split import Splitter
from tests.pipeplan.planners.whole.test_whole import GIB, answered, cluster, in_part, model, problem
from tests.properties import examples

FAST = Host(memory_bytes=100 * 10**9, bandwidth_bytes_per_s=1e11, update_bytes_per_s=2e11)
AMPLE = Host(memory_bytes=10**15, bandwidth_bytes_per_s=1e15, update_bytes_per_s=1e15)
USUAL = Host(memory_bytes=100 * 10**9, bandwidth_bytes_per_s=12e9, update_bytes_per_s=20e9)
ENGINES = st.sampled_from(["megatron", "deepspeed", "fsdp"])


def with_host(machines: Cluster, host: Host = USUAL) -> Cluster:
    return replace(machines, host=host)


hosted = st.builds(
    lambda layers, memory, batch, engine, host_gib, link: problem(
        held := model(layers=layers),
        with_host(
            cluster(held, servers=2, memory_gib=memory),
            Host(memory_bytes=int(host_gib * GIB), bandwidth_bytes_per_s=link, update_bytes_per_s=1e10),
        ),
        batch_size=batch,
        engine=engine,
        microbatch_size=1,
        tensor=1,
        offload="any",
    ),
    st.integers(1, 4),
    st.sampled_from([0.25, 0.6, 1.5]),
    st.sampled_from([8, 16]),
    ENGINES,
    st.sampled_from([0.1, 0.5, 50.0]),
    st.sampled_from([1e9, 2e10]),
)


@examples(8)
@given(hosted)
def test_with_a_host_no_configuration_plays_faster_than_the_answer_or_its_bounds(asked: PlanningProblem) -> None:
    answer = solve("auto", asked)
    limit, host = asked.cluster.device.memory_bytes, asked.cluster.host
    assert host is not None
    best = 0.0
    for placed in whole_space(asked)[0].likely():  # with those that offload in vain, which the search leaves out
        stops = placed.split()
        plan = None if stops is None else placed.plan(stops)
        simulated = None if plan is None else play(plan)
        if plan is None or simulated is None:
            continue
        assert max(stage.host_bytes for stage in plan.stages) <= host.memory_bytes
        rate = simulated.throughput_samples_per_s * (1 - 1e-6)
        assert stops is not None
        assert rate <= min(placed.most, placed.most_of(stops), most_samples_per_s(plan))
        if max(simulated.peak_memory_bytes) <= limit:
            best = max(best, simulated.throughput_samples_per_s)
    if isinstance(answer, Infeasible):
        assert best == 0.0
    else:
        assert (answer.throughput_samples_per_s or 0.0) >= best * (1 - CLOSE)


@examples(8)
@given(ENGINES, st.integers(1, 3), st.sampled_from([8, 16]))
def test_offloading_never_holds_more_and_is_never_faster_than_a_free_link(engine: str, layers: int, batch: int) -> None:
    """The same stages of the same degrees, with and without: on slow links and on infinitely fast ones."""
    held = model(layers=layers)
    asked, free = (
        problem(held, with_host(cluster(held), host), batch_size=batch, engine=engine, microbatch_size=1, offload="any")
        for host in (USUAL, AMPLE)
    )
    space, freely = whole_space(asked)[0], whole_space(free)[0]
    saved = 0
    for placed in space.likely():
        degrees, recipe = placed.degrees, placed.degrees.recipe
        if recipe.offload == "none":
            continue
        bare = replace(degrees, recipe=replace(recipe, offload="none"))
        splitters = [one.maker(each).splitter for one, each in ((space, degrees), (space, bare), (freely, degrees))]
        blocks = len(held.blocks)
        stops = tuple(blocks * (stage + 1) // degrees.depth for stage in range(degrees.depth))
        offloaded, whole, without_cost = splitters
        for less, more in zip(_by_rank(offloaded, stops), _by_rank(whole, stops), strict=True):
            assert less <= more * (1 + 1e-12)
            saved += less < more
        assert sum(offloaded.held_by_hosts(stops)) > 0 == sum(whole.held_by_hosts(stops))
        assert _step_s(offloaded) >= _step_s(whole)
        assert _step_s(without_cost) == pytest.approx(_step_s(whole), rel=1e-6)
    assert saved > 10


def _by_rank(splitter: Splitter, stops: tuple[int, ...]) -> list[float]:
    held, p = splitter.held_bytes(stops), splitter.degrees.pipeline
    return [sum(held[rank::p]) for rank in range(p)]


def _step_s(splitter: Splitter) -> float:
    return float(splitter.terms.step_s[-1])


def test_copies_run_beside_the_computing() -> None:
    """A block takes as long as it computes, or as its activations take to the host and back, whichever is longer."""
    held = model(layers=3)
    fixed: dict[str, Any] = {"engine": "megatron", "stages": 1, "tensor": 1, "recompute": False, "microbatch_size": 1}
    slow = replace(USUAL, bandwidth_bytes_per_s=1e9)
    fixed |= {"sharding": "none", "offload": "activations"}
    asked = problem(held, with_host(cluster(held, servers=1), slow), **fixed, offload_share=1.0)
    plan = answered(asked)
    form = next(each for each in held.forms if each.form == plan.form)
    blocks = [form.kinds[kind].at(1) for kind in form.blocks]
    expected = sum(max(each.forward_s, each.activation_bytes / 1e9) for each in blocks)
    assert plan.costs[0].forward_s == pytest.approx(expected)
    assert plan.stages[0].host_bytes == sum(each.activation_bytes for each in blocks)
    part = answered(replace(asked, options=replace(asked.options, offload_share=None)))
    assert part.offload_share == 0.25 and part.stages[0].host_bytes == plan.stages[0].host_bytes // 4
    shared = sum(max(each.forward_s, each.activation_bytes / 4e9) for each in blocks)
    assert part.costs[0].forward_s == pytest.approx(shared)


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"offload_share": 0.0, "offload": "activations"}, "above 0"),
        ({"offload_share": 1.5, "offload": "activations"}, "at most 1"),
        ({"offload_share": 0.5}, "must be 1 where no activations are offloaded"),
        ({"offload_share": 0.5, "offload": "optimizer"}, "must be 1 where no activations are offloaded"),
        ({"offload_share": 0.5, "offload": "activations", "engine": "deepspeed"}, "must be 1 for the engine deepspeed"),
        ({"offload_share": 0.5, "engine": "pipeplan"}, "must be left out for the engine pipeplan"),
    ],
)
def test_a_share_of_the_layers_that_cannot_be_offloaded_is_refused(fixed: dict[str, Any], words: str) -> None:
    held = model()
    with pytest.raises(InvalidInputError, match=words) as raised:
        solve("auto", problem(held, with_host(cluster(held)), **fixed))
    assert raised.value.field == "offload_share"


@pytest.mark.parametrize(("share", "layers"), [(0.25, 1), (0.5, 2), (0.75, 3), (1.0, 3)])
def test_megatron_offloads_the_layers_that_were_priced(share: float, layers: int) -> None:
    """Megatron keeps the last of four layers on the device, always."""
    held = model()
    machines = with_host(cluster(held))
    fixed: dict[str, Any] = {"stages": 1, "tensor": 1, "recompute": False, "offload": "activations"}
    plan = answered(problem(held, machines, **fixed, offload_share=share))
    assert plan.offload_share == share
    names = tuple(each.name for each in held.blocks)
    source = ExportSource(plan_id="plan", plan=plan, cluster=machines, block_names=names)
    written = format_named("megatron").write(source)
    assert f"--cpu-offloading-num-layers {layers}\n" in written


def test_a_device_that_is_too_small_trains_with_its_host() -> None:
    """One GPU whose memory holds weights and gradients, and not Adam's states (Ren et al. 2021)."""
    held = model()
    alone = cluster(held, servers=1, inside=1, memory_gib=0.6)
    fixed: dict[str, Any] = {"engine": "deepspeed", "batch_size": 4}
    assert isinstance(solve("auto", problem(held, alone, **fixed)), Infeasible)
    plan = answered(problem(held, with_host(alone), **fixed))
    assert plan.offload in ("optimizer", "both")
    assert plan.simulated is not None and max(plan.simulated.peak_memory_bytes) <= alone.device.memory_bytes
    assert {each.value for each in plan.choices if each.degree == "offload"} == {plan.offload}
    assert all(each.throughput_samples_per_s is None for each in plan.choices if each.instead == "none")
    assert all(finding.holds for finding in verify(plan, problem(held, with_host(alone), **fixed)))

    small = with_host(alone, replace(USUAL, memory_bytes=10**8))
    answer = solve("auto", problem(held, small, **fixed, offload="optimizer"))
    assert isinstance(answer, Infeasible)
    assert "host's memory" in answer.reasons[0].rule and (answer.reasons[0].missing_bytes or 0) > 0


def test_what_fits_without_its_host_is_not_searched_with_it() -> None:
    held = model()
    roomy, tight = (
        whole_space(problem(held, with_host(cluster(held, memory_gib=gib)), offload="any"))[0] for gib in (80.0, 0.3)
    )
    assert {each.degrees.recipe.offload for each in roomy.likely()} > {"none"}
    assert {each.degrees.recipe.offload for each in roomy.configurations()} == {"none"}
    assert {each.degrees.recipe.offload for each in tight.configurations()} > {"none"}
    asked = whole_space(problem(held, with_host(cluster(held)), offload="optimizer"))[0]
    assert {each.degrees.recipe.offload for each in asked.configurations()} == {"optimizer"}


def test_nothing_is_offloaded_unasked_where_anything_fits() -> None:
    held = model()
    tight = with_host(cluster(held, memory_gib=0.3))
    usual, free = answered(problem(held, tight)), answered(problem(held, tight, offload="any"))
    assert usual.offload == "none"
    assert (free.throughput_samples_per_s or 0.0) >= (usual.throughput_samples_per_s or 0.0) * (1 - CLOSE)


@examples(4)
@given(
    ENGINES,
    st.sampled_from([0.2, 0.25, 0.3]),
    st.sampled_from([2e8, 1e9, 2.5e10]),
    st.sampled_from([{"tensor": 1}, {"stages": 1}, {"microbatch_size": 2}, {"recompute": True}, {"offload": "any"}]),
)
@example("deepspeed", 0.25, 2e8, {"offload": "any"})  # 9 times as fast: stages of four devices, or none at all
def test_no_forced_degree_is_faster_than_an_answer_says(
    engine: str, memory: float, network: float, forced: dict[str, Any]
) -> None:
    """What fits with a host alone is searched with it. A free answer that offloads nothing says what it would give."""
    held = model()
    machines = with_host(cluster(held, memory_gib=memory, network=network), FAST)
    free, other = (
        solve("auto", problem(held, machines, batch_size=64, engine=engine, **each)) for each in ({}, forced)
    )
    if isinstance(free, Infeasible) or isinstance(other, Infeasible):
        assert isinstance(other, Infeasible)
        return
    said = [each.throughput_samples_per_s or 0.0 for each in free.choices if each.degree == "offload"]
    best = max([free.throughput_samples_per_s or 0.0, *said])
    assert best >= (other.throughput_samples_per_s or 0.0) * (1 - CLOSE)


def test_an_answer_says_by_how_much_a_plan_that_offloads_is_faster() -> None:
    held = model()
    slow = with_host(cluster(held, memory_gib=0.25, network=1e9), FAST)
    asked = problem(held, slow, batch_size=64, engine="deepspeed")
    plan = answered(asked)
    faster = answered(problem(held, slow, batch_size=64, engine="deepspeed", offload="optimizer"))
    (said,) = (each for each in plan.choices if each.degree == "offload")
    more = (faster.throughput_samples_per_s or 0.0) / (plan.throughput_samples_per_s or 1.0) - 1
    assert (said.value, said.instead, said.reason) == ("none", "optimizer", f"{100 * more:.1f} % more")
    assert said.throughput_samples_per_s == faster.throughput_samples_per_s
    assert f"with offload optimizer: {four_digits(faster.throughput_samples_per_s or 0.0)} samples/s" in shown(plan)
    assert all(finding.holds for finding in verify(plan, asked))


def shown(plan: Plan) -> str:
    output = StringIO()
    with redirect_stdout(output):
        show_plan(plan)
    return output.getvalue()


def test_nothing_is_offloaded_where_the_cluster_says_nothing_of_its_host() -> None:
    held = model()
    space, _ = whole_space(problem(held, cluster(held)))
    assert {each.degrees.recipe.offload for each in space.configurations()} == {"none"}
    with pytest.raises(InvalidInputError, match="to offload") as raised:
        solve("auto", problem(held, cluster(held), offload="optimizer"))
    assert raised.value.field == "cluster.host"


def test_each_engine_offloads_what_it_can() -> None:
    found = defaultdict(set)
    for engine in ("megatron", "deepspeed", "fsdp"):
        held = in_part(model(), "operation" if engine == "fsdp" else "attention")
        space, _ = whole_space(problem(held, with_host(cluster(held)), engine=engine, offload="any"))
        for each in space.likely():
            recipe = each.degrees.recipe
            found[engine, recipe.offload].add((recipe.recompute, each.degrees.pipeline > 1))
            assert recipe.offload in ("none", "activations") or recipe.sharding != "none"
    assert found["megatron", "activations"] == {("none", False)}
    assert found["deepspeed", "both"] == {("block", False), ("block", True)}
    assert {way for way, _ in found["fsdp", "activations"]} == {"none", "operation", "block"}


@pytest.mark.parametrize(
    ("engine", "fixed"),
    [
        ("pipeplan", {"offload": "optimizer"}),
        ("megatron", {"offload": "activations", "recompute": True}),
        ("megatron", {"offload": "activations", "stages": 2}),
        ("megatron", {"offload": "optimizer", "sharding": "none"}),
        ("deepspeed", {"offload": "both", "recompute": False}),
    ],
)
def test_what_an_engine_cannot_offload_is_refused(engine: str, fixed: dict[str, Any]) -> None:
    held = model()
    with pytest.raises(InvalidInputError) as raised:
        solve("auto", problem(held, with_host(cluster(held)), engine=engine, **fixed))
    assert raised.value.field == "offload"


def test_our_runtime_offloads_nothing() -> None:
    for offload in ("activations", "optimizer", "both"):
        with pytest.raises(InvalidInputError):
            require_offload(engine_named("pipeplan"), offload, sharding="none", recompute="block", pipelined=False)


@pytest.mark.parametrize(
    ("engine", "offload", "flag"),
    [
        ("megatron", "optimizer", "--optimizer-cpu-offload"),
        ("deepspeed", "both", '"cpu_checkpointing": true'),
        ("deepspeed", "optimizer", '"offload_optimizer"'),
    ],
)
def test_an_export_says_what_is_offloaded(engine: str, offload: str, flag: str) -> None:
    held = model()
    machines, names = with_host(cluster(held)), tuple(block.name for block in held.blocks)
    plan = answered(problem(held, machines, offload=offload, engine=engine, tensor=1))
    assert plan.offload == offload
    source = ExportSource(plan_id="0" * 32, plan=plan, cluster=machines, block_names=names)
    assert flag in format_named(engine).write(source)
