"""Rank: one process of a run, from its start under torchrun to its last report."""

import gc
import math
import os
import resource
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from pipeplan.errors import PipeplanError, RunFailedError, require
from pipeplan.programs.check import check
from pipeplan.programs.instructions import Checkpoint, Forward, Instruction
from pipeplan.programs.program import Program, Stream, brief
from pipeplan.programs.text import format_instruction
from pipeplan.programs.timeline_document import lane_document
from worker_agent.engine import results
from worker_agent.engine.clocks import clock_for, common_start_s, processor_time
from worker_agent.engine.cores import watched_cores
from worker_agent.engine.devices import device_memory, place_process
from worker_agent.engine.lines import Lines, near_ranks, open_lines
from worker_agent.engine.replicas import ExchangeError, open_replica_group
from worker_agent.engine.results import DivergedError, RankResult, failure_of
from worker_agent.models.chain import Chain, build_model
from worker_agent.models.data import in_blocks
from worker_agent.models.spec import described
from worker_agent.runtime import checkpoint
from worker_agent.runtime.among_stages import (
    Late,
    StagesTogether,
    TiedGroups,
    open_tied_groups,
    stages_of,
    tied_groups,
)
from worker_agent.runtime.executor import Executor, Hooks, run_together
from worker_agent.runtime.feed import MicrobatchFeed, open_feed
from worker_agent.runtime.job import LossScale, RunJob, live_in, read_job, write_job
from worker_agent.runtime.mail import Mail, edges_of
from worker_agent.runtime.measured import BatchLog, deferred_share
from worker_agent.runtime.model_checks import require_match, require_same_data, require_same_start
from worker_agent.runtime.own_blocks import own_blocks
from worker_agent.runtime.rank_part import RankPart
from worker_agent.runtime.recorder import Recorder
from worker_agent.runtime.stage_memory import untrained_bytes
from worker_agent.runtime.status import ENDING, MEETING, STARTING, Activity, StatusWriter, activity_of, read_status
from worker_agent.runtime.stop import StopWatch, closes_batch


class PeerLostError(RunFailedError):
    """This rank gave up because another one, for which it waited, is gone."""


