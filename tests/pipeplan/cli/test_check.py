"""`pipeplan check`: a plan as it was made is proven; a changed one, or one with other documents, is not."""

from collections.abc import Callable
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

import pytest

from pipeplan.cli.console import CHANGED
from pipeplan.documents.files import parse_plan, plan_document
from pipeplan.planners.complete import SIMULATED_INSTRUCTIONS, play, play_later
from tests.pipeplan.cli.commands import Ended, cluster_document, pipeplan, profile_document, write


class Solved:
    """A plan that a planner made, and the documents that it was made from, as files."""

    def __init__(self, folder: Path, planner: str = "pipedream", *options: str) -> None:
        self.folder = folder
        self.profile = write(folder / "profile.json", profile_document(6))
        self.cluster = write(folder / "cluster.json", cluster_document(4))
        asked = ("--batch-size", "2", "--microbatch-size", "2", "--json")
        made = pipeplan(
            "solve", "--planner", planner, "--profile", self.profile, "--cluster", self.cluster, *asked, *options
        )
        assert made.status == 0, made.err
        self.plan: dict[str, Any] = made.document

    def checked(self, *options: str, profile: Path | None = None, cluster: Path | None = None) -> Ended:
        """What `check` says of the plan, as it is now."""
        plan = write(self.folder / "plan.json", self.plan)
        documents = ("--profile", profile or self.profile, "--cluster", cluster or self.cluster)
        return pipeplan("check", plan, *documents, "--microbatch-size", "2", "--json", *options)


def failed(ended: Ended) -> dict[str, str]:
    """What does not hold, and why."""
    return {one["what"]: one["detail"] for one in ended.document["findings"] if not one["holds"]}


@pytest.mark.parametrize(
    ("planner", "options"),
    [
        ("pipedream", ()),
        ("pipedream", ("--semantics", "paper")),
        ("pipedream-2bw", ()),
        ("gpipe", ()),
        ("exact", ()),
        ("auto", ()),
    ],
)
def test_a_plan_as_it_was_made_is_proven(tmp_path: Path, planner: str, options: tuple[str, ...]) -> None:
    solved = Solved(tmp_path, planner, *options)
    checked = solved.checked(*options)
    gap = checked.document["gap"]
    assert (checked.status, failed(checked)) == (0 if gap <= 1e-6 else CHANGED, {}), checked.out
    assert checked.document["proven"] is (gap <= 1e-6)
    assert solved.checked(*options, "--within", str(gap)).status == 0


def test_a_plan_that_may_be_far_from_the_optimum_is_not_proven(tmp_path: Path) -> None:
    """Per cents were called proven."""
    solved = Solved(tmp_path, "pipedream")
    checked = solved.checked()
    assert 0.01 < checked.document["gap"] < 0.02
    assert (checked.status, checked.document["proven"], failed(checked)) == (CHANGED, False, {})
    plan = write(tmp_path / "plan.json", solved.plan)
    asked = ("check", plan, "--profile", solved.profile, "--cluster", solved.cluster, "--microbatch-size", "2")
    for within, status in (("0.01", CHANGED), ("0.02", 0)):
        shown = pipeplan(*asked, "--within", within)
        assert (shown.status, shown.out.splitlines()[-1]) == (status, "not proven: within 1.8 % of the optimum")
    assert "within: must be a finite number of at least 0" in pipeplan(*asked, "--within", "-1").err
    assert pipeplan("solve", *asked[2:], "--planner", "pipedream", "--batch-size", "2").out.count("within 1.8 %") == 1


def test_a_plan_that_is_proven_is_said_to_be(tmp_path: Path) -> None:
    solved = Solved(tmp_path, "pipedream-2bw")
    plan = write(tmp_path / "plan.json", solved.plan)
    documents = ("--profile", solved.profile, "--cluster", solved.cluster)
    shown = pipeplan("check", plan, *documents, "--microbatch-size", "2")
    assert (shown.status, shown.out.splitlines()[-1]) == (0, "proven optimal to 1e-06")


@pytest.mark.parametrize(
    ("options", "name", "held", "asked"),
    [
        (("--stages", "5"), "number of stages", "2", "5"),
        (("--schedule", "gpipe"), "schedule", "1f1b", "gpipe"),
        (("--batch-size", "6"), "batch size", "4", "6"),
        (("--chunks", "2"), "number of stages of a rank", "1", "2"),
        (("--recompute",), "recomputation", "off", "on"),
        (("--straight",), "stages of one replica", "off", "on"),
        (("--force-cut", "2"), "cuts among the forced ones", "none", "2"),
        (("--forbid-cut", "1"), "cuts among the forbidden ones", "1", "none"),
        (("--engine", "megatron"), "engine", "pipeplan", "megatron"),
        (("--data", "4"), "number of replicas", "2", "4"),
        (("--tensor", "2"), "tensor parallelism", "1", "2"),
        (("--sharding", "optimizer"), "sharding", "none", "optimizer"),
        (("--offload", "optimizer"), "offloading", "none", "optimizer"),
    ],
)
def test_options_that_the_plan_contradicts_are_named(
    tmp_path: Path, options: tuple[str, ...], name: str, held: str, asked: str
) -> None:
    """The space of the options was empty, or slower: nothing in it was faster, and the plan was called proven."""
    solved = Solved(tmp_path, "auto", "--batch-size", "4", "--stages", "2", "--schedule", "1f1b", "--no-recompute")
    checked = solved.checked(*options)
    assert checked.status == CHANGED
    assert f"the plan's {name} is {held}, the options fix it to {asked}" in failed(checked)["origin"]


