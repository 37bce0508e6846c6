"""Clusters of unequal devices, where the answer can be seen by hand; and all the ways to describe them wrongly."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.cluster import Cluster, DeviceGroup, Level
from pipeplan.documents.files import parse
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.documents.profile import Device, Model
from pipeplan.errors import InvalidInputError
from pipeplan.planners.exact.planner import exact
from pipeplan.planners.problem import Options, PlanningProblem
from tests.pipeplan.builders import PLENTY, Cell, cells, profile
from tests.pipeplan.planners.every_partition import compositions
from tests.pipeplan.planners.exact.mixed import Gpu, mixed_problem, profile_on
from tests.pipeplan.planners.on_paper import on_paper
from tests.properties import examples

FAST, SLOW = Gpu(name="fast"), Gpu(name="slow", slowness=2.0)


def plan_of(problem: PlanningProblem) -> Plan:
    answer = on_paper("exact", problem)
    assert isinstance(answer, Plan)
    return answer


def test_a_device_twice_as_fast_gets_twice_the_blocks() -> None:
    options = Options(schedule="1f1b", stages=2)
    plan = plan_of(mixed_problem([Cell()] * 6, [FAST, SLOW], options=options))
    blocks = {stage.device: stage.stop - stage.start for stage in plan.stages}
    assert blocks == {"fast": 4, "slow": 2}
    assert [stage.time_s for stage in plan.stages] == [12.0, 12.0]
    assert [costs.forward_s for costs in plan.costs] == [4.0, 4.0]


def test_only_the_device_with_little_memory_recomputes() -> None:
    # Three blocks of 4 bytes each: the roomy device holds two microbatches of them, the small one none but its own.
    roomy, small = Gpu(name="roomy", memory_bytes=40), Gpu(name="small", memory_bytes=12)
    options = Options(schedule="1f1b", stages=2, forced_cuts=(3,))
    plan = plan_of(mixed_problem([Cell(activation_bytes=4)] * 6, [small, roomy], options=options))
    assert {stage.device: stage.recompute for stage in plan.stages} == {"small": False, "roomy": False}
    first_small = mixed_problem(
        [Cell(activation_bytes=4)] * 3 + [Cell(weight_bytes=5)] * 3, [small, roomy], options=options
    )
    plan = plan_of(first_small)
    assert [(stage.device, stage.recompute) for stage in plan.stages] == [("small", True), ("roomy", False)]


def test_a_stages_ranks_are_devices_of_its_type() -> None:
    # The heavy last block needs the roomy device, which is the first of the cluster.
    roomy, small = Gpu(name="roomy", memory_bytes=1000), Gpu(name="small", count=2, memory_bytes=50)
    blocks = [Cell(weight_bytes=1), Cell(weight_bytes=1), Cell(weight_bytes=300)]
    plan = plan_of(mixed_problem(blocks, [roomy, small], options=Options(schedule="1f1b", stages=3)))
    assert [stage.device for stage in plan.stages] == ["small", "small", "roomy"]
    assert [worker.stage for worker in plan.placement] == [2, 0, 1]


def test_stages_of_one_device_type_need_not_be_neighbours() -> None:
    """Both ends need memory: no order that has all devices of a type together will do."""
    roomy, small = Gpu(name="roomy", count=2, memory_bytes=1000), Gpu(name="small", memory_bytes=50)
    blocks = [Cell(weight_bytes=300), Cell(weight_bytes=1), Cell(weight_bytes=300)]
    plan = plan_of(mixed_problem(blocks, [roomy, small], options=Options(schedule="1f1b", stages=3)))
    assert [stage.device for stage in plan.stages] == ["roomy", "small", "roomy"]


def test_idle_devices_in_between_do_not_move_the_links() -> None:
    # Servers of two: the pair of type a is in the first; the pair of type b, behind an idle a, lies in two servers.
    gpus = [Gpu(name="a", count=3), Gpu(name="b", count=3)]
    blocks = [Cell(weight_bytes=8, output_bytes=0)] * 2
    problem = mixed_problem(
        blocks, gpus, levels=((2, 100.0), (3, 0.5)), options=Options(schedule="1f1b", stages=2), batch_size=16
    )
    plan = plan_of(problem)
    assert plan.width == 2
    assert [costs.reduce_s for costs in plan.costs] == [pytest.approx(0.08), pytest.approx(16.0)]


def test_pipedream_replicates_the_type_that_needs_it() -> None:
    # Four blocks of 3 s: two replicas of the slow type do two in 6 s a minibatch each, the fast one does two in 6 s.
    options = Options(schedule="pipedream", microbatch_size=1)
    plan = plan_of(mixed_problem([Cell()] * 4, [FAST, replace(SLOW, count=2)], options=options, batch_size=1))
    assert {stage.device: stage.replicas for stage in plan.stages} == {"fast": 1, "slow": 2}
    assert plan.closed_form.throughput_samples_per_s == pytest.approx(1 / 6.0)


@examples(60)
@given(
    st.lists(cells(), min_size=2, max_size=5),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.sampled_from([1.5, 2.0, 3.0]),
    st.tuples(st.one_of(st.just(PLENTY), st.integers(8, 60)), st.one_of(st.just(PLENTY), st.integers(8, 60))),
    st.sampled_from(["1f1b", "pipedream-2bw"]),
    st.booleans(),
)
def test_it_finds_what_trying_every_stage_on_every_type_finds(
    blocks: list[Cell],
    counts: tuple[int, int],
    slowness: float,
    memories: tuple[int, int],
    schedule: str,
    two_levels: bool,
) -> None:
    gpus = [
        Gpu(name="a", count=counts[0], memory_bytes=memories[0]),
        Gpu(name="b", count=counts[1], slowness=slowness, memory_bytes=memories[1]),
    ]
    devices = sum(counts)
    levels = ((2, 4.0), (devices // 2, 0.5)) if two_levels and devices % 2 == 0 else ((devices, 1.0),)
    options = Options(schedule=schedule, recompute=None)
    problem = mixed_problem(blocks, gpus, levels=levels, options=options, batch_size=4)
    answer = exact(problem)
    best_s = min(every_sample_s(problem, schedule), default=None)
    if isinstance(answer, Infeasible):
        assert best_s is None
        return
    assert best_s is not None
    assert 1 / answer.closed_form.throughput_samples_per_s == pytest.approx(best_s, rel=1e-6)


def every_sample_s(problem: PlanningProblem, schedule: str) -> list[float]:
    """Seconds a sample of every width, sequence of types and split that fits: the closed form, a stage at a time."""
    blocks, found = len(problem.profile.blocks), []
    types = [device.name for device in problem.cluster.types]
    for width in (1, 2):
        m = problem.batch_size // width
        for depth in range(1, min(problem.cluster.devices // width, blocks) + 1):
            for sequence in product(types, repeat=depth):
                ranks = taken(problem.cluster, sequence, width)
                for sizes in compositions(blocks, depth) if ranks and (schedule == "1f1b" or m >= depth) else ():
                    step_s = slowest_s(problem, schedule, sequence, ranks or [], sizes, m)
                    slots = (m + depth - 1) / m if schedule == "1f1b" else 1.0
                    if step_s is not None:
                        found.append(step_s * slots / width)
    return found


def taken(cluster: Cluster, sequence: Sequence[str], width: int) -> list[list[int]] | None:
    """Every stage's devices, in order; None where a type has too few."""
    left = {device.name: list(cluster.ranks_of(device)) for device in cluster.types}
    ranks = []
    for name in sequence:
        ranks.append(left[name][:width])
        left[name] = left[name][width:]
    return ranks if all(len(stage) == width for stage in ranks) else None


