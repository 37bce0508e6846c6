"""A profile of one type of device on a cluster of another: refused, warned of, or planned as if."""

from dataclasses import replace

import pytest

from pipeplan.documents.calibration import Calibration, Term
from pipeplan.documents.identity import canonical_json
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Device, Profile
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import PLANNERS, solve
from tests.pipeplan.builders import PLENTY, Cell, cluster, profile
from tests.pipeplan.planners.exact.mixed import Gpu, mixed_problem, profile_on

CELLS = [Cell(weight_bytes=4, output_bytes=2, activation_bytes=1)] * 4
V100, H100 = "V100-SXM2-16GB", "H100-SXM5-80GB"


def device(name: str) -> Device:
    return Device(name=name, memory_bytes=PLENTY)


def on(name: str) -> Profile:
    return replace(profile(CELLS), device=device(name))


def problem(profiled: str, present: str, **options: object) -> PlanningProblem:
    made = replace(cluster((2, 1e9)), device=device(present))
    return PlanningProblem(profile=on(profiled), cluster=made, batch_size=4, options=Options(**options))  # type: ignore[arg-type]


def mixed(*names: str, types: tuple[str, ...], as_if: bool = False) -> PlanningProblem:
    """Profiles of these names on a cluster of these types."""
    asked = mixed_problem(CELLS, [Gpu(name=name) for name in types])
    first, *others = (profile_on(profile(CELLS), Gpu(name=name)) for name in names)
    return replace(asked, profile=first, other_profiles=tuple(others), options=Options(as_if=as_if))


@pytest.mark.parametrize(
    ("profiled", "present"),
    [(V100, H100), ("Tesla V100-SXM2-16GB", "h100-sxm"), ("NVIDIA A100-SXM4-40GB", "a100-80gb"), ("V100", "A100")],
)
def test_two_known_types_are_refused_with_what_to_do(profiled: str, present: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        problem(profiled, present)
    assert (refused.value.field, refused.value.value) == ("profile.device.name", profiled)
    assert refused.value.rule == (
        f"must be the cluster's type of device, {present!r}: profile the model on such a device, or plan as if it were "
        "one (--as-if, options.as_if)"
    )


@pytest.mark.parametrize(
    ("profiled", "present"),
    [(V100, V100), (V100, "Tesla V100-SXM2-16GB"), ("gpu", "GPU"), ("unknown", "unknown"), ("unknown", "")],
)
def test_one_type_in_two_spellings_is_planned_without_a_word(profiled: str, present: str) -> None:
    assert problem(profiled, present).warnings == ()


@pytest.mark.parametrize(
    ("profiled", "present", "sentence"),
    [
        (
            "unknown",
            H100,
            f"the profile does not name its device: its figures are taken as those of the cluster's device, {H100!r}",
        ),
        (
            "",
            "gpu",
            "the profile does not name its device: its figures are taken as those of the cluster's device, 'gpu'",
        ),
        (V100, "unknown", f"the cluster does not name its device: it is taken to be the profile's, {V100!r}"),
        (
            "gpu",
            H100,
            f"the profile is of 'gpu', the cluster of {H100!r}: the figures are of 'gpu', and valid only if both "
            "names mean the same type",
        ),
        (
            H100,
            "H100",
            f"the profile is of {H100!r}, the cluster of 'H100': the figures are of {H100!r}, and valid only if both "
            "names mean the same type",
        ),
    ],
)
def test_what_may_not_be_the_clusters_device_is_a_warning(profiled: str, present: str, sentence: str) -> None:
    assert problem(profiled, present).warnings == (sentence,)


@pytest.mark.parametrize("profiled", [V100, "gpu"])
def test_as_if_allows_it_and_says_whose_figures_they_are(profiled: str) -> None:
    assert problem(profiled, H100, as_if=True).warnings == (
        f"planned as if {H100!r} were {profiled!r}: the figures are of {profiled!r}, the profile's device; only links "
        "and memory limits are the cluster's",
    )


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_says_it_in_its_plan_and_plans_as_for_its_own_device(planner: str) -> None:
    options = {"microbatch_size": 1} if planner == "pipedream" else {}
    other = solve(planner, problem(V100, H100, as_if=True, **options))
    own = solve(planner, problem(V100, V100, **options))
    assert isinstance(other, Plan)
    assert isinstance(own, Plan)
    assert other.warnings == problem(V100, H100, as_if=True).warnings
    assert replace(other, warnings=(), cluster_id=own.cluster_id) == own
    again = solve(planner, problem(V100, H100, as_if=True, **options))
    assert canonical_json(again) == canonical_json(other)


def test_as_if_changes_nothing_where_the_types_are_one() -> None:
    assert solve("gpipe", problem(V100, V100, as_if=True)) == solve("gpipe", problem(V100, V100))


def test_a_long_name_is_quoted_in_part() -> None:
    assert all(len(sentence) < 400 for sentence in problem("x" * 10**6, "y" * 10**5).warnings)


def test_a_calibration_corrects_the_clusters_device_however_it_is_spelled() -> None:
    asked = problem(V100, "Tesla V100-SXM2-16GB")
    found = Calibration(
        model=asked.profile.model,
        device=V100,
        dtype="float32",
        profile_id="p",
        cluster_id="c",
        runs=(),
        context_bytes=Term(value=10**6),
    )
    assert replace(asked, calibration=found).corrected.cluster.device.context_bytes == 10**6
    other = problem(V100, H100, as_if=True)
    assert replace(other, calibration=found).corrected.cluster.device.context_bytes == 0
    unnamed = replace(problem("unknown", H100), calibration=replace(found, device="unknown"))
    assert unnamed.corrected.cluster.device.context_bytes == 10**6


def test_profiles_find_their_types_however_these_are_spelled() -> None:
    asked = mixed("Tesla V100-SXM2-16GB", "NVIDIA H100 80GB HBM3", types=(H100, V100))
    assert asked.profile_on(H100).device.name == "NVIDIA H100 80GB HBM3"
    assert asked.profile_on(V100).device.name == "Tesla V100-SXM2-16GB"
    assert asked.warnings == ()


def test_a_profile_without_a_device_takes_the_type_that_is_left() -> None:
    asked = mixed("unknown", V100, types=(V100, H100))
    assert asked.profile_on(H100).device.name == "unknown"
    assert asked.warnings == (
        f"the profile does not name its device: its figures are taken as those of the cluster's device, {H100!r}",
    )


@pytest.mark.parametrize("names", [(V100, "a100-80gb"), (V100, "gpu"), (V100,), ("unknown", "")])
def test_profiles_that_are_not_of_the_types_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInputError, match="must be one profile for each type of device"):
        mixed(*names, types=(V100, H100))


def test_as_if_gives_types_without_a_profile_those_that_are_left() -> None:
    asked = mixed("a100-80gb", V100, types=(V100, H100), as_if=True)
    assert asked.profile_on(V100).device.name == V100
    assert asked.profile_on(H100).device.name == "a100-80gb"
    assert [sentence.partition(":")[0] for sentence in asked.warnings] == [f"planned as if {H100!r} were 'a100-80gb'"]
    with pytest.raises(InvalidInputError, match="must be one profile for each type of device"):
        mixed(V100, types=(V100, H100), as_if=True)


def test_as_if_one_profile_may_stand_for_several_types() -> None:
    asked = mixed(V100, V100, types=(V100, H100), as_if=True)
    plan = solve("exact", asked)
    assert isinstance(plan, Plan)
    assert len(plan.warnings) == 1
