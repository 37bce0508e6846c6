"""The simulator: as the plain one, ports whose bandwidth is shared, and collectives level by level."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.plan import Plan
from pipeplan.documents.stage_costs import StageCosts
from pipeplan.planners.batches import one_pipeline
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.programs.instructions import microbatches_of
from pipeplan.programs.overlap import overlap_exchanges
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.program import stages_in_a_row
from pipeplan.programs.text import parse_instruction
from pipeplan.programs.timeline import Timeline
from pipeplan.schedules.registry import build
from pipeplan.simulation.network import Network, Route, shared_speeds
from pipeplan.simulation.play import simulate
from pipeplan.simulation.predict import predict
from pipeplan.simulation.split_backward import split_backward
from tests.pipeplan.builders import Cell, cluster, profile
from tests.pipeplan.simulation.plain_simulate import Plain
from tests.properties import examples
from tests.schedules import DATA_PARALLEL, FUSED, INTERLEAVED, SCHEDULES, STASHING, V_SHAPED
from tests.worker_agent.runtime.plans import make_plan

SECONDS = st.sampled_from([0.0, 0.1, 0.25, 1.0, 3.0])
PORTS = st.sampled_from([0, 1, 2, 4])

COSTS = st.builds(
    StageCosts,
    microbatch_size=st.just(1),
    forward_s=SECONDS,
    backward_s=SECONDS,
    backward_input_s=SECONDS,
    backward_weight_s=SECONDS,
    recompute_s=SECONDS,
    update_s=SECONDS,
    reduce_s=SECONDS,
    activation_transfer_s=SECONDS,
    gradient_transfer_s=SECONDS,
    latency_s=SECONDS,
    activation_latency_s=SECONDS,
    gradient_latency_s=SECONDS,
    instruction_s=st.sampled_from([0.0, 0.01]),
    message_s=st.sampled_from([0.0, 0.02]),
    activation_message_s=st.sampled_from([0.0, 0.03]),
    gradient_message_s=st.sampled_from([0.0, 0.05]),
    activation_port_devices=PORTS,
    gradient_port_devices=PORTS,
    reduce_port_devices=PORTS,
    reduce_tail_s=st.none() | SECONDS,
    reduce_inside_s=st.sampled_from([0.0, 0.1]),
).filter(lambda costs: costs.reduce_inside_s <= costs.reduce_s)


@examples(300)
@given(data=st.data(), schedule=st.sampled_from(sorted(SCHEDULES)))
def test_every_schedule_is_played_as_the_plain_simulator_plays_it(data: st.DataObject, schedule: str) -> None:
    depth = 1 if schedule in DATA_PARALLEL else data.draw(st.integers(1, 4))
    width = data.draw(st.integers(1, 3))
    chunks = data.draw(st.integers(1, 2)) if schedule == INTERLEAVED and depth in (2, 4) else 1
    chunks = 2 if schedule in V_SHAPED else chunks
    depth *= chunks
    unequal = schedule in STASHING and data.draw(st.booleans())
    replicas = tuple(data.draw(st.integers(1, 3)) for _ in range(depth)) if unequal else (width,) * depth
    microbatches = 1 if schedule in STASHING else data.draw(st.integers(depth, depth + 3))
    microbatches = depth if schedule == INTERLEAVED else microbatches
    recompute = data.draw(st.sampled_from([(), (True,) * depth]))
    pipeline = Pipeline(replicas=replicas, microbatches=microbatches, batches=2, recompute=recompute, chunks=chunks)
    program = build(schedule, pipeline, stages_in_a_row(replicas[: pipeline.span]) if data.draw(st.booleans()) else ())
    costs = data.draw(st.lists(COSTS, min_size=depth, max_size=depth))
    if schedule in FUSED and data.draw(st.booleans()):
        program = split_backward(program, costs)
    if data.draw(st.booleans()):
        program = overlap_exchanges(program)
    timeline = simulate(program, costs)
    plain = Plain(program, costs, range(len(program.streams))).play()
    for lane, expected in zip(timeline.lanes, plain, strict=True):
        assert lane.start_s == pytest.approx([start_s for start_s, _ in expected], rel=1e-9, abs=1e-9)
        assert lane.end_s == pytest.approx([end_s for _, end_s in expected], rel=1e-9, abs=1e-9)


def two_stages(**costs: float) -> list[StageCosts]:
    """A second forward, two backward; output and gradient take a second each."""
    each = StageCosts(
        microbatch_size=1,
        forward_s=1.0,
        backward_s=2.0,
        backward_input_s=2.0,
        backward_weight_s=0.0,
        activation_transfer_s=1.0,
        gradient_transfer_s=1.0,
    )
    return [replace(each, **costs)] * 2  # type: ignore[arg-type]


def times_of(timeline: Timeline, rank: int, instruction: str) -> tuple[float, float]:
    lane = timeline.lanes[rank]
    index = lane.instructions.index(parse_instruction(instruction))
    return lane.start_s[index], lane.end_s[index]


def test_a_message_keeps_its_ranks_busy_for_its_own_bytes() -> None:
    """The boundary after stage 0 takes each of its ranks 0.5 s, that after stage 1 a quarter, both ways.

    stage 0   F1 >>                                                << B1
    stage 1         << F1 >                            < B1 >>
    stage 2                  < F1 B1 >
    """
    program = build("gpipe", Pipeline(replicas=(1, 1, 1), microbatches=1))
    plain = two_stages(activation_transfer_s=0.0, gradient_transfer_s=0.0)[0]
    first = replace(plain, activation_message_s=0.5)
    middle = replace(plain, gradient_message_s=0.5, activation_message_s=0.25)
    last = replace(plain, gradient_message_s=0.25)
    timeline = simulate(program, (first, middle, last))
    assert [times_of(timeline, rank, "F1") for rank in range(3)] == [(0.0, 1.0), (2.0, 3.0), (3.5, 4.5)]
    assert [times_of(timeline, rank, "B1") for rank in range(3)] == [(10.0, 12.0), (7.0, 9.0), (4.5, 6.5)]


def test_replicas_that_share_a_port_share_its_bandwidth() -> None:
    """Two pipelines, stage 0 of both in one server: both outputs leave at t = 1 and are through at t = 3, not 2."""
    program = build("gpipe", Pipeline(replicas=(2, 2), microbatches=1), stages_in_a_row((2, 2)))
    shared = simulate(program, two_stages(activation_port_devices=2))
    assert [times_of(shared, rank, f"F{rank - 1}") for rank in (2, 3)] == [(3.0, 4.0), (3.0, 4.0)]
    alone = simulate(program, two_stages(activation_port_devices=1))
    assert [times_of(alone, rank, f"F{rank - 1}") for rank in (2, 3)] == [(2.0, 3.0), (2.0, 3.0)]


def test_a_later_transfer_waits_in_the_queue() -> None:
    """One worker's outputs of 3 s leave one after the other: F1 at 1..4, F2 at 4..7."""
    program = build("gpipe", Pipeline(replicas=(1, 1), microbatches=2))
    timeline = simulate(program, two_stages(activation_transfer_s=3.0, activation_port_devices=1))
    assert times_of(timeline, 1, "F1") == (4.0, 5.0)
    assert times_of(timeline, 1, "F2") == (7.0, 8.0)


