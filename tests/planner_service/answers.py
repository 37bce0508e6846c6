"""A planner for the service's tests: answers at once, and says no when the devices' memory is too small."""

from dataclasses import replace

from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Alternative, Answer, ClosedForm, Infeasible, Plan, Reason, Simulated, Stage, Worker
from pipeplan.documents.stage_costs import StageCosts
from pipeplan.planners.problem import PlanningProblem


def halve(planner: str, problem: PlanningProblem) -> Answer:
    """Cuts the model in two halves, under 1F1B; infeasible where a half's weights do not fit."""
    blocks = problem.profile.blocks
    middle = len(blocks) // 2
    stages = []
    for index, (start, stop) in enumerate(((0, middle), (middle, len(blocks)))):
        weight_bytes = sum(block.weight_bytes for block in blocks[start:stop])
        missing_bytes = weight_bytes - problem.cluster.device.memory_bytes
        if missing_bytes > 0:
            reason = Reason(
                rule="memory", detail="too large", configurations=1, stage=index, missing_bytes=missing_bytes
            )
            return Infeasible(planner=planner, reasons=(reason,), configurations_considered=1)
        stages.append(Stage(start=start, stop=stop, time_s=0.03, memory_bytes=weight_bytes))
    return _plan(planner, problem, tuple(stages))


def halve_unplayed(planner: str, problem: PlanningProblem) -> Answer:
    """The same, as if its streams were too long to be played."""
    answer = halve(planner, problem)
    return replace(answer, simulated=None) if isinstance(answer, Plan) else answer


def _plan(planner: str, problem: PlanningProblem, stages: tuple[Stage, ...]) -> Plan:
    costs = StageCosts(
        microbatch_size=2, forward_s=0.01, backward_s=0.02, backward_input_s=0.01, backward_weight_s=0.01
    )
    slower = Alternative(
        schedule="gpipe",
        depth=2,
        width=1,
        microbatch_size=2,
        microbatches=problem.batch_size // 2,
        recompute=False,
        throughput_samples_per_s=None,
        memory_bytes=2**30,
        reason="slower: 50 samples/s",
        closed_form_samples_per_s=50.0,
    )
    return Plan(
        planner=planner,
        cost_model="test",
        model=problem.profile.model,
        dtype=problem.profile.dtype,
        profile_id=content_id(problem.profile),
        cluster_id=content_id(problem.cluster),
        batch_size=problem.batch_size,
        stages=stages,
        costs=(costs, costs),
        placement=(Worker(stage=0), Worker(stage=1)),
        schedule="1f1b",
        microbatch_size=2,
        microbatches=problem.batch_size // 2,
        optimizer="sgd",
        memory_accounting="training",
        closed_form=ClosedForm(time_per_microbatch_s=0.025, throughput_samples_per_s=80.0, bubble_fraction=0.05),
        simulated=Simulated(
            batches=4,
            throughput_samples_per_s=60.0,
            bubble_fraction=0.1,
            busy_fraction=(0.9, 0.9),
            peak_memory_bytes=tuple(stage.memory_bytes for stage in stages),
        ),
        optimal_in_flight=2,
        configurations_considered=2,
        alternatives=(slower,),
    )
