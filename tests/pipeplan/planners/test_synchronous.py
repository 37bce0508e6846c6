"""Plans that train as one process does: the schedules say which they are, planners leave the others out."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from pipeplan.documents.files import parse_plan
from pipeplan.documents.identity import canonical_json, content_id, plain, text_id
from pipeplan.documents.plan import Plan, Worker
from pipeplan.errors import InvalidInputError
from pipeplan.formats import spoken_document, training
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import PLANNERS, solve
from pipeplan.planners.verify import verify
from pipeplan.programs.instructions import Forward
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.schedule import Schedule
from pipeplan.questions.largest import inner_blocks, largest
from pipeplan.schedules.registry import BUILT_IN, schedule_named
from pipeplan.simulation.predict import updates_late
from tests.pipeplan.builders import Cell, cluster, profile
from tests.pipeplan.cli.commands import cluster_document, pipeplan, profile_document, write

DELAYED = {"pipedream", "pipedream-2bw", "pipedream-vertical-sync", "data-parallel-asp"}

CELL = Cell(forward_s=1.0, backward_s=2.0, weight_bytes=100, output_bytes=10, activation_bytes=50)


def problem(**options: object) -> PlanningProblem:
    """Stages that only fit in a pipeline, whose exchange between replicas is slow: without a flush it is fastest."""
    machines = cluster((4, 400.0), (2, 40.0), memory_bytes=3_000, latency_s=0.01)
    asked = Options(**options)  # type: ignore[arg-type]
    return PlanningProblem(profile=profile([CELL] * 8), cluster=machines, batch_size=16, options=asked)


def pipelines(laws: Schedule) -> Iterator[Pipeline]:
    """Pipelines of the schedule, small ones."""
    unequal = [(2, 1), (3, 2), (1, 2, 3), (4, 2, 1)] if laws.update == "minibatch" else []
    equal = [(width,) * depth for width, depth in product((1, 2, 3), (1,) if laws.single_stage else (1, 2, 3, 4))]
    chunks = 2 if laws.v_shaped else 1
    for replicas in (*equal, *unequal):
        if len(replicas) % chunks == 0:
            for rounds in (1, 3):
                yield Pipeline(
                    replicas=replicas,
                    microbatches=rounds * len(replicas),
                    batches=8,
                    chunks=chunks,
                    v_shaped=laws.v_shaped,
                )


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_gradient_is_as_late_as_the_versions_of_its_forwards_say(name: str) -> None:
    """One process computes the gradients of update u + 1 on version u."""
    laws = schedule_named(name)
    for pipeline in pipelines(laws):
        late = 0
        for stage in range(pipeline.span):
            own = pipeline.replicas[stage]
            for replica in range(own):
                for instruction in laws.compute(pipeline, Worker(stage=stage, replica=replica)):
                    if isinstance(instruction, Forward):
                        batch = (instruction.microbatch - 1) // pipeline.batch_microbatches
                        before = {"batch": batch, "minibatch": (instruction.microbatch - 1) // own}
                        late = max(late, before.get(laws.update, batch * own + replica) - instruction.version)
        assert laws.updates_late(pipeline) == late, pipeline
    assert laws.synchronous == (name not in DELAYED)


@pytest.mark.parametrize("planner", sorted(set(PLANNERS) - {"pipedream"}))
def test_no_plan_has_late_gradients_where_that_is_asked(planner: str) -> None:
    fixed = {"time_limit_s": 1.0} if planner == "exact" else {}
    plan = solve(planner, problem(synchronous=True, **fixed))
    assert isinstance(plan, Plan)
    assert (updates_late(plan), training(plan)) == (0, "trains as one process does")
    assert not DELAYED & {each.schedule for each in plan.alternatives if each.throughput_samples_per_s}
    free = solve(planner, problem(**fixed))
    assert isinstance(free, Plan)
    assert (free.throughput_samples_per_s or 0.0) >= (plan.throughput_samples_per_s or 0.0) * 0.998
    if planner != "gpipe":
        assert updates_late(free) > 0
        assert training(free).startswith("updates weights with delay (gradients are up to ")


@pytest.mark.parametrize(
    ("planner", "options", "named"),
    [
        ("auto", {"schedule": "pipedream-2bw"}, "the schedule pipedream-2bw"),
        ("pipedream-2bw", {"schedule": "data-parallel-asp"}, "the schedule data-parallel-asp"),
        ("exact", {"schedule": "pipedream"}, "the schedule pipedream"),
        ("pipedream", {"microbatch_size": 1}, "the planner pipedream"),
        ("auto", {"straight": True}, "the planner pipedream"),
    ],
)
def test_what_cannot_be_synchronous_is_refused(planner: str, options: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidInputError, match=f"synchronous: must be off for {named}, whose gradients are"):
        solve(planner, problem(synchronous=True, **options))


def test_a_plan_on_one_stage_may_train_as_one_process_does() -> None:
    """PipeDream on one device updates after every minibatch, on the newest weights."""
    alone = replace(problem(microbatch_size=1), cluster=cluster((1, 1.0)))
    plan = solve("pipedream", alone)
    assert isinstance(plan, Plan) and training(plan) == "trains as one process does"


def test_the_answer_says_it_and_the_plan_keeps_its_id() -> None:
    plan = solve("auto", problem())
    assert isinstance(plan, Plan)
    document = spoken_document(plan)
    assert (document["synchronous"], document["training"]) == (False, training(plan))
    assert plan.certificate is not None and document["optimality"] == plan.certificate.optimality
    assert parse_plan(document) == plan and document["id"] == content_id(plan)
    asked = plain(Options(synchronous=True))
    assert "synchronous" not in plain(Options()) and asked["synchronous"] is True
    unknown = replace(plan, schedule="elsewhere")
    assert spoken_document(unknown)["synchronous"] is None
    assert "elsewhere is not installed" in training(unknown)


def test_a_check_names_a_plan_with_late_gradients_where_none_are_allowed() -> None:
    plan = solve("pipedream-2bw", problem(stages=4, schedule="pipedream-2bw"))
    assert isinstance(plan, Plan)
    origin = verify(plan, problem(stages=4, synchronous=True))[0]
    assert origin.detail == "the plan's training as one process does is off, the options fix it to on"


def test_the_largest_model_is_asked_of_the_schedules_that_are_allowed() -> None:
    asked = problem(synchronous=True)
    sizes = largest(asked, PLANNERS["pipedream-2bw"], inner_blocks(asked.profile), [1, 2])
    assert {each.schedule for each in sizes} == {"data-parallel", "1f1b", "gpipe"}


def test_the_command_says_it_in_words_and_as_a_key(tmp_path: Path) -> None:
    profile_file = write(tmp_path / "p.json", profile_document(6))
    cluster_file = write(tmp_path / "c.json", cluster_document(4))
    files = ("--profile", profile_file, "--cluster", cluster_file, "--batch-size", "8")
    output = tmp_path / "plan.json"
    for options, synchronous in (("--synchronous",), True), (("--schedule", "pipedream-2bw", "--stages", "2"), False):
        ended = pipeplan("solve", *files, *options, "--json", "-o", output)
        assert (ended.status, ended.document["synchronous"]) == (0, synchronous)
        line = {
            True: "trains as one process does",
            False: "updates weights with delay (gradients are up to 1 update late)",
        }
        assert line[synchronous] in pipeplan("solve", *files, *options).out.splitlines()
        assert pipeplan("check", output, *files, *options, "--within", "0.5").status == 0
        for question in ("smallest", "--throughput", "0.001"), ("sweep", "--over", "devices=2,4"):
            answer = pipeplan(question[0], *files, *question[1:], *options, "--json").document
            plans = [answer["plan"]] if "plan" in answer else [row["plan"] for row in answer["rows"]]
            assert {plan["synchronous"] for plan in plans} == {synchronous}
    refused = pipeplan("solve", *files, "--schedule", "pipedream", "--synchronous")
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert refused.err.startswith("error: --synchronous: must be off for the schedule pipedream, ")


def test_a_request_keeps_the_id_that_locks_hold() -> None:
    """A lock hashes the options of its request: of one that an earlier release wrote they must still be the same."""
    assert text_id(canonical_json({"o": Options()})) == "18bf07f896c33582e0a4d6b19923f6c6"
