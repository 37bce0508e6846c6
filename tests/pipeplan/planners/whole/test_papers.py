"""The whole space with one device a group and whole states: the papers' plans, at the papers' prices, and all of them.

Its engine is our own runtime, for which the papers' planners plan.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.costs.memory import stages_by_rank
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.forms import BlockKind, Form, FormMeasurement, ModelForm
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import Answer, Plan
from pipeplan.documents.profile import DTYPE_BYTES, Block, Device, Model, Overheads, Profile
from pipeplan.planners.auto.ranking import CLOSE
from pipeplan.planners.auto.space import PlayedSpace
from pipeplan.planners.complete import Decision, complete, play
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.planners.whole.planner import whole, whole_space
from tests.properties import examples

AMPLE = 80 * 10**9

MEMORY = frozenset({"activation_bytes", "input_bytes", "gradient_bytes", "own_gradient_bytes"})
"""What the engines' ledgers count in another way."""


@st.composite
def chains(draw: st.DrawFn, *, recompute: bool) -> Profile:
    """A chain of up to three kinds of blocks. The ends are of kinds that are within, too: all of it is run again."""
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    sizes = draw(st.sampled_from([(1,), (1, 2), (1, 2, 4)]))
    edge_bytes = draw(st.integers(1, 60)) * 10**6
    kinds = []
    for number in range(draw(st.integers(1, 3))):
        forward_s, ratio = draw(st.floats(1e-3, 2e-2)), draw(st.sampled_from([1.5, 2.0]))
        kept_bytes = edge_bytes + draw(st.integers(0, 40)) * 10**6
        kinds.append(
            BlockKind(
                name=f"kind {number}",
                parameters=draw(st.integers(1, 200)) * 10**5,
                measurements=tuple(
                    FormMeasurement(
                        microbatch_size=size,
                        forward_s=forward_s * size**0.9,
                        backward_s=ratio * forward_s * size**0.9,
                        input_bytes=edge_bytes * size,
                        output_bytes=edge_bytes * size,
                        activation_bytes=kept_bytes * size,
                    )
                    for size in sizes
                ),
            )
        )
    inner = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=6))
    order = (inner[0], *inner, inner[-1]) if recompute else (*inner, draw(st.integers(0, len(kinds) - 1)))
    used = sorted(set(order))
    kinds, order = [kinds[number] for number in used], tuple(used.index(number) for number in order)
    device = Device(name="device", memory_bytes=AMPLE)
    return Profile(
        model=Model(name="chain"),
        device=device,
        dtype=dtype,
        blocks=tuple(_block(f"block.{index}", kinds[kind], dtype) for index, kind in enumerate(order)),
        forms=(ModelForm(form=Form(), kinds=tuple(kinds), blocks=order),),
        overheads=Overheads(update_s_per_byte=draw(st.sampled_from([0.0, 2e-11]))),
    )


def _block(name: str, kind: BlockKind, dtype: str) -> Block:
    shared = [field.name for field in fields(Measurement) if hasattr(kind.measurements[0], field.name)]
    measured = (Measurement(**{field: getattr(each, field) for field in shared}) for each in kind.measurements)
    return Block(name=name, weight_bytes=kind.parameters * DTYPE_BYTES[dtype], measurements=tuple(measured))


levels = st.builds(
    lambda size, bandwidth, latency_s: Level(size=size, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s),
    st.integers(1, 4),
    st.sampled_from([1e8, 1e9, 1e10, 1e11]),
    st.sampled_from([0.0, 1e-5]),
)


@st.composite
def problems(draw: st.DrawFn) -> PlanningProblem:
    """As the papers' planners are asked, with a microbatch size that was measured."""
    recompute = draw(st.booleans())
    held = draw(chains(recompute=recompute))
    cluster = Cluster(device=held.device, levels=tuple(draw(st.lists(levels, min_size=1, max_size=2))))
    batch = draw(st.sampled_from([4, 6, 8, 12]))
    size = draw(st.sampled_from([size for size in held.microbatch_sizes if batch % size == 0]))
    unit = "block" if recompute else None
    options = Options(optimizer="adam", microbatch_size=size, recompute=recompute, recompute_unit=unit)
    return PlanningProblem(profile=held, cluster=cluster, batch_size=batch, options=options)