def test_other_documents_are_named(tmp_path: Path) -> None:
    solved = Solved(tmp_path)
    slower = write(tmp_path / "other.json", profile_document(6, weight_bytes=2000))
    checked = solved.checked(profile=slower)
    assert checked.status == CHANGED
    assert f"the plan's profile is {solved.plan['profile_id']}, this is " in failed(checked)["origin"]
    checked = solved.checked(cluster=write(tmp_path / "fewer.json", cluster_document(3)))
    assert checked.status == CHANGED
    assert f"the plan's cluster is {solved.plan['cluster_id']}, this is " in failed(checked)["origin"]


def better(plan: dict[str, Any]) -> None:
    """The plan claims to be twice as fast when it is played."""
    plan["simulated"]["throughput_samples_per_s"] *= 2


def unplayed(plan: dict[str, Any]) -> None:
    """It says nothing of how it plays."""
    plan["simulated"] = None


def overstated(plan: dict[str, Any]) -> None:
    """Its certificate claims a bound that the plan itself is below."""
    plan["certificate"]["bound"] *= 2


def unproven(plan: dict[str, Any]) -> None:
    """It has no certificate."""
    plan["certificate"] = None


def faster(plan: dict[str, Any]) -> None:
    """Its second stage computes in half the time, and its play is that of these costs."""
    plan["costs"][1]["forward_s"] /= 2
    plan["simulated"] = plan_document(replace(parsed := parse_plan(plan), simulated=play(parsed)))["simulated"]


def lighter(plan: dict[str, Any]) -> None:
    """Its first stage has less to keep of a weight version, and its play agrees."""
    plan["costs"][0]["version_bytes"] //= 2
    plan["simulated"] = plan_document(replace(parsed := parse_plan(plan), simulated=play(parsed)))["simulated"]


@pytest.mark.parametrize(
    ("change", "field"), [(faster, "costs[1].forward_s is "), (lighter, "costs[0].version_bytes is ")]
)
def test_costs_that_the_profile_does_not_give_are_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], field: str
) -> None:
    solved = Solved(tmp_path, "pipedream-2bw", "--stages", "2")
    change(solved.plan)
    checked = solved.checked("--stages", "2")
    assert checked.status == CHANGED
    found = failed(checked)
    assert "costs" in found and "play" not in found
    assert found["costs"].startswith(field)


@pytest.mark.parametrize(
    ("change", "what", "detail"),
    [
        (better, "play", "samples/s; it says "),
        (unplayed, "play", "it does not hold what its streams give: played, "),
        (overstated, "optimality", "the certificate"),
        (unproven, "optimality", "the plan holds no numbers that prove it"),
    ],
)
def test_a_plan_that_was_changed_is_not_proven(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], what: str, detail: str
) -> None:
    solved = Solved(tmp_path)
    change(solved.plan)
    checked = solved.checked()
    assert checked.status == CHANGED
    assert checked.document["proven"] is False
    assert list(failed(checked)) == [what]
    assert detail in failed(checked)[what]


@pytest.mark.campaign
def test_a_play_that_was_added_is_played_again_within_its_own_limit(tmp_path: Path) -> None:
    """Where planners play no longer than that, nothing can be said of what a longer play gave."""
    solved = Solved(tmp_path)
    plan = parse_plan(solved.plan)
    long = replace(plan, microbatches=SIMULATED_INSTRUCTIONS // (4 * 6 * plan.depth), simulated=None)
    long = replace(long, batch_size=long.microbatches * long.microbatch_size * lcm(*long.replicas))
    assert play(long) is None
    added = play_later(long, instructions=2 * SIMULATED_INSTRUCTIONS)
    assert added is not None and added.added_within == 2 * SIMULATED_INSTRUCTIONS
    solved.plan = plan_document(replace(long, simulated=added))
    assert "play" not in failed(solved.checked())
    solved.plan = plan_document(replace(long, simulated=replace(added, added_within=SIMULATED_INSTRUCTIONS)))
    assert "yet it holds what they gave" in failed(solved.checked())["play"]


def test_what_auto_searched_is_searched_again(tmp_path: Path) -> None:
    checked = Solved(tmp_path, "auto").checked()
    assert (checked.status, failed(checked)) == (0, {}), checked.out
    (optimality,) = (one["detail"] for one in checked.document["findings"] if one["what"] == "optimality")
    assert "configurations" in optimality and "were ruled out by their bound" in optimality


def test_the_best_of_a_narrower_search_is_not_the_best_of_all(tmp_path: Path) -> None:
    solved = Solved(tmp_path, "auto", "--schedule", "naive", "--stages", "3")
    assert solved.checked("--schedule", "naive", "--stages", "3").status == 0
    checked = solved.checked()
    assert checked.status == CHANGED
    assert "the certificate says that none plays more than" in failed(checked)["optimality"]


def test_what_a_plan_says_of_its_options_need_not_be_given(tmp_path: Path) -> None:
    solved = Solved(tmp_path, "auto", "--optimizer", "adam", "--memory", "paper")
    assert solved.checked().status == 0
    assert solved.checked("--optimizer", "adam").status == 0
    checked = solved.checked("--optimizer", "momentum")
    assert "the plan's optimizer is adam, this is momentum" in failed(checked)["origin"]
    checked = solved.checked("--batch-size", "3")
    assert checked.status == CHANGED and "optimality" in failed(checked)


def test_a_search_without_a_witness_is_no_proof(tmp_path: Path) -> None:
    paper = ("--semantics", "paper")
    checked = Solved(tmp_path, "pipedream-2bw", *paper).checked(*paper)
    assert checked.status == CHANGED
    assert failed(checked)["optimality"].startswith("by ")
