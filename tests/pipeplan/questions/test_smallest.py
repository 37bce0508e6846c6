"""The smallest cluster, against asking for every one."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.plan import Plan
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import Options, Planner, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.questions.smallest import rate, smallest, sub_cluster, sub_clusters
from tests.pipeplan.builders import Cell, cluster, profile
from tests.pipeplan.model_forms import transformer
from tests.properties import examples

TWO_BW, PIPEDREAM = partial(solve, "pipedream-2bw"), partial(solve, "pipedream")

CELL = Cell(weight_bytes=4, output_bytes=2, activation_bytes=2)


def problem(*, blocks: int = 4, memory_bytes: int = 10**6, after_forward: float = 1.0) -> PlanningProblem:
    measured = profile([CELL] * blocks)
    return PlanningProblem(
        profile=replace(measured, overheads=replace(measured.overheads, backward_after_forward=after_forward)),
        cluster=cluster((3, 20.0), (3, 5.0), memory_bytes=memory_bytes),
        batch_size=12,
    )


def best(asked: PlanningProblem, planner: Planner) -> dict[int, float]:
    """The throughput of every sub-cluster's best plan, by its devices; 0 where none fits or none can be asked for."""
    rates = {}
    for machines in sub_clusters(asked.cluster):
        try:
            answer = planner(replace(asked, cluster=machines))
        except InvalidInputError:
            answer = None
        rates[machines.devices] = rate(answer) if isinstance(answer, Plan) else 0.0
    return rates


def test_sub_clusters_grow_inside_a_server_and_then_by_servers() -> None:
    machines = cluster((3, 20.0), (2, 5.0), (2, 1.0))
    sizes = [tuple(level.size for level in smaller.levels) for smaller in sub_clusters(machines)]
    assert sizes == [(1,), (2,), (3,), (3, 2), (3, 2, 2)]
    assert sub_cluster(machines, 6).levels == machines.levels[:2]
    with pytest.raises(InvalidInputError, match=r"devices: must be whole units .*: 1, 2, 3, 6, 12, got 5"):
        sub_cluster(machines, 5)


@examples(30)
@given(
    wanted=st.floats(0.01, 4.0),
    memory_bytes=st.sampled_from([10, 20, 30, 10**6]),
    planner=st.sampled_from([TWO_BW, PIPEDREAM]),
    after_forward=st.sampled_from([1.0, 1.2, 0.5]),
)
def test_the_smallest_is_the_first_that_reaches_it(
    wanted: float, memory_bytes: int, planner: Planner, after_forward: float
) -> None:
    asked = problem(memory_bytes=memory_bytes, after_forward=after_forward)
    rates = best(asked, planner)
    reaching = [devices for devices, found in sorted(rates.items()) if found >= wanted]
    answer = smallest(asked, planner, wanted)
    assert answer.devices == (reaching[0] if reaching else None)
    if answer.plan is None:
        assert answer.fastest is not None
        assert (answer.fastest.throughput_samples_per_s or 0.0) <= max(rates.values())
    elif answer.next_fewer is not None:
        assert rate(answer.plan) >= wanted
        fewer = [devices for devices in sorted(rates) if devices < answer.plan.workers or devices < reaching[0]]
        assert answer.next_fewer.devices == [devices for devices in fewer if devices < reaching[0]][-1]
        assert (answer.next_fewer.throughput_samples_per_s or 0.0) == rates[answer.next_fewer.devices]


@pytest.mark.parametrize("planner", [TWO_BW, PIPEDREAM])
def test_a_cluster_suffices_whose_backwards_are_short_right_after_their_forwards(planner: Planner) -> None:
    """Four blocks take 1 + 2 s as profiled, and 1 + 1 s where the backward follows its forward."""
    assert smallest(problem(after_forward=0.5), planner, 1 / 10).devices == 1
    assert smallest(problem(), planner, 1 / 10).devices == 2


def test_a_cluster_suffices_whose_devices_are_faster_together() -> None:
    """Half a layer may take less than half of the time."""
    model = transformer(
        layers=2, hidden=256, heads=4, sequence=128, vocabulary=512, tensors=(1, 2), sizes=(1,), flops=1e11
    )
    whole, halves = model.forms
    quick = tuple(
        replace(
            kind, measurements=tuple(replace(m, forward_s=m.forward_s / 9, backward_s=m.backward_s / 9) for m in of)
        )
        for kind in halves.kinds
        for of in [kind.measurements]
    )
    machines = replace(cluster((4, 1e12)), device=model.device)
    asked = PlanningProblem(
        profile=replace(model, forms=(whole, replace(halves, kinds=quick))),
        cluster=machines,
        batch_size=4,
        options=Options(engine="megatron", optimizer="adam"),
    )
    planner = partial(solve, "auto")
    wanted = 0.99 * best(asked, planner)[2]
    assert wanted * sum(block.compute_s for block in model.at(1)) > 2  # whole blocks would need three devices
    assert smallest(asked, planner, wanted).devices == 2


def test_what_the_planner_cannot_be_asked_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="throughput"):
        smallest(problem(), TWO_BW, 0.0)
