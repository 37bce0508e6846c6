"""Models with tied weights: plans are priced with the exchange that their run has, and are those that can be run."""

from dataclasses import replace

import pytest

from pipeplan.costs.memory import rank_bytes
from pipeplan.costs.tied import copies_apart
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.documents.tied import TiedWeights
from pipeplan.errors import InvalidInputError
from pipeplan.planners.auto.planner import played_spaces, searched_schedules
from pipeplan.planners.bound import least_batch_s
from pipeplan.planners.complete import play
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.planners.verify import verify
from pipeplan.programs.communicate import AmongStages
from pipeplan.programs.instructions import ReduceTied
from pipeplan.programs.timeline import throughput_samples_per_s
from pipeplan.questions.largest import repeated
from pipeplan.simulation.predict import predict, program_of
from tests.pipeplan.builders import Cell, cluster, profile

MACHINES = cluster((4, 100.0), memory_bytes=2000)
MODEL = profile([Cell(weight_bytes=20, output_bytes=1, activation_bytes=2) for _ in range(8)], sizes=(1, 2))
EMBEDDING = TiedWeights(block=0, also=(7,), weight_bytes=20)
TIED = replace(MODEL, tied=(EMBEDDING,))


def answer(options: Options, planner: str = "auto", *, tied: bool = True, machines: Cluster = MACHINES) -> Plan:
    problem = PlanningProblem(profile=TIED if tied else MODEL, cluster=machines, batch_size=16, options=options)
    plan = solve(planner, problem)
    assert isinstance(plan, Plan)
    return plan


def test_a_batch_is_longer_by_the_sum_of_the_copies_gradients() -> None:
    """20 bytes between two devices, at 100 bytes a second: after the batch's last backward, before its update."""
    pipelined = Options(schedule="1f1b", stages=4, microbatch_size=1)
    with_ties, without = (answer(pipelined, tied=tied) for tied in (True, False))
    (tied,) = with_ties.tied
    assert tied.stages == (0, 3)
    assert tied.seconds == pytest.approx(0.2)
    assert with_ties.throughput_samples_per_s and without.throughput_samples_per_s
    longer_s = 16 / with_ties.throughput_samples_per_s - 16 / without.throughput_samples_per_s
    assert longer_s == pytest.approx(0.2)
    assert least_batch_s(with_ties) == pytest.approx(least_batch_s(without) + 0.2)


def test_under_2bw_the_stages_wait_for_each_other_in_every_batch() -> None:
    """The last stage finishes a batch three ways back before the first one does."""
    pipelined = Options(schedule="pipedream-2bw", stages=4, microbatch_size=1, recompute=False)
    with_ties, without = (answer(pipelined, "pipedream-2bw", tied=tied) for tied in (True, False))
    assert with_ties.throughput_samples_per_s and without.throughput_samples_per_s
    longer_s = 16 / with_ties.throughput_samples_per_s - 16 / without.throughput_samples_per_s
    backward_s = max(each.backward_s for each in with_ties.costs)
    assert longer_s > 3 * backward_s
    assert least_batch_s(with_ties) == pytest.approx(16 / with_ties.throughput_samples_per_s, rel=0.005)  # bound 10


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "1f1b-interleaved"])
def test_bounds_of_splits_count_the_sum(schedule: str) -> None:
    """The first and the last stage sum 20 bytes, whatever the stages are: no update begins before that."""
    asked = Options(schedule=schedule, stages=4, microbatch_size=1, recompute=False)
    most, most_of_any = [], []
    for model in (TIED, MODEL):
        problem = PlanningProblem(profile=model, cluster=MACHINES, batch_size=16, options=asked)
        configuration = next(iter(played_spaces(problem, [schedule])[0].configurations()))
        stops = configuration.split()
        assert stops
        most.append(configuration.most_of(stops))
        most_of_any.append(configuration.most_of_any())
    assert 16 / most[0] - 16 / most[1] == pytest.approx(0.2)
    assert most_of_any[0] < most_of_any[1]


def test_the_price_is_that_of_the_streams_that_are_run() -> None:
    plan = answer(Options(schedule="1f1b", stages=2, microbatch_size=2))
    program = program_of(plan, batches=1)
    assert all(any(isinstance(i, ReduceTied) for i in stream.instructions) for stream in program.streams)
    assert throughput_samples_per_s(predict(plan, batches=3)) == pytest.approx(plan.throughput_samples_per_s)


def test_a_copy_counts_in_the_memory_of_its_stage() -> None:
    """Weights, gradients and Adam's two states."""
    pipelined = Options(schedule="1f1b", stages=2, microbatch_size=2, optimizer="adam")
    with_ties, without = (answer(pipelined, tied=tied) for tied in (True, False))
    assert with_ties.stages[0].memory_bytes == without.stages[0].memory_bytes
    assert with_ties.stages[1].memory_bytes == without.stages[1].memory_bytes + 4 * EMBEDDING.weight_bytes


