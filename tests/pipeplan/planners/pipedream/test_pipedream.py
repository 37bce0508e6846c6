"""PipeDream's planner: what the papers' formulas say, what its options mean, what it refuses."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Infeasible, Plan, Worker
from pipeplan.documents.profile import Device, Model, Profile
from pipeplan.errors import InvalidInputError, PipeplanError
from pipeplan.imports.pipedream_graph import import_pipedream_graph
from pipeplan.planners.pipedream.certificate import check_certificate
from pipeplan.planners.problem import Options, PlanningProblem
from tests.pipeplan.builders import PLENTY, Cell, cells, cluster, clusters, profile
from tests.pipeplan.graphs import graphs
from tests.pipeplan.planners.golden_problems import chain
from tests.pipeplan.planners.on_paper import on_paper
from tests.properties import examples

PROFILES = Path(__file__).parents[3] / "data" / "profiles"
GOLDEN = Path(__file__).parents[3] / "golden" / "pipedream_release.json"
RELEASED: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]


@cache
def published(name: str) -> Profile:
    """One of PipeDream's own profiles."""
    return import_pipedream_graph(
        (PROFILES / f"{name}.graph.txt").read_text(),
        microbatch_size=1,
        model=Model(name=name),
        device=Device(name="device", memory_bytes=PLENTY),
        dtype="float32",
    )


def problem_of(blocks: list[Cell], machines: Cluster, options: Options | None = None) -> PlanningProblem:
    return PlanningProblem(profile=profile(blocks), cluster=machines, batch_size=1, options=options or Options())


def plan_of(blocks: list[Cell], machines: Cluster, options: Options | None = None) -> Plan | Infeasible:
    return on_paper("pipedream", problem_of(blocks, machines, options))


def test_the_larger_of_compute_and_synchronisation_counts_not_their_sum() -> None:
    # Two machines, one block: T = 3 s, W = 4 (2 - 1)/2 * 3 bytes at 1 byte/s = 6 s, so max(3, 6) / 2.
    plan = plan_of([Cell(weight_bytes=3)], cluster((2, 1.0)), Options(synchronisation="parameter-server"))
    assert isinstance(plan, Plan)
    assert plan.closed_form.time_per_microbatch_s == 3.0
    assert plan.cost_model == "pipedream-2018-3.2/parameter-server"


@pytest.mark.parametrize("asked", [None, "all-reduce"])
def test_the_exchange_is_the_all_reduce_that_is_played_unless_asked_otherwise(asked: str | None) -> None:
    """It moves half of what a parameter server does: W = 2 (2 - 1)/2 * 8 bytes at 1 byte/s = 8 s, so max(3, 8) / 2."""
    plan = plan_of([Cell(weight_bytes=8)], cluster((2, 1.0)), Options(synchronisation=asked))
    assert isinstance(plan, Plan)
    assert plan.closed_form.time_per_microbatch_s == 4.0
    assert plan.costs[0].reduce_s == 8.0
    assert plan.cost_model == "pipedream-2018-3.2/all-reduce"


def test_a_heavy_tail_of_weights_stands_alone_downstream_of_replicas() -> None:
    """The picture of VGG-16: convolutions replicated, the fully connected end on a machine of its own (2-1)."""
    convolutions, dense = Cell(forward_s=2.0, backward_s=4.0), Cell(weight_bytes=100)
    plan = plan_of([convolutions, dense], cluster((3, 1.0)))
    assert isinstance(plan, Plan)
    assert [(s.start, s.stop, s.replicas) for s in plan.stages] == [(0, 1, 2), (1, 2, 1)]
    assert plan.optimal_in_flight == 2  # NOAM = ceil(3 / 2)
    assert plan.batch_size == 2  # both replicas have updated after 2 minibatches
    assert [(w.stage, w.replica) for w in plan.placement] == [(0, 0), (0, 1), (1, 0)]


def test_stages_stay_inside_servers_where_the_network_between_them_is_slow() -> None:
    blocks = [Cell(weight_bytes=4, output_bytes=1)] * 4
    plan = plan_of(blocks, cluster((2, 100.0), (2, 0.5)))
    assert isinstance(plan, Plan)
    assert plan.replicas == (2, 2)