def of_whole_space(asked: PlanningProblem, **fixed: Any) -> PlanningProblem:
    """The same of the whole space, for our own runtime."""
    options = replace(asked.options, engine="pipeplan", tensor=1, context=1, expert=1, sharding="none", **fixed)
    return replace(asked, options=options)


def with_memory(asked: PlanningProblem, memory_bytes: int) -> PlanningProblem:
    device = replace(asked.cluster.device, memory_bytes=memory_bytes)
    profile = replace(asked.profile, device=device)
    return replace(asked, profile=profile, cluster=replace(asked.cluster, device=device))


def on_paper(asked: PlanningProblem, plan: Plan) -> Plan:
    """A plan's stages on its placement, with the costs of the papers' planners."""
    decision = Decision(
        planner="pipedream-2bw",
        cost_model="",
        stages=plan.stages,
        placement=plan.placement,
        schedule=plan.schedule,
        microbatch_size=plan.microbatch_size,
        microbatches=plan.microbatches,
        batch_size=plan.batch_size,
        closed_form=plan.closed_form,
        optimal_in_flight=plan.optimal_in_flight,
        configurations_considered=1,
        chunks=plan.chunks,
    )
    return complete(asked, decision)


def every_plan(asked: PlanningProblem) -> Iterator[Plan]:
    space, _ = whole_space(of_whole_space(asked))
    for placed in space.configurations():
        stops = placed.split()
        plan = None if stops is None else placed.plan(stops)
        if plan is not None:
            yield plan


def fits_with_gradients(answer: Answer, asked: PlanningProblem) -> bool:
    """Whether a plan fits if gradients are counted at all times, as the ledgers do."""
    if not isinstance(answer, Plan):
        return True
    pairs = zip(answer.stages, answer.costs, strict=True)
    held = [
        stage.memory_bytes + costs.own_gradient_bytes - stage.memory.gradients for stage, costs in pairs if stage.memory
    ]
    return max(held) <= asked.cluster.device.usable_bytes


def rate(answer: Answer) -> float:
    return (answer.throughput_samples_per_s or 0.0) if isinstance(answer, Plan) else 0.0


@examples(15)
@given(problems())
def test_every_plan_has_the_price_that_the_papers_planners_give_it(asked: PlanningProblem) -> None:
    for plan in every_plan(asked):
        paper = on_paper(asked, plan)
        for own, its in zip(plan.costs, paper.costs, strict=True):
            for field in (each.name for each in fields(own) if each.name not in MEMORY):
                same = getattr(own, field) == getattr(its, field)
                if plan.recompute or field != "recompute_s":  # nobody pays for what is not run again
                    assert same or getattr(own, field) == pytest.approx(getattr(its, field), rel=1e-9), field
        played, on_its_paper = play(plan), play(paper)
        assert played is not None
        assert on_its_paper is not None
        assert played.throughput_samples_per_s == pytest.approx(on_its_paper.throughput_samples_per_s, rel=1e-9)
        # A block that runs again has its input already: the papers' planners count it twice here, where profiles do
        # not say that activations have it, and its output besides. The ledgers count gradients at all times.
        edge = asked.profile.at(plan.microbatch_size)[0]
        edge_bytes = edge.input_bytes + edge.output_bytes if plan.recompute else 0
        gradients = [sum(paper.costs[stage].own_gradient_bytes for stage in own) for own in stages_by_rank(paper)]
        for worker, ours, theirs in zip(
            plan.placement, played.peak_memory_bytes, on_its_paper.peak_memory_bytes, strict=True
        ):
            assert theirs - 2 <= ours + edge_bytes <= theirs + gradients[worker.stage] + 2