def slowest_s(
    problem: PlanningProblem,
    schedule: str,
    sequence: Sequence[str],
    ranks: list[list[int]],
    sizes: Sequence[int],
    m: int,
) -> float | None:
    """The slowest stage with the better choice of recomputation; None if one does not fit."""
    worst, start, depth, width = 0.0, 0, len(sequence), len(ranks[0])
    for s, (name, size) in enumerate(zip(sequence, sizes, strict=True)):
        measured = problem.profile_on(name).at(1)
        own, weights = (
            measured[start : start + size],
            sum(b.weight_bytes for b in problem.profile.blocks[start:][:size]),
        )
        transfer_s = sum(
            2 * measured[cut - 1].output_bytes / problem.cluster.link(ranks[a] + ranks[a + 1]).bandwidth_bytes_per_s
            for a, cut in ((s - 1, start), (s, start + size))
            if 0 <= a < depth - 1
        )
        reduce_s = 2 * (width - 1) / width * weights / problem.cluster.link(ranks[s]).bandwidth_bytes_per_s
        held = min(depth - s, m) if schedule == "1f1b" else depth - s
        before = 2 + (min(depth - s + 1, m) if schedule == "1f1b" else depth - s + 1) if s else 0
        behind = 3 + held if s < depth - 1 else 0
        fixed = weights * (2 if schedule == "1f1b" else 3) + max(b.workspace_bytes for b in own)
        fixed += before * own[0].input_bytes + behind * own[-1].output_bytes
        compute_s = sum(b.compute_s for b in own)
        kept = sum(b.activation_bytes for b in own) - sum(b.shared_bytes or 0 for b in own[1:])
        late = weights  # gradients; if all of a batch is kept before the first ones, these replace activations
        if schedule == "1f1b" and held >= m:
            pairs = zip(problem.profile.blocks[start:], own, strict=False)
            late = sum(max(block.weight_bytes - b.added_bytes, 0) for block, b in pairs)
            late += 2 * own[0].input_bytes if s else 0  # the memory of the input, and its gradient
        every_input = sum(b.input_bytes for b in own) - sum(a.passed_bytes for a in own[:-1])
        sent_anyway = held * own[-1].kept_output_bytes if behind else 0
        ways = [
            (compute_s, fixed + held * kept - sent_anyway + late - weights),
            (
                compute_s + sum(b.forward_s for b in own),
                fixed
                + min(
                    held * own[0].input_bytes + kept,
                    held * every_input + max(b.again_bytes for b in own),
                ),
            ),
        ]
        limit = problem.profile_on(name).device.memory_bytes
        fitting = [max(busy_s + transfer_s, reduce_s / m) for busy_s, held_bytes in ways if held_bytes <= limit]
        if not fitting:
            return None
        worst, start = max(worst, min(fitting)), start + size
    return worst