def test_the_same_problem_gives_the_same_plan_to_the_byte() -> None:
    blocks = [Cell(forward_s=float(i % 3), weight_bytes=i, output_bytes=i % 2) for i in range(8)]
    first, second = plan_of(blocks, cluster((4, 1.0))), plan_of(blocks, cluster((4, 1.0)))
    assert content_id(first) == content_id(second)


def test_the_streams_reach_the_rate_of_the_closed_form_when_nothing_is_sent() -> None:
    plan = plan_of([Cell()] * 4, cluster((4, 1.0)), Options())
    straight = next(a for a in plan.alternatives if a.depth == 4) if isinstance(plan, Plan) else None
    assert isinstance(plan, Plan)
    assert plan.simulated is not None
    assert plan.simulated.throughput_samples_per_s == pytest.approx(plan.closed_form.throughput_samples_per_s, rel=0.05)
    assert straight is not None
    assert straight.closed_form_samples_per_s == pytest.approx(1 / 3.0)


def test_several_measured_sizes_ask_for_the_minibatch() -> None:
    measured = profile([Cell()], sizes=(1, 2))
    with pytest.raises(InvalidInputError, match="--microbatch-size"):
        on_paper("pipedream", PlanningProblem(profile=measured, cluster=cluster((1, 1.0)), batch_size=4))
    taken = on_paper("pipedream", PlanningProblem(profile=measured, cluster=cluster((1, 1.0)), batch_size=2))
    assert isinstance(taken, Plan)
    assert taken.microbatch_size == 2


def test_a_batch_that_is_no_multiple_of_the_minibatch_is_refused() -> None:
    problem = PlanningProblem(
        profile=profile([Cell()], sizes=(2,)), cluster=cluster((1, 1.0)), batch_size=3, options=Options()
    )
    with pytest.raises(InvalidInputError, match=r"batch_size: must be a multiple of the minibatch \(2\), got 3"):
        on_paper("pipedream", problem)


@pytest.mark.parametrize(
    "options", [Options(stages=2), Options(recompute=True), Options(recompute_factor=2.0), Options(schedule="1f1b")]
)
def test_options_without_a_use_are_refused(options: Options) -> None:
    with pytest.raises(InvalidInputError, match="planner pipedream"):
        plan_of([Cell()] * 2, cluster((2, 1.0)), options)


def test_nothing_fits_names_the_stage_and_the_missing_bytes() -> None:
    # One device, one minibatch: 1 version and 1 gradient of 10 bytes. The activations, of 5, go when it comes.
    answer = plan_of([Cell(weight_bytes=10, activation_bytes=5)], cluster((1, 1.0), memory_bytes=15))
    assert isinstance(answer, Infeasible)
    assert (answer.reasons[0].stage, answer.reasons[0].missing_bytes) == (0, 5)


def test_as_many_devices_as_a_cluster_may_have_are_planned_for() -> None:
    plan = plan_of([Cell(), Cell(weight_bytes=1)], cluster((8, 10.0), (16_384, 1.0)))
    assert isinstance(plan, Plan)
    assert len(plan.placement) == 131_072


def test_blocks_that_take_no_time_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="must take some time"):
        plan_of([Cell(forward_s=0.0, backward_s=0.0)], cluster((1, 1.0)))


@pytest.mark.each_case
@pytest.mark.parametrize("case", RELEASED, ids=lambda case: f"{case['profile']}-{case['levels']}")
def test_release_gives_what_the_authors_program_prints(case: dict[str, Any]) -> None:
    machines = cluster(*((size, bandwidth) for size, bandwidth in case["levels"]))
    options = Options(
        semantics="release",
        compression_ratio=case["compression_ratio"],
        straight=case["straight"],
        fewer_machines=case["fewer_machines"],
    )
    plan = on_paper(
        "pipedream",
        PlanningProblem(profile=published(case["profile"]), cluster=machines, batch_size=1, options=options),
    )
    assert isinstance(plan, Plan)
    assert plan.closed_form.time_per_microbatch_s == pytest.approx(case["slowest_stage_s"], rel=1e-9)
    assert max(stage.time_s for stage in plan.stages) <= plan.closed_form.time_per_microbatch_s * (1 + 1e-9)


