"""The fixed work of `benchmarks.pipelines`: models of equal stages, their data, and how much of it a round is."""

from dataclasses import dataclass

from pipeplan.documents.plan import Plan
from tests.worker_agent.runtime.plans import make_plan

RANKS = 2
MICROBATCHES = 8
ROUNDS, STARTS = 2, 5
LEARNING_RATE = 0.01
MICROBATCH_SIZE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its data, and the `cuts` of its blocks for one stage a process and for two.

    A round has many microbatches: its end drains a pipeline that runs on through the batches, which short ones would
    charge to 2BW.
    """

    model: str
    data: str
    cuts: dict[int, tuple[int, ...]]
    microbatches_a_round: int

    def batches_a_round(self, microbatches: int) -> int:
        """How many batches of so many microbatches a round has."""
        return self.microbatches_a_round // microbatches


def _gpt2(layers: int, width: int, heads: int, length: int) -> str:
    shape = f"n_layer={layers}&n_embd={width}&n_head={heads}&vocab_size=256&n_positions={length}"
    return f"hf:gpt2?{shape}&attn_pdrop=0&embd_pdrop=0&resid_pdrop=0"


def _text(length: int) -> str:
    return f"worker_agent.models.text:standard_library?sequence_length={length}"


WORKLOADS = {
    "gpt2": Workload(
        model=_gpt2(8, 256, 8, 128),
        data=_text(128),
        cuts={1: (0, 5, 10), 2: (0, 3, 5, 7, 10)},
        microbatches_a_round=48,
    ),
    "tiny": Workload(
        model=_gpt2(16, 64, 4, 32),
        data=_text(32),
        cuts={1: (0, 9, 18), 2: (0, 5, 9, 13, 18)},
        microbatches_a_round=480,
    ),
    "wide": Workload(
        model=_gpt2(4, 512, 8, 64),
        data=_text(64),
        cuts={1: (0, 3, 6), 2: (0, 2, 3, 4, 6)},
        microbatches_a_round=48,
    ),
    "conv": Workload(
        model="preset:resnet50?scale=0.25&image_size=64&classes=100",
        data="preset:random_images?size=64&classes=100&samples=256",
        cuts={1: (0, 10, 18), 2: (0, 5, 10, 15, 18)},
        microbatches_a_round=96,
    ),
}
"""Blocks are an embedding, layers and a head; a stem, bottlenecks and a head (ResNet-50's, a quarter as wide)."""

GPT2 = WORKLOADS["gpt2"]
"""The work of the benchmarks that have one model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """A schedule of ours, its split of the backward, and the stages that a process has."""

    schedule: str
    split_backward: bool = False
    chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Theirs:
    """A schedule of torch's, the stages that a process has, and whether it does only what it must.

    `lean`: the loss is divided where it is made instead of all gradients (`scale_grads=False`), and the last stage does
    not gather its outputs (`return_outputs=False`).
    """

    schedule: str
    chunks: int = 1
    lean: bool = False


OURS = {
    "pipeplan 1f1b": Ours(schedule="1f1b"),
    "pipeplan 1f1b, 2BP": Ours(schedule="1f1b", split_backward=True),
    "pipeplan zb-h1": Ours(schedule="zb-h1"),
    "pipeplan 1f1b-interleaved": Ours(schedule="1f1b-interleaved", chunks=2),
    "pipeplan gpipe": Ours(schedule="gpipe"),
    "pipeplan pipedream-2bw": Ours(schedule="pipedream-2bw"),
}
_SCHEDULES = {
    "Schedule1F1B": 1,
    "ScheduleGPipe": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
}
THEIRS = {f"torch {name}": Theirs(schedule=name, chunks=chunks) for name, chunks in _SCHEDULES.items()} | {
    f"torch {name}, lean": Theirs(schedule=name, chunks=chunks, lean=True) for name, chunks in _SCHEDULES.items()
}

PEER = "torch Schedule1F1B"
CEILING = "two independent processes"


def plan_for(ours: Ours, microbatches: int, work: Workload = GPT2) -> Plan:
    """Stages of equal blocks under a schedule. What it predicts places 2BP's p2, and is not looked at otherwise."""
    return make_plan(
        ours.schedule,
        work.cuts[ours.chunks],
        microbatch_size=MICROBATCH_SIZE,
        microbatches=microbatches,
        dtype="float32",
        split_backward=ours.split_backward,
        chunks=ours.chunks,
        spec=work.model,
    )