def test_a_gradient_exchange_shares_the_port_as_well() -> None:
    """Stages 0 and 1 of two pipelines in two servers: their rings of 10 s pass the same ports.

    Stage 1's begins at 5, and stage 0's at 8, when 7 s of the first are left. They share the ports until the first is
    through at 8 + 14 = 22; the other has 3 s left then, and ends at 25.
    """
    program = build("1f1b", Pipeline(replicas=(2, 2), microbatches=1))
    ends = [times_of(simulate(program, two_stages(reduce_s=10.0, reduce_port_devices=2)), r, "G1")[1] for r in range(4)]
    assert ends == [25.0, 22.0, 25.0, 22.0]
    own = simulate(program, two_stages(reduce_s=10.0))
    assert [times_of(own, r, "G1")[1] for r in range(4)] == [18.0, 15.0, 18.0, 15.0]


def test_a_tensor_passes_beside_a_long_exchange() -> None:
    """Half of the port each: a tensor of 1 s that meets an exchange of 100 s is through after 2 s, not after 101."""
    exchange, tensor = (Route(number=n, ports=((0, 1.0),)) for n in range(2))
    network = Network([exchange, tensor], ports=1)
    network.start(exchange, "exchange", 100.0, 0.0)
    network.share_out(0.0)
    network.start(tensor, "tensor", 1.0, 50.0)
    network.share_out(50.0)
    assert network.ends[0][0] == 52.0
    assert network.arrived() == ("tensor", 52.0)
    network.share_out(52.0)
    assert network.ends[0][0] == 101.0
    assert network.arrived() == ("exchange", 101.0)


def test_what_stands_for_replicas_passes_all_their_ports() -> None:
    """Two replicas that leave one server for two: its port carries both, at half the speed each."""
    program = build("gpipe", Pipeline(replicas=(1, 1), microbatches=1))
    costs = two_stages(activation_port_devices=2)
    together = simulate(program, costs, [(0, 1), (2, 4)])
    assert times_of(together, 1, "F1") == (3.0, 4.0)
    apart = simulate(program, costs, [(0, 2), (4, 6)])
    assert times_of(apart, 1, "F1") == (2.0, 3.0)


