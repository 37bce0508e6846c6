"""Rank part: one stage of a rank, with its blocks and weights."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from pipeplan.programs.footprint import first_versions
from pipeplan.programs.instructions import BackwardInput
from pipeplan.programs.pipeline import ends_with_checkpoint
from pipeplan.programs.program import Program, Stream
from pipeplan.programs.repeating import shortened
from worker_agent.engine.optimizers import Optimizer
from worker_agent.engine.weights import Weights, find_slots
from worker_agent.models.chain import Chain
from worker_agent.models.losses import build_loss
from worker_agent.models.values import first_trained
from worker_agent.runtime import checkpoint
from worker_agent.runtime.among_stages import Part
from worker_agent.runtime.job import LossScale, RunJob
from worker_agent.runtime.module_state import Noted
from worker_agent.runtime.own_blocks import OwnBlocks
from worker_agent.runtime.own_weights import OwnWeights
from worker_agent.runtime.stage import StageBlocks
from worker_agent.runtime.stage_by_block import StageByBlock

LOSS_SCALING = ("autocast", "loss_scale")
"""The options whose change begins the dynamic loss scale anew."""


class RankPart:
    """One stage of a rank: its stream, blocks and weights. Most schedules give each rank one stage."""

    def __init__(
        self,
        job: RunJob,
        program: Program,
        chain: Chain,
        stream: Stream,
        device: torch.device,
        *,
        own: OwnBlocks,
        loss_scale: LossScale | None,
    ) -> None:
        self.stream = stream
        plan_stage = job.plan.stages[stream.stage]
        updates = program.schedule.updates_a_batch(program.pipeline, stream.stage)
        instructions = shortened(stream.instructions)
        self.blocks = [block.to(device) for block in own.blocks]
        self.takes = chain.batches
        self.input_gradients = plan_stage.start > first_trained(chain.blocks)
        self.first, self.last = stream.stage == 0, stream.stage == job.plan.depth - 1
        self.stage = build_stage(job, chain, stream, self.blocks, device)
        self.weights = Weights(
            find_slots(self.blocks, own.names),
            Optimizer(job.plan.optimizer, job.largest_learning_rate),
            version=max(first_versions(instructions)),
            master_weights=job.plan.master_weights,
            learning_rate=lambda version: job.learning_rate_at((version - 1) // updates),
        )
        homes = [own.homes[slot.parameter] for slot in self.weights.slots]
        counted = [stream.replica == 0 and stages[0] == stream.stage for stages in homes]
        self.among_stages = Part(weights=self.weights, homes=homes, counted=counted)
        live = checkpoint.Untrained(self.blocks, own.names)
        self.frozen, self.infinite = live.frozen, live.infinite
        self.noted = Noted(
            live,
            job.first_step,
            lambda batches: (
                stream.replica == 0 and ends_with_checkpoint(program.pipeline, batches, job.checkpoint_every)
            ),
        )
        if job.first_step:
            anew = any(change.step >= job.first_step and change.option in LOSS_SCALING for change in job.changes)
            checkpoint.load_stage(
                job.directory.checkpoints,
                job.first_step,
                stage=self.stream.stage,
                weights=self.weights,
                buffers=self.noted.live,
                loss_scale=None if anew else loss_scale,
            )


def build_stage(
    job: RunJob, chain: Chain, stream: Stream, blocks: Sequence[nn.Module], device: torch.device
) -> StageBlocks | StageByBlock:
    """What runs a stage's blocks: as a whole, or one by one where they are recomputed so."""
    plan_stage, last = job.plan.stages[stream.stage], stream.stage == job.plan.depth - 1
    dtype: torch.dtype = getattr(torch, job.plan.dtype)
    whole = partial(
        StageBlocks,
        recompute=plan_stage.recompute,
        split_backward=any(isinstance(i, BackwardInput) for i in shortened(stream.instructions)),
        concatenate=job.concatenate,
    )
    return (StageByBlock if plan_stage.recompute_unit == "block" else whole)(
        blocks,
        first_block=plan_stage.start,
        criterion=build_loss(job.loss, device=device, dtype=dtype) if last else None,
        seed=job.seed,
        device=device,
        minibatch_statistics=job.minibatch_statistics,
        autocast=getattr(torch, job.computes_in) if job.computes_in else None,
        block_names=chain.block_names[plan_stage.start : plan_stage.stop],
        own_weights=OwnWeights(blocks, dict(chain.root.named_parameters())),
    )
