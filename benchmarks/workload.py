"""The fixed work of `benchmarks.pipelines`: a GPT-like model of 8 blocks, hidden size 256, sequences of 128 bytes."""

from dataclasses import dataclass

from pipeplan.documents.plan import Plan
from tests.worker_agent.runtime.plans import make_plan

MODEL = "hf:gpt2?n_layer=8&n_embd=256&n_head=8&vocab_size=256&n_positions=128&attn_pdrop=0&embd_pdrop=0&resid_pdrop=0"
DATA = "worker_agent.models.text:standard_library?sequence_length=128"
CUTS = {1: (0, 5, 10), 2: (0, 3, 5, 7, 10)}
"""Where the blocks (embedding, 8 layers, head) are cut for one stage a process and for two."""

RANKS = 2
MICROBATCH_SIZE, MICROBATCHES = 4, 8
MICROBATCHES_A_ROUND = 48
"""Many: the end of a round drains a pipeline that runs on through the batches, which short ones would charge to 2BW."""

ROUNDS, STARTS = 2, 5
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


def batches_a_round(microbatches: int) -> int:
    """How many batches of so many microbatches a round has."""
    return MICROBATCHES_A_ROUND // microbatches


def plan_for(ours: Ours, microbatches: int) -> Plan:
    """Stages of equal blocks under a schedule. What it predicts places 2BP's p2, and is not looked at otherwise."""
    return make_plan(
        ours.schedule,
        CUTS[ours.chunks],
        microbatch_size=MICROBATCH_SIZE,
        microbatches=microbatches,
        dtype="float32",
        split_backward=ours.split_backward,
        chunks=ours.chunks,
        spec=MODEL,
    )