@examples(60)
@given(
    st.lists(cells(), min_size=2, max_size=5),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from([1.5, 3.0]),
    st.booleans(),
    st.booleans(),
)
def test_it_finds_what_trying_all_replicas_on_every_type_finds(
    blocks: list[Cell], counts: tuple[int, int], slowness: float, two_levels: bool, fewer: bool
) -> None:
    gpus = [Gpu(name="a", count=counts[0]), Gpu(name="b", count=counts[1], slowness=slowness)]
    devices = sum(counts)
    levels = ((2, 4.0), (devices // 2, 0.5)) if two_levels and devices % 2 == 0 else ((devices, 1.0),)
    options = Options(schedule="pipedream", recompute=False, fewer_machines=fewer)
    problem = mixed_problem(blocks, gpus, levels=levels, options=options, batch_size=1)
    best_s = min(
        slowest_minibatch_s(problem, teams, sizes)
        for used in range(1 if fewer else devices, devices + 1)
        for depth in range(1, min(used, len(blocks)) + 1)
        for replicas in compositions(used, depth)
        for names in product(("a", "b"), repeat=depth)
        for teams in [list(zip(names, replicas, strict=True))]
        if all(sum(count for name, count in teams if name == gpu.name) <= gpu.count for gpu in gpus)
        for sizes in compositions(len(blocks), depth)
    )
    assert plan_of(problem).closed_form.throughput_samples_per_s == pytest.approx(1 / best_s, rel=1e-6)


def slowest_minibatch_s(problem: PlanningProblem, teams: list[tuple[str, int]], sizes: Sequence[int]) -> float:
    """PipeDream's slowest stage or boundary: seconds a minibatch of these teams on their types' devices, in order."""
    left = {device.name: list(problem.cluster.ranks_of(device)) for device in problem.cluster.types}
    ranks = [[left[name].pop(0) for _ in range(count)] for name, count in teams]
    slowest, start = 0.0, 0
    for stage, ((name, count), size) in enumerate(zip(teams, sizes, strict=True)):
        own = problem.profile_on(name).at(1)[start : start + size]
        weights = sum(block.weight_bytes for block in problem.profile.blocks[start : start + size])
        reduce_s = 2 * (count - 1) / count * weights / problem.cluster.link(ranks[stage]).bandwidth_bytes_per_s
        slowest = max(slowest, sum(block.compute_s for block in own) / count, reduce_s / count)
        if stage < len(teams) - 1:
            link = problem.cluster.link(ranks[stage] + ranks[stage + 1])
            slowest = max(slowest, 2 * own[-1].output_bytes / link.bandwidth_bytes_per_s)
        start += size
    return slowest


def groups(*counts: tuple[str, int], memory_bytes: int = 10) -> tuple[DeviceGroup, ...]:
    return tuple(DeviceGroup(device=Device(name=name, memory_bytes=memory_bytes), count=n) for name, n in counts)


LEVELS = (Level(size=4, bandwidth_bytes_per_s=1.0),)


def test_a_cluster_file_with_groups_needs_no_device() -> None:
    cluster = parse(
        Cluster,
        '{"groups": [{"device": {"name": "a", "memory_bytes": 5}, "count": 1}, '
        '{"device": {"name": "b", "memory_bytes": 7}, "count": 2}, '
        '{"device": {"name": "a", "memory_bytes": 5}, "count": 1}], '
        '"levels": [{"size": 4, "bandwidth_bytes_per_s": 1}]}',
    )
    assert cluster.device.name == "a"
    assert [device.name for device in cluster.types] == ["a", "b"]
    assert [cluster.ranks_of(device) for device in cluster.types] == [(0, 3), (1, 2)]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Cluster(levels=LEVELS), "device"),
        (lambda: Cluster(levels=LEVELS, groups=groups(("a", 3))), "groups"),
        (lambda: Cluster(levels=LEVELS, groups=(*groups(("a", 2)), *groups(("a", 2), memory_bytes=9))), "groups"),
        (
            lambda: Cluster(device=Device(name="c", memory_bytes=1), levels=LEVELS, groups=groups(("a", 2), ("b", 2))),
            "device",
        ),
        (lambda: DeviceGroup(device=Device(name="a", memory_bytes=1), count=0), "count"),
    ],
)
def test_groups_that_do_not_add_up_are_refused(make: Callable[[], object], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        make()
    assert caught.value.field == field


def test_every_mismatch_of_profiles_is_one_error() -> None:
    problem = mixed_problem([Cell(weight_bytes=3)] * 2, [FAST, SLOW])
    other = problem.other_profiles[0]
    wrong = {
        "model": replace(other, model=Model(name="another")),
        "dtype": replace(other, dtype="float16"),
        "number of blocks": replace(other, blocks=other.blocks[:1]),
        "blocks": replace(other, blocks=(replace(other.blocks[0], name="x"), other.blocks[1])),
        "weight_bytes of block block1": replace(
            other, blocks=(other.blocks[0], replace(other.blocks[1], weight_bytes=4))
        ),
    }
    for what, profiled in wrong.items():
        with pytest.raises(InvalidInputError, match=f"must be of the same {what} on slow as on fast"):
            replace(problem, other_profiles=(profiled,))
    rule = "must be one profile for each type of device, fast, slow"
    for others in ((), (profile_on(other, Gpu(name="third")),)):
        with pytest.raises(InvalidInputError, match=rule):
            replace(problem, other_profiles=others)
    with pytest.raises(InvalidInputError, match="must not profile a type of device twice"):
        replace(problem, other_profiles=(other, other))


def test_profiles_without_a_common_microbatch_size_are_refused() -> None:
    problem = mixed_problem([Cell()] * 2, [FAST, SLOW])
    with pytest.raises(InvalidInputError, match=r"other_profiles: must be measured at one of .*\[1\]"):
        exact(replace(problem, other_profiles=(profile_on(profile([Cell()] * 2, sizes=(2,)), SLOW),)))


@pytest.mark.parametrize("planner", ["pipedream", "pipedream-2bw", "gpipe"])
def test_planners_of_equal_devices_name_the_one_that_is_for_unequal_ones(planner: str) -> None:
    with pytest.raises(
        InvalidInputError, match=f"cluster.groups: must be of one type for the planner {planner}.*exact"
    ):
        on_paper(planner, mixed_problem([Cell()] * 2, [FAST, SLOW]))


def test_groups_of_one_type_are_a_cluster_like_any_other() -> None:
    problem = mixed_problem([Cell()] * 4, [Gpu(name="fast"), Gpu(name="fast")], options=Options(schedule="1f1b"))
    assert plan_of(problem).closed_form.throughput_samples_per_s == pytest.approx(2 / 12.0)