@examples(15)
@given(problems())
def test_every_pipeline_of_the_papers_planners_is_in_the_space(asked: PlanningProblem) -> None:
    """Whatever number of devices it leaves idle. Placements that cross the same levels as often are one."""
    own: dict[tuple[object, ...], set[float]] = {}
    for plan in every_plan(asked):
        simulated = play(plan)
        assert simulated is not None
        own.setdefault((plan.depth, plan.width, plan.chunks), set()).add(simulated.throughput_samples_per_s)
    for schedule in ("1f1b", "data-parallel"):
        for placed in PlayedSpace(problem=asked, schedules=(schedule,)).configurations():
            stops = placed.split()
            theirs = None if stops is None else placed.plan(stops)
            assert theirs is not None
            assert (theirs.depth, theirs.width, theirs.chunks) in own, f"{schedule} on {theirs.workers} devices"


@examples(15)
@given(problems(), st.sampled_from([1.0, 0.7, 0.5, 0.3]))
def test_the_answer_is_as_fast_as_that_of_the_papers_planners(asked: PlanningProblem, room: float) -> None:
    """With memory for all that they answer, or for a part of it."""
    ample = solve("pipedream-2bw", replace(asked, options=replace(asked.options, schedule="data-parallel")))
    assert isinstance(ample, Plan)
    tight = with_memory(asked, int(room * max(stage.memory_bytes for stage in ample.stages)))
    answer = whole(of_whole_space(tight, chunks=1))
    best = max(
        (
            rate(theirs)
            for schedule in ("1f1b", "data-parallel")
            for theirs in (solve("pipedream-2bw", replace(tight, options=replace(tight.options, schedule=schedule))),)
            if fits_with_gradients(theirs, tight)
        ),
        default=0.0,
    )
    assert rate(answer) >= best * (1 - CLOSE)
    if isinstance(answer, Plan):
        again = play(on_paper(tight, answer))
        assert again is not None
        assert rate(answer) == pytest.approx(again.throughput_samples_per_s, rel=1e-9)


@examples(10)
@given(problems(), st.sampled_from(["megatron", "deepspeed"]))
def test_other_engines_agree_where_no_gradients_are_exchanged(asked: PlanningProblem, engine: str) -> None:
    """Of one replica nothing is left that engines do in another way."""
    ranks = min(asked.cluster.devices, len(asked.profile.blocks))
    of_engine = replace(of_whole_space(asked).options, engine=engine, data=1, stages=ranks, chunks=1)
    answer = solve("auto", replace(asked, options=of_engine))
    assert isinstance(answer, Plan)
    again = play(on_paper(asked, answer))
    assert again is not None
    assert rate(answer) == pytest.approx(again.throughput_samples_per_s, rel=1e-9)


def test_fewer_replicas_are_faster_where_exchanges_are_slow() -> None:
    """Three devices that exchange for ten seconds what one of them computes in one."""
    kind = BlockKind(
        name="block",
        parameters=10**8,
        measurements=(
            FormMeasurement(
                microbatch_size=1, forward_s=0.01, backward_s=0.02, input_bytes=8, output_bytes=8, activation_bytes=8
            ),
        ),
    )
    device = Device(name="device", memory_bytes=AMPLE)
    held = Profile(
        model=Model(name="block"),
        device=device,
        dtype="float32",
        blocks=(_block("block.0", kind, "float32"),),
        forms=(ModelForm(form=Form(), kinds=(kind,), blocks=(0,)),),
    )
    cluster = Cluster(device=device, levels=(Level(size=3, bandwidth_bytes_per_s=1e8, latency_s=0.0),))
    for engine in ("pipeplan", "megatron", "deepspeed"):
        asked = PlanningProblem(profile=held, cluster=cluster, batch_size=12, options=Options(engine=engine))
        answer = whole(asked)
        assert isinstance(answer, Plan)
        assert (answer.width, answer.workers) == (1, 1)
        assert rate(answer) == pytest.approx(1 / 0.03, rel=1e-6)
