"""Roofline: how long operations take on a device, from its datasheet.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer (Williams, Waterman and
Patterson 2009, "Roofline"), each at the share of the peak that the datasheet states.

Analytic: a profile from a model's shapes and a device's datasheet. Nothing is computed, no device is needed.

The model's blocks are built and run on fake tensors, which find out what every block does, moves and keeps; the
datasheet says how long that takes. Bytes are exact where the measuring profiler's are; times are estimates, and the
profile says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeplan.costs.memory import OPTIMIZER_COPIES
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.profile import DTYPE_BYTES, Block, Measurement, Method, Model, Overheads, Profile
from pipeplan.errors import InvalidInputError, require, require_count
from worker_agent.models.chain import Chain, build_model
from worker_agent.models.data import DefaultFeed, Microbatch, default_feed, open_data
from worker_agent.models.losses import Loss, build_loss
from worker_agent.profiler.counts import BlockCounts, count_blocks
from worker_agent.profiler.datasheets import Datasheet
from worker_agent.profiler.operations import DeviceOperation, foreign_code


def duration_s(operations: Sequence[DeviceOperation], sheet: Datasheet) -> float:
    """Seconds of these operations in a row.

    A GPU computes while its host launches what comes next: the slower of the two decides. A CPU does both itself.
    Raises InvalidInputError for matrix products in a dtype of which the datasheet does not say the peak.
    """
    computing_s = sum(_computing_s(operation, sheet) for operation in operations)
    launching_s = len(operations) * sheet.launch_s
    return max(computing_s, launching_s) if sheet.kind == "gpu" else computing_s + launching_s


def _computing_s(operation: DeviceOperation, sheet: Datasheet) -> float:
    arithmetic_s = operation.flops / sheet.reached_flops_per_s(operation.dtype) if operation.flops else 0.0
    return max(arithmetic_s, operation.moved_bytes / sheet.reached_bytes_per_s)


def update_s_per_byte(optimizer: str, dtype: str, sheet: Datasheet) -> float:
    """Seconds of an optimizer's fused step a byte of weights: its memory traffic.

    It reads gradients, and reads and writes weights and states. Weights of 16 bits have float32 copies, on which it
    works and of which it writes the weights.
    """
    weight_bytes = DTYPE_BYTES[dtype]
    worked_on_bytes = max(weight_bytes, DTYPE_BYTES["float32"])
    written_bytes = weight_bytes if worked_on_bytes > weight_bytes else 0
    moved_bytes = weight_bytes + 2 * worked_on_bytes * (1 + OPTIMIZER_COPIES[optimizer]) + written_bytes
    return moved_bytes / weight_bytes / sheet.reached_bytes_per_s


def version_s_per_byte(sheet: Datasheet) -> float:
    """Seconds of copying weights aside, a byte of them: read once, written once."""
    return 2 / sheet.reached_bytes_per_s


if TYPE_CHECKING:  # it needs pydantic, which what it describes does not
    from worker_agent.profiler.job import ProfileJob

CLOCK = "datasheet"
"""What an estimated profile's `method.clock` says."""

_SEED = 0

OnSize = Callable[[int], None]
"""Told the microbatch size that comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCounts:
    """What a model's blocks do, whatever the device: `sizes` are the microbatch sizes of `blocks`, an entry each."""

    model: Model
    dtype: str
    block_names: tuple[str, ...]
    weight_bytes: tuple[int, ...]
    sizes: tuple[int, ...]
    blocks: tuple[tuple[BlockCounts, ...], ...]


def estimate_profile(job: "ProfileJob", sheet: Datasheet, on_size: OnSize = lambda _: None) -> Profile:
    """The profile that the datasheet's device would have.

    Of the job, what only measuring needs (devices, rounds, clock) is left aside. Raises InvalidInputError for a model,
    data or loss that cannot be, blocks that need their tensors' contents, or a dtype that the datasheet does not name.
    """
    rule = f"must be one in which {sheet.name}'s datasheet gives its speed: {', '.join(sheet.flops_per_s)}"
    require(job.task.dtype in sheet.flops_per_s, "dtype", rule, job.task.dtype)
    return profile_of(count_model(job, gpu=sheet.kind == "gpu", on_size=on_size), sheet, job.task.optimizer)