def test_release_adds_compute_and_exchange_where_the_paper_takes_the_larger() -> None:
    # Two machines, one block: compute 3 s, exchange 4 * 1/2 * 3 bytes / (1 byte/s) = 6 s: (3 + 6) / 2, not 6 / 2.
    plan = plan_of([Cell(weight_bytes=3)], cluster((2, 1.0)), Options(semantics="release"))
    assert isinstance(plan, Plan)
    assert plan.closed_form.time_per_microbatch_s == 4.5
    assert plan.stages[0].time_s == 4.5


def test_release_counts_a_boundary_only_if_it_is_compressed() -> None:
    blocks, machines = [Cell(output_bytes=10, weight_bytes=100)] * 2, cluster((2, 1.0))
    without = plan_of(blocks, machines, Options(semantics="release"))
    compressed = plan_of(blocks, machines, Options(semantics="release", compression_ratio=4.0))
    assert isinstance(without, Plan) and isinstance(compressed, Plan)
    assert without.closed_form.time_per_microbatch_s == 3.0
    assert compressed.closed_form.time_per_microbatch_s == 2 * 10 / 4


def test_release_does_not_look_at_memory() -> None:
    blocks, machines = [Cell(weight_bytes=10)], cluster((1, 1.0), memory_bytes=5)
    assert isinstance(plan_of(blocks, machines), Infeasible)
    plan = plan_of(blocks, machines, Options(semantics="release"))
    assert isinstance(plan, Plan)
    assert plan.stages[0].memory_bytes == 20


def test_straight_is_one_stage_a_device() -> None:
    plan = plan_of([Cell(), Cell(), Cell(forward_s=4.0), Cell()], cluster((3, 1.0)), Options(straight=True))
    assert isinstance(plan, Plan)
    assert [(s.start, s.stop, s.replicas) for s in plan.stages] == [(0, 2, 1), (2, 3, 1), (3, 4, 1)]


def test_straight_on_more_devices_than_blocks_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="straight: needs a stage for each of the 3 devices"):
        plan_of([Cell(), Cell()], cluster((3, 1.0)), Options(straight=True))