def test_a_plan_whose_copy_does_not_fit_is_no_answer() -> None:
    pipelined = Options(schedule="1f1b", stages=2, microbatch_size=1, optimizer="adam")
    most = max(stage.memory_bytes for stage in answer(pipelined, tied=False).stages)
    tight = replace(MACHINES, device=replace(MACHINES.device, memory_bytes=most))
    assert answer(pipelined, tied=False, machines=tight)
    problem = PlanningProblem(profile=TIED, cluster=tight, batch_size=16, options=pipelined)
    assert isinstance(solve("auto", problem), Infeasible)


def test_copies_that_any_stages_have_are_told_from_those_that_some_have() -> None:
    every = (TiedWeights(block=0, also=(2, 5), weight_bytes=3), TiedWeights(block=3, also=(4,), weight_bytes=1))
    assert copies_apart(every, 6, 1) == (0, 0, 0, 0, 0, 0)
    assert copies_apart(every, 6, 2) == (0, 0, 0, 0, 0, 3)  # a stage has up to five blocks
    assert copies_apart(every, 6, 4) == (0, 0, 0, 0, 0, 3)  # up to three: block 0 may have 2 beside it
    assert copies_apart(every, 6, 5) == (0, 0, 3, 0, 0, 3)
    assert copies_apart(every, 6, 6) == (0, 0, 3, 0, 1, 3)


def test_stages_that_planners_propose_fit_with_their_copies() -> None:
    """Once a stage had room for its blocks alone, and the copy made it no answer."""
    adam = Options(optimizer="adam", recompute=False)
    for memory_bytes in (200, 260, 320, 400, 500):
        tight = replace(MACHINES, device=replace(MACHINES.device, memory_bytes=memory_bytes))
        problem = PlanningProblem(profile=TIED, cluster=tight, batch_size=16, options=adam)
        for space in played_spaces(problem, searched_schedules(adam)):
            for configuration in space.configurations():
                stops = configuration.split()
                plan = configuration.plan(stops) if stops else None
                assert plan is None or max(rank_bytes(plan)) <= memory_bytes


@pytest.mark.parametrize("planner", ["auto", "pipedream"])
def test_plans_that_no_run_executes_are_no_answers(planner: str) -> None:
    problem = PlanningProblem(
        profile=TIED, cluster=MACHINES, batch_size=16, options=Options(schedule="pipedream", microbatch_size=2)
    )
    plan = solve(planner, problem)
    assert isinstance(plan, Plan) and not plan.tied
    assert plan.depth == 1


def test_papers_plans_are_priced_as_the_paper_does_with_a_warning() -> None:
    slow = cluster((4, 2.0))
    plan = answer(Options(semantics="paper", microbatch_size=1), "pipedream", machines=slow)
    assert plan.depth > 1 and plan.tied
    assert any("share weights" in sentence for sentence in plan.warnings)
    simulated = play(plan)
    assert simulated is not None
    with pytest.raises(InvalidInputError, match="share weights"):
        predict(plan, batches=2, among_stages=AmongStages(tied=tuple(each.stages for each in plan.tied)))


def test_a_plan_with_ties_is_computed_again_from_its_profile() -> None:
    problem = PlanningProblem(profile=TIED, cluster=MACHINES, batch_size=16, options=Options(schedule="1f1b", stages=4))
    plan = solve("auto", problem)
    assert isinstance(plan, Plan) and plan.tied
    assert [finding for finding in verify(plan, problem) if not finding.holds] == []
    forgotten = replace(plan, tied=())
    assert not all(finding.holds for finding in verify(forgotten, problem))


def test_a_profile_without_ties_keeps_its_id() -> None:
    assert content_id(replace(MODEL, tied=())) == content_id(MODEL) != content_id(TIED)


def test_a_model_of_more_layers_has_the_same_ties() -> None:
    longer = repeated(TIED, range(1, 7), 3)
    assert longer.tied == (TiedWeights(block=0, also=(19,), weight_bytes=20),)
    everywhere = replace(MODEL, tied=(TiedWeights(block=1, also=(2,), weight_bytes=1),))
    assert repeated(everywhere, range(1, 7), 2).tied[0].blocks == (1, 2, 7, 8)


@pytest.mark.parametrize(
    ("tied", "error"),
    [
        (replace(EMBEDDING, also=(8,)), r"tied\.0: must be below the number of blocks \(8\), got 8"),
        (replace(EMBEDDING, weight_bytes=21), r"tied\.0\.weight_bytes: must be at most the weights of block 0, got 21"),
    ],
)
def test_ties_that_cannot_be_are_refused(tied: TiedWeights, error: str) -> None:
    with pytest.raises(InvalidInputError, match=error):
        replace(MODEL, tied=(tied,))


def test_a_block_is_not_tied_to_itself() -> None:
    with pytest.raises(InvalidInputError, match="also"):
        replace(EMBEDDING, also=(0,))