class Rank:
    """One worker of a run: its stream, and its stages. `processes` is how many ranks of the run are on its node."""

    def __init__(
        self, job: RunJob, program: Program, chain: Chain, rank: int, device: torch.device, *, processes: int = 1
    ) -> None:
        self.job = job
        self.processes = processes
        self.program = program
        self.stream: Stream = program.streams[rank]
        self.device = device
        self.loss_scale = LossScale(job.first_loss_scale) if job.first_loss_scale else None
        streams = program.stage_streams(self.stream)
        self.parts = [
            RankPart(job, program, chain, stream, device, own=own, loss_scale=self.loss_scale)
            for stream, own in zip(streams, own_blocks(job.plan, chain, [s.stage for s in streams]), strict=True)
        ]
        self.updates = program.schedule.updates_a_batch(program.pipeline, self.stream.stage)

    def execute(self, status: StatusWriter) -> RankResult:
        """Executes the stream with all other ranks; returns what was measured."""
        lines, replicas, groups = self._meet(status)

        status.at(STARTING)
        feeds = [open_feed(self.job, self.program, p.stream, p.takes, self.device, status) for p in self.parts]
        mails = [
            Mail(self.program, self.stream.rank, lines, self.device, chunk=chunk) for chunk in range(len(self.parts))
        ]
        gc.collect()

        status.at(MEETING)
        self._compare_data(feeds)
        gc.freeze()  # a full collection over torch's own objects would stall a step
        log = BatchLog(self.job.directory.batches(self.stream.rank), status, self.job.first_step)
        clock = clock_for(self.device, common_start_s())
        late = Late(clock.lag)
        recorder = Recorder(
            clock,
            closes=self._closes_batch,
            on_batch=log.add,
            keep=self.job.window(self.program),
            processor=processor_time(self.device),
        )
        hooks = self._hooks(status, log, feeds, late)
        executors = self._executors(mails, replicas, groups, recorder, hooks, feeds, late)
        status.follow(recorder.finished)

        cores = watched_cores()
        decides = self.stream.stage == 0 and self.stream.replica == 0
        stop = StopWatch(self.job, _get_default_store(), decides=decides)
        with stop.watching():
            run_together(executors, self._instructions(executors, stop))
        late.flush()
        status.at(ENDING)
        for mail in mails:
            mail.flush()
        self._compare_data(feeds)
        dist.barrier()  # which holds no tensor: gloo's thread may abort a process that ends while it frees one

        lane = recorder.lane(rank=self.stream.rank, stage=self.stream.stage, replica=self.stream.replica)
        log.close()
        return RankResult(
            lane=lane_document(lane),
            first_instructions=recorder.first_instructions,
            busy_s=log.busy_s,
            peak_memory_bytes=log.peak_memory_bytes,
            peak_resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            device_memory=device_memory(self.device, self.processes),
            processor_s=recorder.processor_s,
            cores=cores(),
            first_processor_s=recorder.first_processor_s,
            deferred_share=deferred_share(lane, defers=any(part.stage.defers for part in self.parts)),
            reads_memory_of=near_ranks(lines, self.stream.rank),
            stop_step=self.job.stop_step,
        )

    def _meet(self, status: StatusWriter) -> tuple[Lines, dist.ProcessGroup | None, TiedGroups]:
        """Opens the lines between stages, and the groups of replicas and of stages that share weights.

        Raises InvalidInputError for a model whose copies do not begin with the same weights.
        """
        streams = [part for stream in self.program.streams for part in self.program.stage_streams(stream)]
        edges = {edge for stream in streams for edge in edges_of(stream)}
        status.at(MEETING)
        lines = open_lines(edges, self.stream.rank, timeout_s=self.job.timeout_s)
        replicas = open_replica_group([s.stage for s in self.program.streams], self.stream.rank)
        groups = open_tied_groups(self.program, self.job.tied, self.stream.rank)
        if not self.job.first_step:  # a checkpoint gives all copies the same weights
            require_same_start(self.parts, replicas, groups)
        return lines, replicas, groups

    def _compare_data(self, feeds: Iterable[MicrobatchFeed | None]) -> None:
        """Raises InvalidInputError, in all ranks, if two have read different inputs as the same microbatch."""
        require_same_data([pair for feed in feeds if feed for pair in feed.digests.items()], self.job.data)

    def _executors(
        self,
        mails: Sequence[Mail],
        replicas: dist.ProcessGroup | None,
        tied: TiedGroups,
        recorder: Recorder,
        hooks: Hooks,
        feeds: Sequence[MicrobatchFeed | None],
        late: Late,
    ) -> list[Executor]:
        """One for each of the rank's stages; of two consecutive stages, one passes its tensors to the other."""
        among_stages = StagesTogether(
            [part.among_stages for part in self.parts],
            groups=tied,
            clip_norm=self.job.clip_norm,
            loss_scale=self.loss_scale,
            device=self.device,
            late=late,
        )
        executors = [
            Executor(
                stream=part.stream,
                stage=part.stage,
                weights=part.weights,
                mail=mail,
                replicas=replicas,
                recorder=recorder,
                hooks=hooks,
                inputs=feed.inputs if feed and part.first else None,
                targets=feed.targets if feed and part.last else None,
                update_microbatches=self.job.plan.microbatches,
                among_stages=among_stages,
                input_gradients=part.input_gradients,
                untrained_bytes=held_once,
            )
            for part, held_once, mail, feed in zip(
                self.parts, untrained_bytes(part.blocks for part in self.parts), mails, feeds, strict=True
            )
        ]
        by_stage = {part.stream.stage: executor for part, executor in zip(self.parts, executors, strict=True)}
        for stage, executor in by_stage.items():
            if stage + 1 in by_stage:
                executor.hand_to(by_stage[stage + 1])
        return executors

    def _closes_batch(self, instruction: Instruction) -> bool:
        return closes_batch(instruction, self.updates, len(self.parts))

    def _instructions(self, executors: Sequence[Executor], stop: StopWatch) -> Iterator[Instruction]:
        """The stream; where the run stops early, from the batch on in which this is known, that of the shorter run."""
        batch, begun, begins = self.job.first_step, 0, True
        for index, instruction in enumerate(self.stream.instructions):
            if begins and not isinstance(instruction, Checkpoint):  # which belongs to the batch before
                last = stop.last_batch(batch)
                if last is not None:
                    self.job = replace(self.job, stop_step=last)
                    self.program = self.job.program()
                    self.stream = self.program.streams[self.stream.rank]
                    if self.stream.rank == 0:
                        write_job(self.job)
                    rest: Iterable[Instruction] = self.stream.instructions[index:]
                    if batch == last:  # it is done, but the longer run has no checkpoint after it
                        rest = (i for i in self.stream.instructions[begun:] if isinstance(i, Checkpoint))
                        rest = () if index == len(self.stream.instructions) else rest
                    rest = tuple(rest)
                    for chunk, executor in enumerate(executors):
                        executor.go_on_with(tuple(i for i in rest if i.chunk == chunk))
                    yield from rest
                    return
                begins, begun = False, index  # where the batch at hand begins
            yield instruction
            if self._closes_batch(instruction):
                begins, batch = True, batch + 1

    def _hooks(self, status: StatusWriter, log: BatchLog, feeds: Sequence[MicrobatchFeed | None], late: Late) -> Hooks:
        """Status, losses, data, and checkpoints: everything besides the stream."""
        pipeline = self.program.pipeline

        def on_instruction(index: int, instruction: Instruction) -> None:
            status.at(index)
            for feed in filter(None, feeds):
                feed.load_ahead()
            if isinstance(instruction, Forward):
                self.parts[instruction.chunk].noted.forward_of(pipeline.batch_of(instruction.microbatch))

        def look(version: int, loss: float) -> None:
            # A loss that is not finite never becomes finite again: the run ends, with its checkpoints.
            if not math.isfinite(loss):
                raise DivergedError(f"the loss is {loss} in step {version // self.updates}: try a lower learning rate")
            log.note_loss((version - 1) // self.updates, loss)
            status.note_loss(loss)

        def on_update(version: int, loss: Tensor | None) -> None:
            if loss is not None:
                late.add(loss, partial(look, version), batch=(version - 1) // self.updates + 1)
            status.updated(version // self.updates)
            late.batch_done(version // self.updates)

        def on_checkpoint(instruction: Checkpoint) -> None:
            late.flush()  # values that are not finite are never saved
            if self.stream.replica > 0:
                return
            batches, part = instruction.version // self.updates, self.parts[instruction.chunk]
            checkpoint.save_stage(
                self.job.directory.checkpoints,
                self.job.manifest(batches),
                stage=part.stream.stage,
                weights=part.weights,
                buffers=part.noted.take(batches),
                frozen=part.frozen,
                infinite=part.infinite,
                loss_scale=self.loss_scale,
                versions=range(instruction.oldest, instruction.version + 1),
            )

        return Hooks(on_instruction=on_instruction, on_update=on_update, on_checkpoint=on_checkpoint)


def run_rank(job: RunJob, rank: int, local_rank: int, status: StatusWriter) -> None:
    """The work of a rank up to the file with its result. Raises any error.

    The first rank writes down which stages share weights, before any rank is at an instruction. Whoever follows the run
    can then read the streams that it executes.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    rule = f"must be {world_size}, as many as processes were started"
    require(job.plan.workers == world_size, "plan.workers", rule, job.plan.workers)
    worker: Rank | None = None
    shared = job.transport == "host"  # NCCL takes one rank a GPU, gloo any number
    device = place_process(job.device, local_rank, int(os.environ["LOCAL_WORLD_SIZE"]), shared=shared)
    require(job.transport != "nccl" or device.type == "cuda", "transport", "must not be nccl without a GPU", "nccl")
    backend = "nccl" if device.type == "cuda" and not shared else "gloo"
    try:
        status.at(MEETING)
        dist.init_process_group(backend, timeout=timedelta(seconds=job.timeout_s))
        status.at(STARTING)
        dtype: torch.dtype = getattr(torch, job.plan.dtype)
        chain = build_model(job.model, seed=job.seed, dtype=dtype, empty=True)
        chain = in_blocks(chain, job.data, microbatch_size=job.plan.microbatch_size, seed=job.seed, dtype=dtype)
        require_match(job, chain)
        job = replace(job, tied=tied_groups(stages_of(job.plan, chain)))
        program = job.program()
        check(brief(program))
        if rank == 0:
            write_job(job)
        worker = Rank(job, program, chain, rank, device, processes=int(os.environ["LOCAL_WORLD_SIZE"]))
        del chain  # frees the other ranks' blocks
        results.write(job.directory.result(rank), worker.execute(status))
    except RuntimeError as error:
        # the connections stay open until this process has reported: else others report a lost peer first
        instructions = () if worker is None else worker.stream.instructions
        raise _explained(error, instructions, job.directory.status(rank), rank) from error
    if worker.job.stop_step is not None:
        sys.stdout.flush()
        os._exit(0)  # receives that were posted for later batches never complete, and torch would wait for them
    dist.destroy_process_group()


def _explained(error: RuntimeError, instructions: Sequence[Instruction], status: Path, rank: int) -> PipeplanError:
    """The meaning of a failure in torch: in an exchange another rank is gone, elsewhere the model or device failed."""
    now = read_status(status)
    index = now.instruction if now else STARTING
    cause = described(error)
    if index == ENDING:
        return PeerLostError(f"another rank was lost at the end: {cause}", rank=rank)
    if index < 0:
        several = int(os.environ["WORLD_SIZE"]) > int(os.environ["LOCAL_WORLD_SIZE"])
        # at the meeting, and with several nodes anywhere, the usual cause is a lost rank
        failure = PeerLostError if several or index == MEETING else RunFailedError
        return failure(f"starting failed: {cause}", rank=rank)
    instruction = instructions[index]
    if activity_of(instruction) is Activity.PEER or isinstance(error, ExchangeError):
        return PeerLostError(f"another rank was lost at {format_instruction(instruction)}: {cause}", rank=rank)
    return RunFailedError(f"{format_instruction(instruction)} failed: {cause}", rank=rank)


def main(path: Path, status: StatusWriter) -> None:
    """The work of a process that torchrun has started (`start`), and its final report."""
    job = replace(read_job(path), out=str(path.parent.parent))  # nodes may see the folder under other names
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    log = job.directory.log(rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())

    results.reserve(job.directory.failure(rank))
    try:
        live_in(job.directory.root)
        run_rank(job, rank, local_rank, status)
    except (Exception, SystemExit) as error:  # the launcher must learn why this process ends
        results.write(job.directory.failure(rank), failure_of(error, peer=isinstance(error, PeerLostError)))
        traceback.print_exception(error)
        raise SystemExit(1) from None
