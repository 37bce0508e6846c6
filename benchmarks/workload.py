"""The fixed work of `benchmarks.pipelines`: a GPT-like model of 8 blocks, hidden size 256, sequences of 128 bytes."""

from planner_service.core.plan import Plan, Stage
from planner_service.core.profile import Model
from planner_service.core.schedule.program import pipelines_in_a_row
from planner_service.core.stage_costs import unit_costs

MODEL = "hf:gpt2?n_layer=8&n_embd=256&n_head=8&vocab_size=256&n_positions=128&attn_pdrop=0&embd_pdrop=0&resid_pdrop=0"
DATA = "worker_agent.models.text:standard_library?sequence_length=128"
CUTS = (0, 5, 10)
MICROBATCH_SIZE, MICROBATCHES, BATCHES, ROUNDS = 4, 8, 5, 7
LEARNING_RATE = 0.01
OURS = ("1f1b", "pipedream-2bw", "gpipe")


def plan_for(schedule: str) -> Plan:
    """Two stages under a schedule; what it predicts is not looked at."""
    costs = unit_costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    return Plan(
        planner="benchmark",
        cost_model="unit",
        model=Model(name="gpt2", spec=MODEL),
        dtype="float32",
        profile_id="0" * 32,
        cluster_id="0" * 32,
        batch_size=MICROBATCH_SIZE * MICROBATCHES,
        stages=tuple(Stage(start=CUTS[s], stop=CUTS[s + 1]) for s in (0, 1)),
        costs=(costs, costs),
        placement=pipelines_in_a_row((1, 1)),
        schedule=schedule,
        microbatch_size=MICROBATCH_SIZE,
        microbatches=MICROBATCHES,
        optimizer="sgd",
        memory_accounting="training",
        time_per_microbatch_s=1.0,
        throughput_samples_per_s=1.0,
        bubble_fraction=0.0,
        optimal_in_flight=2,
        configurations_considered=1,
    )
