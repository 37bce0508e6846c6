"""Measured: a model's profile on one device, and a plan's run on it, in this process."""

import gc
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.here import CPU_MEMORY_BYTES, device, device_name
from benchmarks.gpu_check.ranks import run_as
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import DTYPE_BYTES, Block, Device, Method, Model, Overheads, Profile
from pipeplan.programs.timeline import Timeline, batch_s
from pipeplan.simulation.predict import predict
from worker_agent.engine.clocks import CLOCK_NAMES, choose_clock
from worker_agent.engine.results import read_result
from worker_agent.models.chain import Chain, build_model
from worker_agent.models.data import Microbatch, MicrobatchSource, moved, open_data
from worker_agent.models.losses import build_loss
from worker_agent.profiler.block_memory import BlockMemory, measure_memory
from worker_agent.profiler.times import (
    BlockTimes,
    measure_times,
    measure_without_graph,
    nothing_around,
    pass_backward,
    pass_forward,
    prepare_gradients,
)
from worker_agent.profiler.updates import Updating, measure_updates
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.measured import read_batches

SEED = 0
LEARNING_RATE = 1e-6
WARM_UP_ROUNDS = 2
ALLOCATOR_RESERVE = 0.05
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model, its data, and how it is profiled and run."""

    model: str
    data: str
    dtype: str
    optimizer: str
    microbatch_sizes: tuple[int, ...]
    batch_size: int
    steps: int
    rounds: int


def profile(trial: Trial, findings: Findings) -> tuple[Profile, dict[str, Any]]:
    """The profile at as many of the sizes as memory holds, and its figures in short."""
    where = device()
    chain = build_model(trial.model, seed=SEED, dtype=getattr(torch, trial.dtype))
    blocks = [block.to(where) for block in chain.blocks]
    sizes: dict[int, tuple[Sequence[BlockTimes], Sequence[BlockMemory], float]] = {}
    for size in trial.microbatch_sizes:
        try:
            sizes[size] = _measured(trial, blocks, size, where)
        except torch.OutOfMemoryError as error:
            findings.leave_out(f"microbatches of {size} and more", str(error).partition(".")[0])
            break
    smallest = trial.microbatch_sizes[0]
    overheads = Overheads(
        update_s_per_byte=_update_s_per_byte(trial, blocks, smallest, where),
        forward_without_graph=median(bare for _, _, bare in sizes.values()),
    )
    found = Profile(
        model=Model(name=chain.name, spec=chain.spec),
        device=_device(where),
        dtype=trial.dtype,
        blocks=tuple(_block(chain, index, sizes) for index in range(len(blocks))),
        overheads=overheads,
        method=Method(
            warm_up_rounds=WARM_UP_ROUNDS,
            rounds=trial.rounds,
            clock=CLOCK_NAMES[choose_clock("auto", where)],
            torch_version=torch.__version__,
        ),
    )
    parameters = found.weight_bytes // DTYPE_BYTES[trial.dtype]
    return found, {"model": trial.model, "parameters": parameters} | _in_short(found)


def _measured(
    trial: Trial, blocks: Sequence[nn.Module], size: int, where: torch.device
) -> tuple[Sequence[BlockTimes], Sequence[BlockMemory], float]:
    """Times and memory by block at one size, and the share of a forward that one without a graph takes."""
    microbatch = partial(_microbatch, _source(trial, size), where, getattr(torch, trial.dtype))
    make_clock, loss = choose_clock("auto", where), build_loss(None)
    times = measure_times(
        blocks,
        loss,
        microbatch,
        warm_up_rounds=WARM_UP_ROUNDS,
        rounds=trial.rounds,
        make_clock=make_clock,
        before_round=lambda _: None,
    )
    bare_s = measure_without_graph(blocks, loss, microbatch, rounds=trial.rounds, make_clock=make_clock)
    memory = measure_memory(blocks, loss, microbatch(0), where)
    return times, memory, median(bare_s) / sum(median(block.forward_s) for block in times)


def _source(trial: Trial, size: int) -> MicrobatchSource:
    return open_data(trial.data, microbatch_size=size, seed=SEED)


def _microbatch(source: MicrobatchSource, where: torch.device, dtype: torch.dtype, number: int) -> Microbatch:
    inputs, targets = source.microbatch(number)
    return moved(inputs, where, dtype), moved(targets, where, dtype)


def _update_s_per_byte(trial: Trial, blocks: Sequence[nn.Module], size: int, where: torch.device) -> float:
    source, loss = _source(trial, size), build_loss(None)

    def pass_one(number: int) -> None:
        microbatch = _microbatch(source, where, getattr(torch, trial.dtype), number)
        pass_backward(pass_forward(blocks, loss, *microbatch, nothing_around), nothing_around)

    clock = choose_clock("auto", where)
    how = Updating(
        optimizer=trial.optimizer, dtype=trial.dtype, rounds=trial.rounds, make_clock=clock, before_step=pass_one
    )
    prepare_gradients(blocks)
    found = measure_updates(blocks, how)
    return (sum(found.blocks_s) + found.first_s) / sum(p.nbytes for block in blocks for p in block.parameters())


def _device(where: torch.device) -> Device:
    if where.type == "cpu":
        return Device(name=device_name(), memory_bytes=CPU_MEMORY_BYTES)
    free_bytes, total_bytes = torch.cuda.mem_get_info(where)
    return Device(
        name=device_name(),
        memory_bytes=total_bytes,
        context_bytes=total_bytes - free_bytes - torch.cuda.memory_reserved(where),
        allocator_reserve=ALLOCATOR_RESERVE,
    )


def _block(
    chain: Chain, index: int, sizes: dict[int, tuple[Sequence[BlockTimes], Sequence[BlockMemory], float]]
) -> Block:
    return Block(
        name=chain.block_names[index],
        weight_bytes=chain.weight_bytes()[index],
        measurements=tuple(
            Measurement(
                microbatch_size=size,
                forward_s=median(times[index].forward_s),
                backward_s=median(times[index].backward_s),
                activation_bytes=memory[index].activation_bytes + memory[index].graph_bytes,
                **{name: n for name, n in asdict(memory[index]).items() if name not in _APART},
            )
            for size, (times, memory, _) in sizes.items()
        ),
    )


_APART = ("activation_bytes", "cast_bytes", "graph_bytes", "uncounted")
"""The bytes of a block's memory that do not go into a measurement as they are."""