def test_fewer_machines_leave_idle_what_does_not_help() -> None:
    """One block whose weights make every replica slower: one machine of four is used."""
    heavy = [Cell(weight_bytes=1000)]
    everything = plan_of(heavy, cluster((4, 1.0)))
    fewer = plan_of(heavy, cluster((4, 1.0)), Options(fewer_machines=True))
    assert isinstance(everything, Plan) and isinstance(fewer, Plan)
    assert (everything.replicas, fewer.replicas) == ((4,), (1,))
    assert fewer.placement == (Worker(stage=0, replica=0),)
    assert fewer.closed_form.time_per_microbatch_s < everything.closed_form.time_per_microbatch_s


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(compression_ratio=2.0), "compression_ratio: is an option of --semantics release only"),
        (Options(semantics="release", synchronisation="all-reduce"), "synchronisation: must be parameter-server"),
        (Options(semantics="release", fewer_machines=True), "fewer_machines: cannot be asked of several levels"),
        (Options(cuts="any"), "cuts: is an option for a model that is a graph"),
    ],
)
def test_options_that_mean_nothing_together_are_refused(options: Options, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        plan_of([Cell()] * 4, cluster((2, 1.0), (2, 1.0)), options)


def test_two_levels_are_planned_from_the_inside_out() -> None:
    """The fast link inside a server takes the replicas of the heavy blocks, the slow one outside a thin boundary."""
    blocks = [Cell(weight_bytes=40, output_bytes=40), Cell(weight_bytes=40, output_bytes=1)] * 2
    plan = plan_of(blocks, cluster((2, 100.0), (2, 1.0)), Options(synchronisation="parameter-server"))
    assert isinstance(plan, Plan)
    assert [(s.start, s.stop, s.replicas) for s in plan.stages] == [(0, 2, 2), (2, 4, 2)]
    assert plan.cost_model == "pipedream-2019-3.1/parameter-server"


certified = st.builds(
    Options,
    synchronisation=st.sampled_from(["parameter-server", "all-reduce"]),
    fewer_machines=st.booleans(),
)


@examples(100)
@given(
    st.one_of(st.lists(cells(), min_size=1, max_size=6).map(profile), graphs(blocks_at_most=5)), clusters(8), certified
)
def test_the_certificate_of_every_plan_passes_its_check(model: Profile, machines: Cluster, options: Options) -> None:
    roomy = replace(machines, device=replace(machines.device, memory_bytes=PLENTY))
    problem = PlanningProblem(profile=model, cluster=roomy, batch_size=1, options=options)
    plan = on_paper("pipedream", problem)
    assert isinstance(plan, Plan) and plan.certificate is not None
    assert plan.certificate.gap < 1e-9
    check_certificate(plan, problem)


@pytest.mark.parametrize("asked", ["parameter-server", "all-reduce"])
def test_a_certificate_is_about_the_exchange_that_its_plan_names(asked: str) -> None:
    """Plans of earlier releases count a parameter server; whoever checks them does not have to know."""
    problem = problem_of([Cell(weight_bytes=5), Cell(weight_bytes=2)], cluster((4, 1.0)))
    plan = on_paper("pipedream", replace(problem, options=Options(synchronisation=asked)))
    assert isinstance(plan, Plan)
    check_certificate(plan, problem)
    with pytest.raises(PipeplanError, match="the plan's cost model names no exchange"):
        check_certificate(replace(plan, cost_model="unit"), problem)


@examples(60)
@given(st.lists(cells(), min_size=2, max_size=6), clusters(8))
def test_certificates_that_claim_more_are_rejected(blocks: list[Cell], machines: Cluster) -> None:
    roomy = replace(machines, device=replace(machines.device, memory_bytes=PLENTY))
    problem = problem_of(blocks, roomy)
    plan = on_paper("pipedream", problem)
    assert isinstance(plan, Plan) and plan.certificate is not None
    held = plan.certificate
    refuted_s, *numbers = held.witness
    claims = [
        replace(held, bound=held.bound * 1.1, value=held.value * 1.1),
        replace(held, bound=held.bound * 1.1, witness=(refuted_s * 1.1, *numbers)),
        replace(held, witness=(refuted_s * 0.9, *numbers)),
        replace(held, witness=(refuted_s, *numbers[:-1])),
        replace(held, witness=(refuted_s * 1.001, *numbers)),
    ]
    for claim in claims:
        with pytest.raises(PipeplanError, match="certificate"):
            check_certificate(replace(plan, certificate=claim), problem)


def test_a_witness_with_a_number_too_high_or_too_low_is_rejected() -> None:
    blocks = [Cell(forward_s=float(index % 3), weight_bytes=index) for index in range(8)]
    problem = problem_of(blocks, cluster((4, 1.0)))
    plan = on_paper("pipedream", problem)
    assert isinstance(plan, Plan) and plan.certificate is not None
    check_certificate(plan, problem)
    witness = plan.certificate.witness
    too_low = replace(plan.certificate, witness=(witness[0], 4.0, *witness[2:]))
    too_high = replace(plan.certificate, witness=(*witness[:3], witness[3] + 9, *witness[4:]))
    for claim in (too_low, too_high):
        with pytest.raises(PipeplanError, match="the certificate is false"):
            check_certificate(replace(plan, certificate=claim), problem)


def test_published_profiles_come_with_certificates_that_hold() -> None:
    for name in ("vgg16", "gnmt"):
        problem = PlanningProblem(profile=published(name), cluster=cluster((4, 3.125e9)), batch_size=1)
        plan = on_paper("pipedream", problem)
        assert isinstance(plan, Plan)
        check_certificate(plan, problem)


@pytest.mark.campaign
def test_stages_that_fill_no_whole_servers_have_no_certificate_of_those_that_do() -> None:
    """Memory leaves only such stages here; they are faster than the bound of whole servers."""
    problem = chain(blocks=48, servers=128, batch=1024, sigma=0.35, gb=2)
    plan = on_paper("pipedream", replace(problem, options=replace(problem.options, microbatch_size=1)))
    assert isinstance(plan, Plan) and plan.workers == 1024
    assert plan.certificate is None or plan.certificate.bound <= plan.certificate.value
