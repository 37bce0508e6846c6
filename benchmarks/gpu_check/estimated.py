"""Estimated: the profile that a datasheet gives of a trial's model, nothing being computed."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu_check.measured import SEED, Trial
from pipeplan.documents.profile import Model, Profile
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.losses import build_loss
from worker_agent.profiler.analytic import ModelCounts, profile_of
from worker_agent.profiler.counts import count_blocks
from worker_agent.profiler.datasheets import Datasheet


def estimated_profile(trial: Trial, sheet: Datasheet, microbatch_size: int) -> Profile:
    """At one microbatch size."""
    fake, dtype = FakeTensorMode(), getattr(torch, trial.dtype)
    with fake:
        chain = build_model(trial.model, seed=SEED, dtype=dtype)
    microbatch = open_data(trial.data, microbatch_size=microbatch_size, seed=SEED).microbatch(0)
    counts = ModelCounts(
        model=Model(name=chain.name, spec=chain.spec),
        dtype=trial.dtype,
        block_names=chain.block_names,
        weight_bytes=chain.weight_bytes(),
        frozen_bytes=chain.frozen_bytes(),
        buffer_bytes=chain.buffer_bytes(),
        tied=chain.tied_weights(),
        tied_frozen=chain.tied_weights(trained=False),
        sizes=(microbatch_size,),
        blocks=(count_blocks(fake, chain.blocks, build_loss(None), microbatch, floating=dtype, gpu=True),),
    )
    return profile_of(counts, sheet, trial.optimizer)
