"""Overhead: the time that the executor adds to an instruction on this device, and the share of time that the device
idles.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_check.blocks import Gpt2Layer
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.here import device, is_short
from benchmarks.gpu_check.timing import synchronise
from pipeplan.documents.plan import Plan
from pipeplan.programs.instructions import Backward, Forward, Instruction, Update
from pipeplan.programs.program import Program
from pipeplan.simulation.predict import program_of
from tests.worker_agent.runtime.plans import make_plan
from worker_agent.engine.clocks import clock_for
from worker_agent.engine.optimizers import Optimizer
from worker_agent.engine.weights import Weights, find_slots
from worker_agent.models.losses import mean_of_squares
from worker_agent.runtime.executor import Executor, Hooks
from worker_agent.runtime.mail import Mail
from worker_agent.runtime.recorder import Recorder
from worker_agent.runtime.stage import StageBlocks

MICROBATCHES = 8
RATE = 1e-6
VARIANTS: dict[str, dict[str, Any]] = {
    "fused": {},
    "recomputing": {"recompute": True},
    "2BP": {"split_backward": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Equal blocks, the shape of their inputs, and the batches to do."""

    make: Callable[[], nn.Module]
    blocks: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    batches: int


def check(findings: Findings) -> None:
    """Tiny blocks, of which the time is all overhead, and layers of GPT-2 medium."""
    tiny = Work(make=partial(nn.Linear, 8, 8), blocks=4, shape=(2, 8), dtype=torch.float32, batches=50)
    layers = Work(make=partial(Gpt2Layer, 1024, 16), blocks=4, shape=(4, 512, 1024), dtype=torch.bfloat16, batches=10)
    if is_short(findings):
        tiny = Work(make=tiny.make, blocks=2, shape=tiny.shape, dtype=tiny.dtype, batches=5)
        layers = Work(make=partial(Gpt2Layer, 32, 4), blocks=2, shape=(2, 8, 32), dtype=tiny.dtype, batches=2)
    if device().type == "cpu":
        findings.leave_out("the device's idle time", "there is no GPU")
    cases = {
        f"{name}, {variant}": partial(compared, work, options)
        for name, work in {"tiny blocks": tiny, "layers": layers}.items()
        for variant, options in VARIANTS.items()
    }
    findings.run(cases)


def compared(work: Work, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds an instruction in the executor, and of the same calls in a loop by hand where that knows the variant."""
    plan = make_plan("1f1b", (0, work.blocks), microbatches=MICROBATCHES, dtype="float32", **options)
    program = program_of(plan, batches=work.batches)
    inputs = torch.randn(work.shape, device=device(), dtype=work.dtype)
    instructions = program.streams[0].instructions
    executed = partial(_executed, work, plan, program, inputs)
    executed()  # kernels are loaded, and memory is allocated, when they are used first
    figures: dict[str, Any] = {"executor": _seconds_an_instruction(executed(), len(instructions))}
    if not options.get("recompute") and not options.get("split_backward"):
        by_hand = partial(_by_hand, work, instructions, inputs)
        by_hand()
        figures["by_hand"] = _seconds_an_instruction(by_hand(), len(instructions))
        added_s = {each: figures["executor"][each] - figures["by_hand"][each] for each in figures["executor"]}
        figures["added"] = added_s
        figures["by_hand_device"] = _device_use(by_hand)
    return figures | {"device": _device_use(executed)}


def _executed(work: Work, plan: Plan, program: Program, inputs: Tensor) -> tuple[float, float]:
    """The whole stream in the executor."""
    where, blocks = device(), _made(work)
    stage = StageBlocks(
        blocks,
        first_block=0,
        criterion=mean_of_squares,
        recompute=plan.recompute,
        seed=0,
        device=where,
        split_backward=plan.split_backward,
    )
    names: dict[Tensor, str] = {p: f"{i}.{n}" for i, block in enumerate(blocks) for n, p in block.named_parameters()}
    executor = Executor(
        stream=program.streams[0],
        stage=stage,
        weights=Weights(find_slots(blocks, names), Optimizer("sgd", RATE)),
        mail=Mail(program, 0, {}, where),
        replicas=None,
        recorder=Recorder(clock_for(where)),
        hooks=Hooks(on_instruction=lambda *_: None, on_update=lambda *_: None, on_checkpoint=lambda _: None),
        inputs=lambda _: inputs,
        targets=lambda _: inputs,
        update_microbatches=MICROBATCHES,
    )
    return _timed(executor.run)


def _by_hand(work: Work, instructions: Sequence[Instruction], inputs: Tensor) -> tuple[float, float]:
    """The same order and the same calls of torch, and nothing else."""
    blocks = _made(work)
    optimizer = torch.optim.SGD([p for block in blocks for p in block.parameters()], lr=RATE, fused=True)
    losses: dict[int, Tensor] = {}

    def loop() -> None:
        for instruction in instructions:
            match instruction:
                case Forward(microbatch=k):
                    values = inputs
                    for block in blocks:
                        values = block(values)
                    losses[k] = mean_of_squares(values, None)
                case Backward(microbatch=k):
                    torch.autograd.backward(losses.pop(k) / MICROBATCHES)
                case Update():
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)

    return _timed(loop)


def _made(work: Work) -> list[nn.Module]:
    return [work.make().to(device(), work.dtype) for _ in range(work.blocks)]


def _timed(loop: Callable[[], object]) -> tuple[float, float]:
    """Seconds until the host has asked for all, and until the device has done it."""
    where = device()
    synchronise(where)
    start_s = time.perf_counter()
    loop()
    asked_s = time.perf_counter()
    synchronise(where)
    return asked_s - start_s, time.perf_counter() - start_s


def _seconds_an_instruction(taken: tuple[float, float], instructions: int) -> dict[str, float]:
    return {"host_s": taken[0] / instructions, "done_s": taken[1] / instructions}


def _device_use(work: Callable[[], object]) -> dict[str, Any]:
    """The share of time in which the GPU runs neither kernel nor copy, from the first to the last.

    On a CPU, where operations are all that there is to see, it is the share that none of them takes.
    """
    kind = device().type
    with profile(activities=[ProfilerActivity.CUDA if kind == "cuda" else ProfilerActivity.CPU]) as profiled:
        work()
        synchronise(device())
    traced: Any = profiled.profiler
    events = traced.kineto_results.events()  # as they were traced: to make a tree of them takes a hundred times longer
    here = [event for event in events if event.device_type().name == kind.upper() and not _is_annotation(event)]
    spans_us = [(event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3) for event in here]
    return {"of": kind} | (idle_share(spans_us) if spans_us else {"why": "the profiler saw nothing there"})


def _is_annotation(event: Any) -> bool:
    """Whether it is a note about others, as an optimizer's step, and no work of its own."""
    return bool(event.is_user_annotation()) if hasattr(event, "is_user_annotation") else False


def idle_share(spans_us: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The part of the time from the first start to the last end that no span covers."""
    busy_us, until_us = 0.0, min(start_us for start_us, _ in spans_us)
    first_us = until_us
    for start_us, end_us in sorted(spans_us):
        busy_us += max(end_us - max(start_us, until_us), 0.0)
        until_us = max(until_us, end_us)
    span_us = until_us - first_us
    return {
        "operations": len(spans_us),
        "idle_fraction": 1 - busy_us / span_us if span_us else 0.0,
        "busy_s": busy_us / 1e6,
        "span_s": span_us / 1e6,
    }
