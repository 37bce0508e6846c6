"""The planners by name, and what all of them share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeplan.documents.files import answer_document, dump, parse, parse_plan
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.documents.profile import Device, Model, Profile
from pipeplan.errors import InvalidInputError
from pipeplan.imports.pipedream_graph import import_pipedream_graph
from pipeplan.planners.complete import play
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import PLANNERS, solve
from pipeplan.programs.check import check
from pipeplan.simulation.predict import predict, program_of
from tests.pipeplan.builders import Cell, cluster, profile
from tests.schedules import ASP

PROFILES = Path(__file__).parents[2] / "data" / "profiles"


def public_profile(name: str) -> Profile:
    return import_pipedream_graph(
        (PROFILES / f"{name}.graph.txt").read_text(encoding="utf-8"),
        microbatch_size=64,
        model=Model(name=name),
        device=Device(name="unknown", memory_bytes=16 * 2**30),
        dtype="float32",
    )


def test_an_unknown_planner_is_refused_by_name() -> None:
    problem = PlanningProblem(profile=profile([Cell()]), cluster=cluster((1, 1.0)), batch_size=1)
    with pytest.raises(InvalidInputError, match=r"planner: must be one of pipedream, .* got 'magic'"):
        solve("magic", problem)


@pytest.mark.each_case
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("name", ["vgg16", "resnet50", "gnmt"])
def test_public_profiles_are_planned_and_their_streams_run(planner: str, name: str) -> None:
    machines = cluster((4, 1e10), (2, 1.25e9), memory_bytes=16 * 10**9)
    plan = solve(planner, PlanningProblem(profile=public_profile(name), cluster=machines, batch_size=512))
    assert isinstance(plan, Plan)
    check(program_of(plan, batches=2))
    timeline = predict(plan, batches=2)
    assert len(timeline.lanes) == plan.workers
    assert max(lane.peak_memory_bytes for lane in timeline.lanes) <= machines.device.memory_bytes


@pytest.mark.parametrize(("machines", "replicas"), [(4, (3, 1)), (8, (7, 1)), (16, (15, 1))])
def test_vgg16_keeps_its_dense_end_on_one_machine(machines: int, replicas: tuple[int, ...]) -> None:
    """PipeDream (2018), table 1, chose 2-1-1 and 7-1 on its own profile; this is its public one, at 10 Gb/s."""
    problem = PlanningProblem(
        profile=public_profile("vgg16"),
        cluster=cluster((machines, 1.25e9)),
        batch_size=64,
        options=Options(synchronisation="parameter-server"),
    )
    plan = solve("pipedream", problem)
    assert isinstance(plan, Plan)
    assert plan.replicas == replicas


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_plans_document_parses_back_to_the_same_plan(planner: str) -> None:
    blocks = [Cell(weight_bytes=4, output_bytes=2)] * 3
    problem = PlanningProblem(
        profile=profile(blocks), cluster=cluster((3, 1.0)), batch_size=6, options=Options(microbatch_size=1)
    )
    plan = solve(planner, problem)
    assert isinstance(plan, Plan)
    again = parse_plan(dump(answer_document(plan) | {"solve_time_s": 0.1}))
    assert again == plan
    assert content_id(again) == content_id(plan)


def test_one_pipeline_stands_for_all_replicas_of_equal_width() -> None:
    """What is simulated for the plan is what playing every worker gives."""
    blocks = [Cell(weight_bytes=8, output_bytes=1, activation_bytes=3), Cell(weight_bytes=2, activation_bytes=1)]
    options = Options(schedule="pipedream-2bw", stages=2, microbatch_size=1, recompute=False)
    problem = PlanningProblem(profile=profile(blocks), cluster=cluster((4, 8.0)), batch_size=8, options=options)
    plan = solve("pipedream-2bw", problem)
    assert isinstance(plan, Plan)
    assert plan.width == 2
    assert plan.simulated is not None
    timeline = predict(plan, batches=plan.simulated.batches)
    assert plan.simulated.bubble_fraction == pytest.approx(timeline.bubble_fraction)
    assert plan.simulated.peak_memory_bytes == tuple(lane.peak_memory_bytes for lane in timeline.lanes)
    assert plan.simulated.busy_fraction == pytest.approx(timeline.busy_fraction)


def test_a_plan_whose_batch_is_too_long_to_play_is_extrapolated_from_shorter_ones() -> None:
    """Equal stages of 3 s: a batch of m microbatches takes 3 (m + d - 1) s."""
    problem = PlanningProblem(
        profile=profile([Cell()] * 4),
        cluster=cluster((4, 1.0)),
        batch_size=100_000,
        options=Options(schedule="1f1b", stages=4, microbatch_size=1),
    )
    plan = solve("pipedream-2bw", problem)
    assert isinstance(plan, Plan)
    assert plan.simulated is not None
    assert plan.simulated.extrapolated_from == 12
    assert plan.simulated.throughput_samples_per_s == pytest.approx(100_000 / (3 * 100_003), rel=1e-12)
    assert plan.simulated.bubble_fraction == pytest.approx(3 / 100_003, rel=1e-9)


@pytest.mark.parametrize("bandwidth", [1.0, 0.01, 0.002])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_long_batch_beside_its_exchange_is_extrapolated_to_what_the_whole_gives(
    stages: int, bandwidth: float
) -> None:
    """2BW, 100 microbatches of 12 s a stage or less: the exchange is hidden, about as long as a batch, or longer."""
    problem = PlanningProblem(
        profile=profile([Cell(weight_bytes=4, output_bytes=0)] * 4),
        cluster=cluster((4, bandwidth)),
        batch_size=400 // stages,
        options=Options(schedule="pipedream-2bw", stages=stages, microbatch_size=1),
    )
    plan = solve("pipedream-2bw", problem)
    assert isinstance(plan, Plan)
    short, whole = play(plan, instructions=700), play(plan, instructions=10**6)
    assert short is not None and whole is not None
    assert (short.extrapolated_from, whole.extrapolated_from) == (3 * stages, None)
    assert short.throughput_samples_per_s == pytest.approx(whole.throughput_samples_per_s, rel=0.03)


@pytest.mark.parametrize("bandwidth", [1e6, 1.5, 1.2])
def test_asp_is_planned_with_room_for_all_gradients_and_the_link_that_they_share(bandwidth: float) -> None:
    """A batch of 4 microbatches of 12 s on each of 4 replicas; 4 exchanges of 16 bytes."""
    problem = PlanningProblem(
        profile=profile([Cell(weight_bytes=4)] * 4),
        cluster=cluster((4, bandwidth)),
        batch_size=16,
        options=Options(schedule=ASP, microbatch_size=1, optimizer="sgd"),
    )
    plan = solve("pipedream-2bw", problem)
    assert isinstance(plan, Plan)
    assert plan.width == 4
    assert plan.stages[0].memory is not None
    assert plan.stages[0].memory.gradients == 4 * plan.stages[0].memory.weights
    assert plan.closed_form.time_per_microbatch_s == pytest.approx(max(12.0, 4 * 16 / bandwidth / 4))
    assert plan.simulated is not None
    assert plan.simulated.throughput_samples_per_s == pytest.approx(plan.closed_form.throughput_samples_per_s, rel=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [("microbatch_size", 0), ("stages", -1), ("recompute_factor", float("nan")), ("recompute_factor", -2.0)],
)
def test_options_out_of_range_are_refused_by_field_rule_and_value(field: str, value: float) -> None:
    with pytest.raises(InvalidInputError) as caught:
        replace(Options(), **{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert "must be a" in caught.value.rule
    assert repr(value) in str(caught.value)


def test_a_stored_factor_that_no_plan_can_have_still_loads_but_makes_no_problem() -> None:
    """Requests were stored before the rule was there."""
    stored = parse(Options, '{"recompute_factor": 0.5}')
    with pytest.raises(InvalidInputError) as caught:
        PlanningProblem(profile=profile([Cell()]), cluster=cluster((2, 1.0)), batch_size=4, options=stored)
    assert (caught.value.field, caught.value.value) == ("recompute_factor", 0.5)


@pytest.mark.parametrize("planner", ["gpipe", "auto"])
@pytest.mark.parametrize(
    "degree",
    [{"tensor": 2}, {"context": 2}, {"sequence_parallel": True}, {"sharding": "weights"}, {"offload": "both"}],
)
def test_our_runtime_has_no_other_degrees_than_stages_and_replicas(planner: str, degree: dict[str, Any]) -> None:
    problem = PlanningProblem(
        profile=profile([Cell()] * 2), cluster=cluster((2, 1.0)), batch_size=4, options=Options(**degree)
    )
    with pytest.raises(InvalidInputError, match=f"{next(iter(degree))}: must be left out for the engine pipeplan"):
        solve(planner, problem)


def test_degrees_that_change_nothing_may_be_said() -> None:
    said = Options(tensor=1, context=1, expert=1, sequence_parallel=False, sharding="none", offload="none")
    problem = PlanningProblem(profile=profile([Cell()] * 2), cluster=cluster((2, 1.0)), batch_size=4)
    assert solve("gpipe", replace(problem, options=said)) == solve("gpipe", problem)


def test_an_answer_says_what_the_profile_leaves_out_and_which_devices_stay_idle() -> None:
    """A model of two blocks was answered with two of three devices, without a word."""
    note = "tensor 8 not considered: must divide num_key_value_heads, which is 4"
    noted = replace(profile([Cell(weight_bytes=8), Cell(weight_bytes=8)]), notes=(note,))
    problem = PlanningProblem(
        profile=noted, cluster=cluster((3, 1e9)), batch_size=4, options=Options(stages=2, microbatch_size=1)
    )
    plan = solve("auto", problem)
    assert isinstance(plan, Plan)
    idle = "1 of 3 devices stay idle: no plan of the search is faster with them"
    assert plan.workers == 2 and plan.warnings == (note, idle)
    full = replace(problem, cluster=cluster((3, 1e9), memory_bytes=1))
    answer = solve("auto", full)
    assert isinstance(answer, Infeasible)
    rule, _, detail = note.partition(": ")
    assert (answer.reasons[-1].rule, answer.reasons[-1].detail) == (rule, detail)