def count_model(job: "ProfileJob", *, gpu: bool, on_size: OnSize = lambda _: None) -> ModelCounts:
    """The counts of the job's model and data, with a GPU's kernels or this machine's CPU's."""
    task = job.task
    fake = FakeTensorMode()
    chain = _built(fake, job)
    feed = default_feed(chain) if task.data is None else DefaultFeed(data=task.data, loss=job.loss, description="")
    loss = _loss(feed.loss)
    blocks = []
    for size in task.microbatch_sizes:
        on_size(size)
        microbatch = _microbatch(feed.data, size)
        blocks.append(count_blocks(fake, chain.blocks, loss, microbatch, floating=getattr(torch, task.dtype), gpu=gpu))
    return ModelCounts(
        model=Model(name=chain.name, spec=chain.spec),
        dtype=task.dtype,
        block_names=chain.block_names,
        weight_bytes=chain.weight_bytes(),
        sizes=task.microbatch_sizes,
        blocks=tuple(blocks),
    )


def profile_of(counts: ModelCounts, sheet: Datasheet, optimizer: str) -> Profile:
    """What the counts take by the datasheet. Raises InvalidInputError for a dtype that the datasheet does not name."""
    blocks = zip(counts.block_names, counts.weight_bytes, zip(*counts.blocks, strict=True), strict=True)
    return Profile(
        model=counts.model,
        device=sheet.device(),
        dtype=counts.dtype,
        blocks=tuple(
            Block(
                name=name,
                weight_bytes=weight_bytes,
                measurements=tuple(
                    _measurement(size, block, sheet) for size, block in zip(counts.sizes, by_size, strict=True)
                ),
            )
            for name, weight_bytes, by_size in blocks
        ),
        overheads=Overheads(
            update_s_per_byte=update_s_per_byte(optimizer, counts.dtype, sheet),
            version_s_per_byte=version_s_per_byte(sheet),
        ),
        method=Method(warm_up_rounds=0, rounds=0, clock=CLOCK, torch_version=torch.__version__),
        estimated=True,
    )


def estimate_cluster(sheet: Datasheet, devices: int) -> Cluster:
    """So many of the datasheet's devices under one level, joined by its link. Raises InvalidInputError without one."""
    require_count("devices", devices)
    bandwidth = sheet.link_bandwidth_bytes_per_s
    if bandwidth is None:
        raise InvalidInputError("link_bandwidth_bytes_per_s", "is needed to write a cluster", bandwidth)
    level = Level(size=devices, bandwidth_bytes_per_s=bandwidth, latency_s=sheet.link_latency_s)
    return Cluster(device=sheet.device(), levels=(level,))


def _built(fake: FakeTensorMode, job: "ProfileJob") -> Chain:
    """The chain with fake weights: they take no memory, whatever the model's size."""
    rule = "must be a model that can be built of tensors without contents to be estimated"
    with foreign_code("model", rule, job.task.model), fake:
        return build_model(job.task.model, seed=_SEED, dtype=getattr(torch, job.task.dtype))


def _microbatch(data: str, microbatch_size: int) -> Microbatch:
    with foreign_code("data", "must be a factory of microbatches that can be read", data):
        return open_data(data, microbatch_size=microbatch_size, seed=_SEED).microbatch(0)


def _loss(spec: str | None) -> Loss:
    with foreign_code("loss", "must be a loss or a factory of one", spec):
        return build_loss(spec)


def _measurement(microbatch_size: int, counts: BlockCounts, sheet: Datasheet) -> Measurement:
    backward_s = duration_s(counts.backward, sheet)
    input_s = min(duration_s(counts.backward_input, sheet), backward_s)
    return Measurement(
        microbatch_size=microbatch_size,
        forward_s=duration_s(counts.forward, sheet),
        backward_s=backward_s,
        backward_input_s=input_s,
        backward_weight_s=backward_s - input_s,
        input_bytes=counts.input_bytes,
        output_bytes=counts.output_bytes,
        activation_bytes=counts.activation_bytes,
        workspace_bytes=counts.workspace_bytes,
    )
