"""Exactness: a run of real ranks against the same training in one process, in float64."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.gpu_check.here import device
from benchmarks.gpu_check.ranks import Ranks
from pipeplan.documents.plan import Plan
from pipeplan.programs.instructions import Checkpoint, Instruction
from pipeplan.programs.timeline import Lane
from pipeplan.simulation.predict import predict
from tests.worker_agent.runtime.reference import Weights, train
from worker_agent.engine.results import RankResult
from worker_agent.models.chain import build_model
from worker_agent.models.data import moved, open_data
from worker_agent.models.losses import build_loss
from worker_agent.models.randomness import random_seed
from worker_agent.runtime.job import RunJob

WIDTH = 8
MODEL = f"worker_agent.models.presets:mlp?width={WIDTH}&depth=8"
DATA = f"worker_agent.models.presets:regression?width={WIDTH}&samples=64"
STEPS, STOP, SEED, RATE = 5, 3, 3, 0.1
TOLERANCE = 1e-10
"""The rounding of another order of additions, over some steps; a wrong version or gradient is off by over 1e-6."""

WITHIN_S, TIMEOUT_S = 60.0, 30.0
"""For a run, start of its processes included, and for one rank's wait for another."""

Reference = Callable[[Plan], Weights]


def in_one_process(plan: Plan) -> Weights:
    """The weights after the last step, by the schedule's mathematics."""
    return train(plan, MODEL, DATA, steps=STEPS, seed=SEED, learning_rate=RATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """A plan's run, and its expected weights. `resume`: also stopped in the middle and resumed, bit for bit."""

    plan: Plan
    ranks: Ranks
    transport: str
    reference: Reference = in_one_process
    model: str = MODEL
    concatenate: bool = False
    clip_norm: float | None = None
    resume: bool = False

    def __call__(self) -> dict[str, Any]:
        """Runs; returns the largest difference of any weight. Fails if it is too large, or the streams differ."""
        with tempfile.TemporaryDirectory(prefix="pipeplan-gpu-check-") as folder:
            job = self._job(Path(folder, "whole"))
            results = self.ranks.run(job, within_s=WITHIN_S)
            _require_streams(self.plan, results)
            whole = checkpoint_weights(Path(job.out), STEPS)
            found = {"difference": distance(whole, self.reference(self.plan)), "ranks": self.plan.workers}
            if found["difference"] > TOLERANCE:
                raise ValueError(f"the weights differ by {found['difference']:.3g} from those of one process")
            return found | (self._resumed(Path(folder, "stopped"), whole) if self.resume else {})

    def _resumed(self, out: Path, whole: Weights) -> dict[str, Any]:
        job = self._job(out)
        self.ranks.run(replace(job, steps=STOP, checkpoint_every=STOP), within_s=WITHIN_S)
        self.ranks.run(replace(job, first_step=STOP), within_s=WITHIN_S)
        difference = distance(checkpoint_weights(out, STEPS), whole)
        if difference != 0.0:
            raise ValueError(f"the resumed run's weights differ by {difference:.3g} from one that never stopped")
        return {"resumed_difference": difference}

    def _job(self, out: Path) -> RunJob:
        return RunJob(
            plan=self.plan,
            out=str(out),
            device=device().type,
            transport=self.transport,
            model=self.model,
            data=DATA,
            steps=STEPS,
            seed=SEED,
            learning_rate=RATE,
            checkpoint_every=STEPS,
            timeout_s=TIMEOUT_S,
            concatenate=self.concatenate,
            clip_norm=self.clip_norm,
        )


def checkpoint_weights(out: Path, step: int) -> Weights:
    """All stages' weights in a checkpoint, by their names in the whole model."""
    files = sorted((out / "checkpoints" / f"step-{step}").glob("stage-*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def distance(one: Weights, other: Weights) -> float:
    """The largest difference between any two entries."""
    if one.keys() != other.keys():
        raise ValueError(f"the weights are not the same: {sorted(one.keys() ^ other.keys())}")
    return max(float((one[name].cpu() - other[name].cpu()).abs().max()) for name in one)


def block_by_block(model: str) -> Reference:
    """Plain training on the device, block by block with the runtime's random states: for models that drop out."""

    def trained(plan: Plan) -> Weights:
        where = device()
        chain = build_model(model, seed=SEED, dtype=torch.float64)
        blocks = [block.to(where).train() for block in chain.blocks]
        source = open_data(DATA, microbatch_size=plan.microbatch_size, seed=SEED)
        optimizer = torch.optim.SGD(chain.root.parameters(), lr=RATE)
        batch = plan.batch_size // plan.microbatch_size
        for step in range(STEPS):
            optimizer.zero_grad()
            for k in range(step * batch, (step + 1) * batch):
                inputs, targets = (moved(each, where, torch.float64) for each in source.microbatch(k))
                values: Any = (inputs,)
                for index, block in enumerate(blocks):
                    torch.manual_seed(random_seed(SEED, k + 1, index))
                    values = block(*values)
                    values = values if isinstance(values, tuple) else (values,)
                loss: Tensor = build_loss(None)(values[0], targets) / batch
                torch.autograd.backward(loss)
            optimizer.step()
        return {name: parameter.detach() for name, parameter in chain.root.named_parameters()}

    return trained


def _require_streams(plan: Plan, results: tuple[RankResult, ...]) -> None:
    """Fails unless the ranks executed exactly what the simulator plays."""
    for result, lane in zip(results, predict(plan, batches=STEPS).lanes, strict=True):
        if _without_checkpoints(result.lane.lane()) != lane.instructions:
            raise ValueError(f"rank {lane.rank} executed another stream than the simulator plays")


def _without_checkpoints(lane: Lane) -> tuple[Instruction, ...]:
    return tuple(one for one in lane.instructions if not isinstance(one, Checkpoint))