def _in_short(found: Profile) -> dict[str, Any]:
    """Sums over the blocks by size, and each kind of block at the largest size."""
    largest = found.microbatch_sizes[-1]
    middle = len(found.blocks) // 2
    return {
        "update_s_per_byte": found.overheads.update_s_per_byte,
        "forward_without_graph": found.overheads.forward_without_graph,
        "sizes": {
            str(size): {
                "forward_s": sum(block.forward_s for block in found.at(size)),
                "backward_s": sum(block.backward_s for block in found.at(size)),
                "activation_bytes": sum(block.activation_bytes for block in found.at(size)),
                "workspace_bytes": max(block.workspace_bytes for block in found.at(size)),
            }
            for size in found.microbatch_sizes
        },
        "blocks": {found.blocks[i].name: asdict(found.blocks[i].at(largest)) for i in (0, middle, -1)},
    }


def predicted(trial: Trial, plan: Plan) -> dict[str, Any]:
    """What the plan's costs say of the same steps, on the streams that are run."""
    timeline = predict(plan, batches=trial.steps)
    return {
        "batch_s": batch_s(timeline),
        "memory_bytes": timeline.lanes[0].peak_memory_bytes,
        "planned_memory_bytes": plan.stages[0].memory_bytes,
        "microbatch_size": plan.microbatch_size,
        "recompute": plan.recompute,
    }


def run(trial: Trial, plan: Plan) -> dict[str, Any]:
    """Runs some steps of the plan in this process; what they took of time and of memory."""
    with tempfile.TemporaryDirectory(prefix="pipeplan-gpu-check-") as folder, _alone() as port:
        job = RunJob(
            plan=plan,
            model=trial.model,
            data=trial.data,
            steps=trial.steps,
            seed=SEED,
            learning_rate=LEARNING_RATE,
            out=folder,
            device=device().type,
            transport="host",
            timeout_s=TIMEOUT_S,
        )
        memory = _MemoryAccount()
        with _noting_waits() as waits:
            run_as(job, 0, 1, port)
        result = read_result(job.directory.result(0))
        losses = read_batches(job.directory.batches(0))["loss"]
    if result is None:
        raise ValueError("the rank ended without a result")
    timeline = Timeline(lanes=(result.lane.lane(),), batch_size=plan.batch_size, batches=trial.steps)
    return {
        "batch_s": batch_s(timeline),
        "busy_fraction": timeline.busy_fraction[0],
        "memory_bytes": result.peak_memory_bytes,
        "resident_bytes": result.peak_resident_bytes,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "device_memory": None if result.device_memory is None else asdict(result.device_memory),
        "host_waits": dict(waits),
    } | memory.figures()


@contextmanager
def _noting_waits() -> Iterator[Counter[str]]:
    """Where a host waits for its GPU in the block, and how often, as far as torch can tell; nothing on a CPU."""
    waits: Counter[str] = Counter()
    if device().type == "cpu":
        yield waits
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield waits
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits.update(f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchronizing CUDA" in str(w.message))


class _MemoryAccount:
    """What the allocator and the device say of the memory that is taken from now on."""

    def __init__(self) -> None:
        self._before_bytes = 0
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._before_bytes = torch.cuda.memory_allocated()

    def figures(self) -> dict[str, Any]:
        """At most allocated and reserved, and of the whole device taken now, while the allocator still has it all."""
        if not torch.cuda.is_available():
            return {"allocated_bytes": None, "reserved_bytes": None, "device_bytes": None}
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return {
            "allocated_before_bytes": self._before_bytes,
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "device_bytes": total_bytes - free_bytes,
        }


@contextmanager
def _alone() -> Iterator[int]:
    """The port at which this process may be the only rank of a run; afterwards it is on all its processors again."""
    processors, threads = os.sched_getaffinity(0), torch.get_num_threads()
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch re-exports it at run time only
        "127.0.0.1", 0, 1, is_master=True, wait_for_workers=False
    )
    try:
        yield int(store.port)
    finally:
        gc.unfreeze()  # a rank freezes what is there, and its process ends with it: here more runs follow
        if dist.is_initialized():
            dist.destroy_process_group()
        os.sched_setaffinity(0, processors)
        torch.set_num_threads(threads)
