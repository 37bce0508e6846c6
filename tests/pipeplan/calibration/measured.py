"""Runs whose true costs are known: hidden costs, played into a timeline, as a runtime would have recorded it."""

from dataclasses import replace

from pipeplan.calibration.observed import costs_of
from pipeplan.calibration.samples import MeasuredRun
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.plan import ClosedForm, Plan, Stage
from pipeplan.documents.profile import Overheads, Profile
from pipeplan.planners.complete import Decision, complete
from pipeplan.planners.problem import PlanningProblem
from pipeplan.programs.program import pipelines_in_a_row
from pipeplan.simulation.predict import predict
from tests.pipeplan.builders import Cell, cluster, profile

CELLS = [
    Cell(
        forward_s=0.01 + 0.001 * index,
        backward_s=0.02 + 0.002 * index,
        weight_bytes=1000 * (index + 1),
        output_bytes=100 * (index + 1),
        activation_bytes=5000,
    )
    for index in range(6)
]
PROFILE = replace(
    profile(CELLS, input_bytes=50),
    overheads=Overheads(update_s_per_byte=1e-6, version_s_per_byte=5e-7, instruction_s=1e-4, update_s=5e-4),
)
CLUSTER = cluster((4, 1e6), latency_s=1e-4)
BATCHES = 4


def plan_for(
    schedule: str,
    stops: tuple[int, ...],
    replicas: int,
    *,
    recompute: bool = False,
    recompute_unit: str = "stage",
    chunks: int = 1,
    profile: Profile = PROFILE,
) -> Plan:
    """Stages that end at these stops, four microbatches a batch, so many stages a rank."""
    stages = tuple(
        Stage(start=start, stop=stop, replicas=replicas, recompute=recompute, recompute_unit=recompute_unit)
        for start, stop in zip((0, *stops), stops, strict=False)
    )
    microbatches = 1 if schedule == "pipedream" else 4
    decision = Decision(
        planner="test",
        cost_model="none",
        stages=stages,
        placement=pipelines_in_a_row((replicas,) * (len(stages) // chunks)),
        chunks=chunks,
        schedule=schedule,
        microbatch_size=1,
        microbatches=microbatches,
        batch_size=microbatches * replicas,
        closed_form=ClosedForm(time_per_microbatch_s=1.0, throughput_samples_per_s=1.0, bubble_fraction=0.0),
        optimal_in_flight=len(stages),
        configurations_considered=1,
    )
    return complete(PlanningProblem(profile=profile, cluster=CLUSTER, batch_size=4), decision)


def batches_of(plan: Plan) -> int:
    """As many as a run has."""
    return 10 * BATCHES if plan.schedule == "pipedream" else BATCHES


def executed(plan: Plan, hidden: tuple[Profile, Cluster]) -> MeasuredRun:
    """What a run measures where these costs are the true ones."""
    truth = replace(plan, costs=costs_of(plan, *hidden))
    return MeasuredRun(plan=plan, timeline=predict(truth, batches=batches_of(plan)))


def scaled(forward: tuple[float, ...], backward: tuple[float, ...], **overheads: float) -> Profile:
    """The profile with every block's times multiplied, and other overheads."""
    blocks = tuple(
        replace(
            block,
            measurements=tuple(
                replace(m, forward_s=m.forward_s * f, backward_s=m.backward_s * b) for m in block.measurements
            ),
        )
        for block, f, b in zip(PROFILE.blocks, forward, backward, strict=True)
    )
    return replace(PROFILE, blocks=blocks, overheads=replace(PROFILE.overheads, **overheads))


def network(bandwidth_bytes_per_s: float, latency_s: float) -> Cluster:
    """The cluster with another link."""
    level = Level(size=4, bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)
    return replace(CLUSTER, levels=(level,))
