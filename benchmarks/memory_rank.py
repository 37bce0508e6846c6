"""One rank of `benchmarks.memory`: executes a job and looks at the heap between instructions.

What the rank holds at its first instruction besides its weights is its context: modules, the data set, notices. Plans
leave it out, as they do a GPU's context (`Device.context_bytes`).
"""

import ctypes
import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from pipeplan.schedules.registry import schedule_named
from pipeplan.simulation.predict import program_of
from worker_agent.engine.clocks import HostClock
from worker_agent.engine.devices import place_process
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.losses import default_loss
from worker_agent.models.values import as_values
from worker_agent.profiler.times import measure_split
from worker_agent.runtime.job import RunJob, read_job
from worker_agent.runtime.rank import Rank
from worker_agent.runtime.status import StatusWriter

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def heap_bytes() -> int:
    """The allocated bytes, as the C library counts them, which include every tensor on the CPU."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


class Heap(StatusWriter):
    """A rank's status that records the heap at every instruction's start, above its size at the beginning."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.weight_bytes = 0
        self.context_bytes = 0
        self.most_bytes = 0
        self._before_bytes = heap_bytes()

    def at(self, instruction: int) -> None:
        """The rank starts this instruction of its stream."""
        if instruction == 0:
            self.context_bytes = heap_bytes() - self._before_bytes - self.weight_bytes
        self.note()
        super().at(instruction)

    def note(self) -> None:
        """Notes the heap now."""
        self.most_bytes = max(self.most_bytes, heap_bytes() - self._before_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that was noted, without the context."""
        return self.most_bytes - self.context_bytes


def warm_up(job: RunJob) -> None:
    """Loads and allocates what libraries keep for good."""
    source = open_data(job.data, microbatch_size=job.plan.microbatch_size, seed=0)
    inputs, targets = source.microbatch(0)
    blocks = build_model(job.model, seed=0).blocks
    for graphs in (False, True):  # a kernel without a graph may be another one
        values = as_values(inputs)
        with torch.set_grad_enabled(graphs):
            for block in blocks:
                values = as_values(block(*values))
    torch.autograd.backward(default_loss(values[0], targets))
    if job.plan.split_backward or schedule_named(job.plan.schedule).splits_backward:  # and those of p1 and p2
        measure_split(blocks, default_loss, lambda _: (inputs, targets), rounds=1, make_clock=HostClock)


def measured(job: RunJob, rank: int, device: torch.device) -> Heap:
    """The rank's heap before each instruction, and where backwards run blocks again after each block's forward."""
    warm_up(job)
    gc.collect()  # its model is in cycles
    heap = Heap(job.directory.status(rank))
    program = program_of(job.plan, batches=job.batches)
    chain = build_model(job.model, seed=0, empty=True)
    if job.plan.recomputes_by_block:
        for block in chain.blocks:
            block.register_forward_hook(lambda *_: heap.note())
    worker = Rank(job, program, chain, rank, device)
    own = {block for part in worker.parts for block in part.blocks}
    for block in () if chain.contents else chain.blocks:  # what a factory has made of other stages' blocks
        if block not in own:
            block.to("meta")
    heap.weight_bytes = sum(part.weights.live_bytes + part.weights.master_bytes for part in worker.parts)
    worker.execute(heap)
    return heap


def main(path: Path) -> None:
    """Writes the peak, and the context."""
    job, rank = replace(read_job(path), out=str(path.parent.parent)), int(os.environ["RANK"])
    device = place_process("cpu", rank, job.plan.workers)
    dist.init_process_group("gloo")
    heap = measured(job, rank, device)
    path.with_name(f"{rank}.json").write_text(json.dumps([heap.peak_bytes, heap.context_bytes]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
