"""Estimated: the profile that a datasheet gives of a trial's model, nothing being computed."""

import torch

from benchmarks.gpu_check.measured import SEED, Trial
from pipeplan.documents.profile import Profile
from worker_agent.models.data import open_data
from worker_agent.models.losses import build_loss
from worker_agent.profiler.analytic import ModelCounts, profile_of
from worker_agent.profiler.counts import build_shapes, count_blocks
from worker_agent.profiler.datasheets import Datasheet


def estimated_profile(trial: Trial, sheet: Datasheet, microbatch_size: int) -> Profile:
    """At one microbatch size."""
    dtype = getattr(torch, trial.dtype)
    chain, mode = build_shapes(trial.model, dtype, gpu=True)
    microbatch = open_data(trial.data, microbatch_size=microbatch_size, seed=SEED).microbatch(0)
    counts = ModelCounts(
        chain=chain,
        dtype=trial.dtype,
        sizes=(microbatch_size,),
        blocks=(count_blocks(mode, chain.blocks, build_loss(None), microbatch, floating=dtype, gpu=True),),
    )
    return profile_of(counts, sheet, trial.optimizer)
