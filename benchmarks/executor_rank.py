"""One of the processes of `benchmarks.executor`."""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner_service.core.plan import Plan
from planner_service.core.predict import program_of
from planner_service.core.schedule.instructions import Forward, Instruction
from tests.worker.runtime.plans import make_plan
from worker_agent.models.chain import build_model
from worker_agent.runtime.channel import open_groups
from worker_agent.runtime.executor import Executor, Hooks
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.mail import Mail, edges_of
from worker_agent.runtime.operations import Linear
from worker_agent.runtime.placement import place_process
from worker_agent.runtime.rank import Part
from worker_agent.runtime.recorder import HostClock, Recorder
from worker_agent.runtime.status import StatusWriter

STAGES, MIDDLE, MICROBATCHES, BATCHES = 3, 1, 8, 100
BLOCKS = (1, 8)
WIDTH, SAMPLES = 8, 2
CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "recomputing": {"schedule": "1f1b", "recompute": True},
    "2BP": {"schedule": "1f1b", "split_backward": True},
    "pipedream-2bw": {"schedule": "pipedream-2bw"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Microseconds: what every instruction took, by kind, and what of it is the modules' own work."""

    taken_us: dict[str, list[float]]
    work_us: dict[str, float]


class ThreadClock(HostClock):
    """The processor time of the executing thread."""

    def mark(self) -> None:
        """Notes this moment."""
        self._marks_s.append(time.thread_time())


class Kinds(Recorder):
    """A recorder that gives what every instruction took: from the end of the one before to its own end."""

    def __init__(self, clock: ThreadClock) -> None:
        super().__init__(clock)
        self._processor = clock
        self._kinds: list[str] = []

    def end(self, instruction: Instruction, memory_bytes: int) -> None:
        """It is done, and so much is held now."""
        self._kinds.append(type(instruction).__name__)
        super().end(instruction, memory_bytes)

    def taken_us(self) -> dict[str, list[float]]:
        """By kind, but for the first batches, in which buffers and optimizer states are made."""
        found: dict[str, list[float]] = defaultdict(list)
        pairs = list(zip(self._kinds[1:], pairwise(self._processor.seconds()[1::2]), strict=True))
        for kind, (start_s, end_s) in pairs[len(pairs) // 10 :]:
            found[kind].append(1e6 * (end_s - start_s))
        return dict(found)


def plan_for(blocks: int, *, schedule: str, recompute: bool = False, split_backward: bool = False) -> Plan:
    """Stages of so many blocks each."""
    return make_plan(
        schedule,
        tuple(range(0, (STAGES + 1) * blocks, blocks)),
        microbatch_size=SAMPLES,
        microbatches=MICROBATCHES,
        recompute=recompute,
        dtype="float32",
        split_backward=split_backward,
    )


def linear_layers(*, count: int) -> list[nn.Module]:
    """Blocks of one small product each."""
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def executed(plan: Plan, blocks: int, rank: int, device: torch.device, folder: Path) -> dict[str, list[float]]:
    """Microseconds of every instruction of this rank, by kind."""
    spec = f"benchmarks.executor_rank:linear_layers?count={STAGES * blocks}"
    job = RunJob(plan=plan, model=spec, data="-", steps=BATCHES, learning_rate=1e-3, out=str(folder), device="cpu")
    program = program_of(plan, batches=BATCHES)
    stream = program.streams[rank]
    part = Part(job, program, build_model(spec, seed=0), stream, device)
    groups = open_groups({edge for s in program.streams for edge in edges_of(s)}, rank)
    recorder = Kinds(ThreadClock())
    inputs, targets = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    status = StatusWriter(folder / f"{rank}.status")
    executor = Executor(
        stream=stream,
        stage=part.stage,
        weights=part.weights,
        mail=Mail(program, rank, groups, device),
        replicas=None,
        recorder=recorder,
        hooks=Hooks(
            on_instruction=lambda index, _: status.at(index), on_update=lambda *_: None, on_checkpoint=lambda _: None
        ),
        inputs=(lambda _: inputs) if part.first else None,
        targets=(lambda _: targets) if part.last else None,
        update_microbatches=MICROBATCHES,
    )
    dist.barrier()
    executor.run()
    return recorder.taken_us()


def modules_work(blocks: int) -> dict[str, float]:
    """Microseconds that a middle stage's modules, autograd and the optimizer take when they are called one by one."""
    layers = linear_layers(count=blocks)
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-3, fused=True)
    gradient, x = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH, requires_grad=True)
    outputs: list[Tensor] = []
    operation, onto = Linear(), torch.zeros(WIDTH, WIDTH)

    def forward() -> None:
        value = x
        for layer in layers:
            value = layer(value)
        outputs.append(value)

    def without_graph() -> None:
        with torch.no_grad():
            forward()
        outputs.clear()

    def backward() -> None:
        torch.autograd.backward([outputs.pop()], [gradient])

    def weights_gradient() -> None:
        for _ in layers:
            rows = operation.rows(x.detach(), gradient)
            operation.weight_gradient(rows, onto, onto)
            operation.bias_gradient(rows)

    def timed(work: Callable[[], None]) -> float:
        start_s = time.thread_time()
        work()
        return 1e6 * (time.thread_time() - start_s)

    rows = [[timed(work) for work in (forward, backward, weights_gradient, optimizer.step)] for _ in range(500)]
    forward_us, backward_us, weight_us, step_us = (median(column) for column in zip(*rows, strict=True))
    input_us = backward_us - weight_us  # what the split leaves to p1
    first_forward_us = median(timed(without_graph) for _ in range(500))
    return {
        "Forward": forward_us,
        "ForwardWithoutGraph": first_forward_us,
        "Recompute": forward_us,
        "Backward": backward_us,
        "BackwardInput": input_us,
        "BackwardWeight": weight_us,
        "Update": step_us,
    }


def main(case: str, blocks: int, folder: Path) -> None:
    """Executes, and writes down what it took."""
    rank = int(os.environ["RANK"])
    device = place_process("cpu", rank, STAGES)
    dist.init_process_group("gloo")
    plan = plan_for(blocks, **CASES[case])
    taken_us = executed(plan, blocks, rank, device, folder)
    work_us = modules_work(blocks)
    if plan.recompute:
        work_us[Forward.__name__] = work_us["ForwardWithoutGraph"]
    folder.joinpath(f"{rank}.json").write_text(json.dumps(asdict(Figures(taken_us=taken_us, work_us=work_us))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