def test_devices_have_links_of_their_own_to_a_servers_port() -> None:
    """Four devices, each with a quarter of the port: four transfers at once take as long as one."""
    program = build("gpipe", Pipeline(replicas=(4, 4), microbatches=1), stages_in_a_row((4, 4)))
    whole = simulate(program, two_stages(activation_port_devices=4, activation_device_share=0.25))
    assert [times_of(whole, rank, f"F{rank - 3}")[0] for rank in range(4, 8)] == [2.0] * 4
    half = simulate(program, two_stages(activation_port_devices=4, activation_device_share=0.5))
    assert [times_of(half, rank, f"F{rank - 3}")[0] for rank in range(4, 8)] == [3.0] * 4


@examples(200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.25, 0.5, 1.0]),
            st.dictionaries(st.integers(0, 4), st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_shares_are_max_min_fair(drawn: list[tuple[float, dict[int, float]]]) -> None:
    """No port carries more than it can, and what is not at full speed has a full port on which nothing has more."""
    routes = [Route(number=n, share=share, ports=tuple(ports.items())) for n, (share, ports) in enumerate(drawn)]
    for route in routes:
        route.alone = route.full_alone()
    levels = [speed * route.share for speed, route in zip(shared_speeds(routes), routes, strict=True)]
    carried = defaultdict[int, float](float)
    for level, route in zip(levels, routes, strict=True):
        for port, count in route.ports:
            carried[port] += level * count
    assert max(carried.values()) <= 1 + 1e-9
    for level, route in zip(levels, routes, strict=True):
        assert 0 < level <= route.share + 1e-12
        if level < route.share - 1e-9:
            full = [port for port, _ in route.ports if carried[port] > 1 - 1e-9]
            passing = {
                port: [m for m, other in zip(levels, routes, strict=True) if port in dict(other.ports)] for port in full
            }
            assert any(max(others) <= level + 1e-9 for others in passing.values())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "pipedream-2bw"])
@pytest.mark.parametrize("orientation", ["pipelines in a server", "stages in a server"])
def test_one_pipeline_stands_for_replicas_that_share_ports(schedule: str, orientation: str) -> None:
    """Four servers of 2: either every pipeline of 2 stages is a server, or every stage's replicas fill two."""
    blocks = [Cell(weight_bytes=8, output_bytes=6, activation_bytes=3), Cell(weight_bytes=2, activation_bytes=1)]
    levels = ((2, 8.0), (4, 4.0))
    options = Options(schedule=schedule, stages=2, microbatch_size=1)
    problem = PlanningProblem(profile=profile(blocks), cluster=cluster(*levels), batch_size=16, options=options)
    plan = solve("pipedream-2bw", problem)
    assert isinstance(plan, Plan)
    assert plan.width == 4
    if orientation == "stages in a server":
        crossing = [
            replace(own, activation_port_devices=4, gradient_port_devices=4, reduce_port_devices=1)
            for own in plan.costs
        ]
        plan = replace(plan, placement=stages_in_a_row(plan.replicas), costs=tuple(crossing))
    whole, one = predict(plan, batches=4), one_pipeline(plan, batches=4)
    assert one.makespan_s == pytest.approx(whole.makespan_s, rel=1e-12)
    for lane in whole.lanes:
        stands = one.lanes[lane.stage]
        assert stands.busy_s == pytest.approx(lane.busy_s, rel=1e-12)
        assert stands.end_s[-1] == pytest.approx(lane.end_s[-1], rel=1e-12)


@pytest.mark.parametrize("half_way", [False, True])
def test_one_pipeline_with_2bp_does_what_every_replica_does_in_every_batch(half_way: bool) -> None:
    """Its exchanges are in the stream in which the gaps are looked for."""
    plan = make_plan("1f1b", (0, 1, 2, 3, 4), replicas=2, split_backward=True, half_way=half_way)
    plan = replace(plan, costs=tuple(replace(costs, reduce_s=5.0, update_s=0.5) for costs in plan.costs))
    whole, one = predict(plan, batches=4), one_pipeline(plan, batches=4)
    for lane in whole.lanes:
        stands = one.lanes[lane.stage]
        assert stands.end_s == pytest.approx(lane.end_s, rel=1e-12)
        for stand_in, own in zip(stands.instructions, lane.instructions, strict=True):
            assert (type(stand_in), len(microbatches_of(stand_in))) == (type(own), len(microbatches_of(own)))


def test_estimates_name_the_ports_of_the_slowest_level_that_is_crossed() -> None:
    blocks = [Cell(weight_bytes=8, output_bytes=6)] * 4
    options = Options(schedule="1f1b", stages=4, microbatch_size=1)
    problem = PlanningProblem(
        profile=profile(blocks), cluster=cluster((2, 8.0), (2, 1.0)), batch_size=8, options=options
    )
    plan = solve("pipedream-2bw", problem)
    assert isinstance(plan, Plan)
    assert [stage.activation_port_devices for stage in plan.costs] == [1, 2, 1, 0]
    assert [stage.gradient_port_devices for stage in plan.costs] == [0, 1, 2, 1]
