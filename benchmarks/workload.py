"""The fixed work of `benchmarks.pipelines`: a GPT-like model of 8 blocks, hidden size 256, sequences of 128 bytes."""

from dataclasses import dataclass

from planner_service.core.plan import Plan, Stage
from planner_service.core.profile import Model
from planner_service.core.schedule.program import pipelines_in_a_row
from planner_service.core.stage_costs import unit_costs

MODEL = "hf:gpt2?n_layer=8&n_embd=256&n_head=8&vocab_size=256&n_positions=128&attn_pdrop=0&embd_pdrop=0&resid_pdrop=0"
DATA = "worker_agent.models.text:standard_library?sequence_length=128"
CUTS = {1: (0, 5, 10), 2: (0, 3, 5, 7, 10)}
"""Where the blocks (embedding, 8 layers, head) are cut for one stage a process and for two."""

RANKS = 2
MICROBATCH_SIZE, MICROBATCHES, BATCHES, ROUNDS = 4, 8, 2, 15
LEARNING_RATE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """A schedule of ours, its split of the backward, and the stages that a process has."""

    schedule: str
    split_backward: bool = False
    chunks: int = 1


OURS = {
    "pipeplan 1f1b": Ours(schedule="1f1b"),
    "pipeplan 1f1b, 2BP": Ours(schedule="1f1b", split_backward=True),
    "pipeplan zb-h1": Ours(schedule="zb-h1"),
    "pipeplan 1f1b-interleaved": Ours(schedule="1f1b-interleaved", chunks=2),
    "pipeplan gpipe": Ours(schedule="gpipe"),
    "pipeplan pipedream-2bw": Ours(schedule="pipedream-2bw"),
}
THEIRS = {
    "torch Schedule1F1B": 1,
    "torch ScheduleGPipe": 1,
    "torch ScheduleInterleaved1F1B": 2,
    "torch ScheduleInterleavedZeroBubble": 2,
    "torch ScheduleZBVZeroBubble": 2,
}
"""torch's own schedules, with the stages that a process has under them."""

PEER = "torch Schedule1F1B"
CEILING = "two independent processes"


def plan_for(ours: Ours) -> Plan:
    """Stages of equal blocks under a schedule. What it predicts places 2BP's p2, and is not looked at otherwise."""
    cuts = CUTS[ours.chunks]
    costs = unit_costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    return Plan(
        planner="benchmark",
        cost_model="unit",
        model=Model(name="gpt2", spec=MODEL),
        dtype="float32",
        profile_id="0" * 32,
        cluster_id="0" * 32,
        batch_size=MICROBATCH_SIZE * MICROBATCHES,
        stages=tuple(Stage(start=cuts[s], stop=cuts[s + 1]) for s in range(len(cuts) - 1)),
        costs=(costs,) * (len(cuts) - 1),
        placement=pipelines_in_a_row((1,) * RANKS),
        schedule=ours.schedule,
        microbatch_size=MICROBATCH_SIZE,
        microbatches=MICROBATCHES,
        optimizer="sgd",
        memory_accounting="training",
        time_per_microbatch_s=1.0,
        throughput_samples_per_s=1.0,
        bubble_fraction=0.0,
        optimal_in_flight=2,
        configurations_considered=1,
        split_backward=ours.split_backward,
        chunks=ours.chunks,
    )
