"""Rank: the work of one profiling process, from its start under torchrun to the file with its figures."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypedDict

import torch
import torch.distributed as dist

from pipeplan.errors import PipeplanError
from worker_agent.engine.casts import keeping_casts
from worker_agent.engine.clocks import CLOCK_NAMES, Clock, choose_clock
from worker_agent.engine.devices import describe, place, with_context
from worker_agent.engine.processes import exit_with_parent
from worker_agent.engine.results import failure_of
from worker_agent.engine.results import write as write_failure
from worker_agent.models.chain import Chain, build_model
from worker_agent.models.data import (
    DefaultFeed,
    Microbatch,
    MicrobatchSource,
    default_feed,
    in_blocks,
    moved,
    open_data,
)
from worker_agent.models.losses import Loss, build_loss
from worker_agent.models.spec import user_code
from worker_agent.profiler.autocast import Autocast
from worker_agent.profiler.block_memory import measure_memory, measure_split_memory
from worker_agent.profiler.exchange import measure_exchange
from worker_agent.profiler.job import ProfileDirectory, ProfileJob, ProgressWriter, read_job
from worker_agent.profiler.links import TINY_BYTES, measure_handing_over, measure_links, settle
from worker_agent.profiler.results import BlockFigures, RankFigures, write_figures
from worker_agent.profiler.series import ChainTimes, measure_in_series, standard_error
from worker_agent.profiler.times import (
    BlockCrossing,
    measure_split,
    measure_times,
    measure_version_s_per_byte,
    measure_without_graph,
    nothing_around,
    pass_backward,
    pass_forward,
    prepare_gradients,
)
from worker_agent.profiler.updates import UpdateTimes, Updating, measure_updates


class _How(TypedDict):
    """The arguments that all measurements of blocks share."""

    rounds: int
    make_clock: type[Clock]
    autocast: Autocast | None


_SEED = 0

MOST_PASSES = 50
"""The upper bound on rounds of updates and messages: each one follows a pass through the whole chain."""


class ProfilingRank:
    """One device's part of a profile. All ranks do the same at the same time, and start every round together."""

    def __init__(self, job: ProfileJob, device: torch.device, progress: ProgressWriter) -> None:
        self.job = job
        self.device = device
        self.progress = progress
        self.dtype: torch.dtype = getattr(torch, job.task.dtype)
        whole = build_model(job.task.model, seed=_SEED, dtype=self.dtype, empty=True)
        data = job.task.data
        named = None if data is None else DefaultFeed(data=data, loss=job.loss, description=data)
        self.feed = named or default_feed(whole, job.task.sequence_length)
        size = min(job.task.microbatch_sizes)
        self.chain: Chain = in_blocks(whole, self.feed.data, microbatch_size=size, seed=_SEED, dtype=self.dtype)
        for number, block in enumerate(self.chain.blocks):  # one by one: the host never holds a GPU's whole model
            self.chain.materialise(number, number + 1)
            block.to(device)
        self.blocks = self.chain.blocks
        self.loss: Loss = build_loss(self.feed.loss, device=device, dtype=self.dtype)
        self.make_clock = choose_clock(job.clock, device)
        named_autocast = job.task.autocast
        self.autocast = Autocast(self.blocks, device, getattr(torch, named_autocast)) if named_autocast else None
        self.without_graph: list[float] = []
        self.passes = job.task.rounds

    def measure(self) -> RankFigures:
        """Everything, in the order in which progress counts it."""
        with keeping_casts() if self.autocast else nullcontext():
            return self._measure()

    def _measure(self) -> RankFigures:
        described = describe(self.device, dist.get_world_size())
        self.progress.say(f"data: {self.feed.description}")
        sizes = tuple(self._size(microbatch_size) for microbatch_size in self.job.task.microbatch_sizes)
        updates, version_s_per_byte = self._updates()
        self.progress.step("links")
        link = measure_links(self.device)
        handing_over_s, handing_over_more_s, exchanged = None, None, None
        message_bytes = int(median(block.output_bytes for block in sizes[0]))
        if dist.get_world_size() > 1:
            handing_over = partial(measure_handing_over, before_each=self._one_pass(), rounds=self.passes)
            handing_over_s = handing_over(TINY_BYTES, self.device)
            handing_over_more_s = handing_over(message_bytes, self.device)
            exchanged = measure_exchange(
                self.blocks, self._forward(), self.device, rounds=self.passes, autocast=self.autocast
            )
        self.progress.step("done")
        return RankFigures(
            model_name=self.chain.name,
            block_names=self.chain.block_names,
            weight_bytes=self.chain.weight_bytes(),
            frozen_bytes=self.chain.frozen_bytes(),
            buffer_bytes=self.chain.buffer_bytes(),
            sizes=sizes,
            without_graph=tuple(self.without_graph),
            updates_s=updates.blocks_s,
            first_update_s=updates.first_s,
            version_s_per_byte=version_s_per_byte,
            handing_over_s=handing_over_s,
            handing_over_more_s=handing_over_more_s,
            message_bytes=message_bytes,
            tied=self.chain.tied_weights(),
            tied_frozen=self.chain.tied_weights(trained=False),
            exchanged=exchanged,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s if link else None,
            latency_s=link.latency_s if link else None,
            device=with_context(described, self.device, dist.get_world_size()),
            clock=CLOCK_NAMES[self.make_clock],
            torch_version=torch.__version__,
            model_spec=self.chain.spec,
        )

    def _size(self, microbatch_size: int) -> tuple[BlockFigures, ...]:
        """Every block's figures at one microbatch size. Adds an entry to `without_graph`."""
        microbatch = partial(self._microbatch, self._open(microbatch_size))
        round_s = self._warm_up(microbatch)
        measure = partial(self._series, microbatch_size, microbatch)
        found = measure_in_series(self.job.task, round_s, measure, lambda says_so: self._most(says_so) > 0)
        self.passes = max(self.passes, min(len(found.bare_s), MOST_PASSES))
        full_s = sum(median(block.forward_s) for block in found.blocks)
        self.without_graph.append((median(found.bare_s) / full_s or 1.0) if full_s > 0 else 1.0)
        memory = measure_memory(self.blocks, self.loss, microbatch(0), self.device, self.autocast)
        split_memory = measure_split_memory(self.blocks, self.loss, microbatch(0), self.device, self.autocast)
        columns = zip(found.blocks, found.split, memory, split_memory, strict=True)
        return tuple(BlockFigures(**asdict(t), **asdict(s), **asdict(m), **asdict(two)) for t, s, m, two in columns)

    def _series(
        self,
        microbatch_size: int,
        microbatch: Callable[[int], Microbatch],
        rounds: int,
        measured_s: Sequence[float],
    ) -> ChainTimes:
        """Measures `rounds` rounds of each kind; earlier ones took `measured_s`."""
        done, error = len(measured_s), standard_error(measured_s)
        known = "" if error is None else f", known to {error:.1%}"
        steps = 0 if done else self.job.task.warm_up_rounds + self.job.task.rounds

        def start_together(number: int) -> None:
            report = self.progress.step if number < steps else self.progress.say
            report(f"microbatches of {microbatch_size}: round {done + number + 1}{known}")
            dist.barrier()

        def later(number: int) -> Microbatch:
            return microbatch(done + number)

        how: _How = {"rounds": rounds, "make_clock": self.make_clock, "autocast": self.autocast}
        blocks = measure_times(
            self.blocks,
            self.loss,
            later,
            warm_up_rounds=1 if done else self.job.task.warm_up_rounds,
            before_round=start_together,
            **how,
        )
        bare_s = measure_without_graph(self.blocks, self.loss, later, **how)
        split = measure_split(self.blocks, self.loss, later, **how)
        return ChainTimes(blocks=blocks, bare_s=bare_s, split=split)

    def _warm_up(self, microbatch: Callable[[int], Microbatch]) -> float:
        """Passes microbatches for half of the task's seconds. Returns the last round's seconds on the slowest rank.

        A device is faster at first, until its clock slows down.
        """
        task = self.job.task
        if task.seconds == 0:
            return 0.0
        start_s, passed = time.perf_counter(), 0
        while passed < 2 or time.perf_counter() - start_s < task.seconds / 2:  # the first one takes longer
            before_s = time.perf_counter()
            pass_backward(self._pass_forward(microbatch(passed)), nothing_around, self.autocast)
            settle(self.device)
            passed += 1
        return self._most(time.perf_counter() - before_s)

    def _most(self, value: float) -> float:
        """The largest of all ranks' values."""
        every = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(every, dist.ReduceOp.MAX)
        return float(every)

    def _open(self, microbatch_size: int) -> MicrobatchSource:
        return open_data(self.feed.data, microbatch_size=microbatch_size, seed=_SEED, form=self.chain.batches)

    def _microbatch(self, source: MicrobatchSource, index: int) -> Microbatch:
        with user_code(f"microbatch {index + 1} of the data {self.feed.data}"):
            inputs, targets = source.microbatch(index)
        return moved(inputs, self.device, self.dtype), moved(targets, self.device, self.dtype)

    def _forward(self) -> Callable[[int], list[BlockCrossing]]:
        """Passes a microbatch of the smallest size forward, by its number."""
        source = self._open(min(self.job.task.microbatch_sizes))
        return lambda number: self._pass_forward(self._microbatch(source, number))

    def _one_pass(self) -> Callable[[int], None]:
        """Passes a microbatch of the smallest size forward and backward, by its number."""
        forward = self._forward()
        return lambda number: pass_backward(forward(number), nothing_around, self.autocast)

    def _pass_forward(self, microbatch: Microbatch) -> list[BlockCrossing]:
        return pass_forward(self.blocks, self.loss, *microbatch, nothing_around, self.autocast)

    def _updates(self) -> tuple[UpdateTimes, float]:
        """The times of an update, and the seconds for each byte of a weight version's copy.

        Each update and copy comes after a pass of the smallest microbatch.
        """
        parameters, task, autocast = prepare_gradients(self.blocks), self.job.task, self.autocast
        pass_one = self._one_pass()
        unscaled = None if autocast is None else torch.tensor(1.0 / autocast.loss_scale, dtype=torch.float64)
        how = Updating(
            optimizer=task.optimizer,
            dtype=task.dtype,
            rounds=self.passes,
            make_clock=self.make_clock,
            before_step=pass_one,
            afterwards=autocast.cast_anew if autocast else lambda blocks: None,
            gradient_factor=None if unscaled is None else unscaled.to(self.device),
        )
        updates = measure_updates(self.blocks, how)
        version_s_per_byte = measure_version_s_per_byte(
            parameters, rounds=self.passes, make_clock=self.make_clock, before_copy=pass_one
        )
        return updates, version_s_per_byte


def profile_rank(directory: ProfileDirectory) -> None:
    """Reads the job, measures and writes the figures. Raises any error of these steps."""
    job = read_job(directory)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    progress = ProgressWriter(directory.progress, rank=rank, total=job.steps)
    device = place(job.device, int(os.environ["LOCAL_RANK"]), ranks)
    profiling = ProfilingRank(job, device, progress)
    with ExitStack() as stack:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        stack.callback(dist.destroy_process_group)
        write_figures(directory.result(rank), profiling.measure())


def main() -> None:
    """The entry point under torchrun: `python -m worker_agent.profiler.rank DIRECTORY LAUNCHER`."""
    directory = ProfileDirectory(root=Path(sys.argv[1]))
    exit_with_parent(int(sys.argv[2]))
    try:
        profile_rank(directory)
    except (Exception, SystemExit) as error:  # the launcher must learn why this process ends
        # torch's own errors come from outside the user's code: usually another process is gone
        peer = isinstance(error, RuntimeError) and not isinstance(error, PipeplanError)
        write_failure(directory.failure(int(os.environ["RANK"])), failure_of(error, peer=peer))
        traceback.print_exception(error)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
