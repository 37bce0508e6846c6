"""Plans made by hand, for executions whose mathematics is known, and for benchmarks' fixed work."""

from math import lcm

from pipeplan.documents.plan import ClosedForm, Plan, Stage
from pipeplan.documents.profile import Model
from pipeplan.documents.stage_costs import unit_costs
from pipeplan.programs.program import pipelines_in_a_row


def make_plan(
    schedule: str,
    cuts: tuple[int, ...],
    *,
    replicas: tuple[int, ...] | int = 1,
    microbatch_size: int = 2,
    microbatches: int = 4,
    recompute: bool = False,
    recompute_unit: str = "stage",
    optimizer: str = "sgd",
    dtype: str = "float64",
    split_backward: bool = False,
    half_way: bool = False,
    chunks: int = 1,
    master_weights: bool = False,
    unit_s: float = 1.0,
    spec: str | None = None,
) -> Plan:
    """A plan with stages between the cuts: (0, 2, 4) are two stages of two blocks, of the model that `spec` names.

    A microbatch's forward takes `unit_s` on each, and so do both halves of its backward.
    """
    depth = len(cuts) - 1
    counts = (replicas,) * depth if isinstance(replicas, int) else replicas
    costs = unit_costs(forward_s=unit_s, backward_input_s=unit_s, backward_weight_s=unit_s)
    return Plan(
        planner="by hand",
        cost_model="unit",
        model=Model(name="test", spec=spec),
        dtype=dtype,
        profile_id="0" * 32,
        cluster_id="0" * 32,
        batch_size=microbatch_size * microbatches * lcm(*counts),
        stages=tuple(
            Stage(
                start=cuts[s],
                stop=cuts[s + 1],
                replicas=counts[s],
                recompute=recompute,
                recompute_unit=recompute_unit,
            )
            for s in range(depth)
        ),
        costs=(costs,) * depth,
        placement=pipelines_in_a_row(counts[: depth // chunks]),
        schedule=schedule,
        microbatch_size=microbatch_size,
        microbatches=microbatches,
        optimizer=optimizer,
        master_weights=master_weights,
        memory_accounting="training",
        closed_form=ClosedForm(time_per_microbatch_s=1.0, throughput_samples_per_s=1.0, bubble_fraction=0.0),
        optimal_in_flight=depth,
        configurations_considered=1,
        split_backward=split_backward,
        split_backward_half_way=half_way,
        chunks=chunks,
    )
