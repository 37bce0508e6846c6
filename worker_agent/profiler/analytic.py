"""Analytic: a profile from a model's shapes and a device's datasheet. Nothing is computed and no device is needed.

The model's blocks are built and run on tensors without contents. These show each block's operations and the bytes that
it moves and keeps; the datasheet says how long that takes. Bytes are exact where the measuring profiler's are. Times
are estimates, and the profile is marked as estimated.

`kernels` has the time of each operation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipeplan.costs.memory import OPTIMIZER_COPIES
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.named_clusters import most_devices
from pipeplan.documents.profile import DTYPE_BYTES, Block, Method, Model, Overheads, Profile
from pipeplan.errors import InvalidInputError, require, require_count
from worker_agent.models.chain import Chain
from worker_agent.models.data import DefaultFeed, default_feed, in_blocks, open_data
from worker_agent.models.losses import build_loss
from worker_agent.profiler.counts import BlockCounts, build_shapes, count_blocks
from worker_agent.profiler.datasheets import Datasheet
from worker_agent.profiler.kernels import duration_s
from worker_agent.profiler.operations import DeviceOperation, foreign_code

if TYPE_CHECKING:  # it needs pydantic, which this module does without
    from worker_agent.profiler.job import ProfileJob

CLOCK = "datasheet"
"""The `method.clock` of an estimated profile."""

_SEED = 0

OnSize = Callable[[int], None]
"""Called with the next microbatch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCounts:
    """The operations and bytes of a chain's blocks, for any device. `sizes` are microbatch sizes; `blocks` has one
    entry for each.
    """

    chain: Chain
    dtype: str
    sizes: tuple[int, ...]
    blocks: tuple[tuple[BlockCounts, ...], ...]
    notes: tuple[str, ...] = ()


def estimate_profile(job: "ProfileJob", sheet: Datasheet, on_size: OnSize = lambda _: None) -> Profile:
    """The profile that the datasheet's device would have.

    Fields of the job that only a measurement needs (devices, rounds, clock) are ignored. Raises InvalidInputError for a
    model, data or loss that is not possible, blocks that need their tensors' contents, or a dtype that the datasheet
    lacks.
    """
    require_speed(job.task.dtype, sheet)
    return profile_of(count_model(job, gpu=sheet.kind == "gpu", on_size=on_size), sheet, job.task.optimizer)


def require_speed(dtype: str, sheet: Datasheet) -> None:
    """Raises InvalidInputError for a dtype that the datasheet lacks."""
    rule = f"must be one in which {sheet.name}'s datasheet gives its speed: {', '.join(sheet.flops_per_s)}"
    require(dtype in sheet.flops_per_s, "dtype", rule, dtype)


def count_model(job: "ProfileJob", *, gpu: bool, on_size: OnSize = lambda _: None) -> ModelCounts:
    """The counts of the job's model and data, with a GPU's kernels or this machine's CPU's."""
    task = job.task
    dtype = getattr(torch, task.dtype)
    chain, mode = build_shapes(task.model, dtype, gpu=gpu)
    named = None if task.data is None else DefaultFeed(data=task.data, loss=job.loss, description="")
    feed = named or default_feed(chain, task.sequence_length)
    with foreign_code("data", "must be a factory of microbatches that can be read", feed.data):
        chain = in_blocks(chain, feed.data, microbatch_size=min(task.microbatch_sizes), seed=_SEED, dtype=dtype)
    with foreign_code("loss", "must be a loss or a factory of one", feed.loss):
        loss = build_loss(feed.loss)

    blocks = []
    for size in task.microbatch_sizes:
        on_size(size)
        with foreign_code("data", "must be a factory of microbatches that can be read", feed.data):
            source = open_data(feed.data, microbatch_size=size, seed=_SEED, form=chain.batches)
            microbatch = source.microbatch(0)
        blocks.append(count_blocks(mode, chain.blocks, loss, microbatch, floating=dtype, gpu=gpu))
    return ModelCounts(chain=chain, dtype=task.dtype, sizes=task.microbatch_sizes, blocks=tuple(blocks))


def profile_of(counts: ModelCounts, sheet: Datasheet, optimizer: str) -> Profile:
    """The profile of the counts, by the datasheet. Raises InvalidInputError for a dtype that the datasheet does not
    name.
    """
    chain = counts.chain
    sizes_bytes = zip(chain.weight_bytes(), chain.frozen_bytes(), chain.buffer_bytes(), strict=True)
    blocks = zip(chain.block_names, sizes_bytes, zip(*counts.blocks, strict=True), strict=True)
    return Profile(
        model=Model(name=chain.name, spec=chain.spec),
        device=sheet.device(),
        dtype=counts.dtype,
        blocks=tuple(
            Block(
                name=name,
                weight_bytes=weight_bytes,
                frozen_bytes=frozen_bytes,
                buffer_bytes=buffer_bytes,
                measurements=tuple(
                    Measurement(
                        microbatch_size=size,
                        kept_output_bytes=block.kept_output_bytes,
                        passed_bytes=block.passed_bytes,
                        **figures_of(block, partial(duration_s, sheet=sheet)),
                    )
                    for size, block in zip(counts.sizes, by_size, strict=True)
                ),
            )
            for name, (weight_bytes, frozen_bytes, buffer_bytes), by_size in blocks
        ),
        overheads=Overheads(
            update_s_per_byte=update_s_per_byte(optimizer, counts.dtype, sheet),
            version_s_per_byte=version_s_per_byte(sheet),
        ),
        method=Method(warm_up_rounds=0, rounds=0, clock=CLOCK, torch_version=torch.__version__),
        estimated=True,
        tied=chain.tied_weights(),
        tied_frozen=chain.tied_weights(trained=False),
        notes=(*chain.left_out, *counts.notes),
    )


def estimate_cluster(sheet: Datasheet, devices: int) -> Cluster:
    """This many of the datasheet's devices in one server, joined by its link.

    Raises InvalidInputError for a datasheet without a link, and for more devices than a server holds.
    """
    require_count("devices", devices)
    most = most_devices(sheet.name)
    rule = f"must be at most {most}, which one server holds: `pipeplan clusters` has clusters of several by name"
    require(devices <= most, "devices", rule, devices)
    bandwidth = sheet.link_bandwidth_bytes_per_s
    if bandwidth is None:
        raise InvalidInputError("link_bandwidth_bytes_per_s", "is needed to write a cluster", bandwidth)
    level = Level(size=devices, bandwidth_bytes_per_s=bandwidth, latency_s=sheet.link_latency_s)
    return Cluster(device=sheet.device(), levels=(level,))


def figures_of(counts: BlockCounts, seconds: Callable[[Sequence[DeviceOperation]], float]) -> dict[str, Any]:
    """The seconds and bytes of a block, by the fields of a Measurement and of a FormMeasurement."""
    backward_s = seconds(counts.backward)
    input_s = min(seconds(counts.backward_input), backward_s)
    taken_bytes = ("input_bytes", "output_bytes", "activation_bytes", "workspace_bytes")
    return {
        "forward_s": seconds(counts.forward),
        "backward_s": backward_s,
        "backward_input_s": input_s,
        "backward_weight_s": backward_s - input_s,
        **{name: getattr(counts, name) for name in taken_bytes},
    }


def update_s_per_byte(optimizer: str, dtype: str, sheet: Datasheet) -> float:
    """Seconds of an optimizer's fused step for each byte of weights: its memory traffic.

    The step reads gradients, and reads and writes weights and states. Where weights have 16 bits, it works on float32
    copies of them and then writes the weights.
    """
    weight_bytes = DTYPE_BYTES[dtype]
    worked_on_bytes = max(weight_bytes, DTYPE_BYTES["float32"])
    written_bytes = weight_bytes if worked_on_bytes > weight_bytes else 0
    moved_bytes = weight_bytes + 2 * worked_on_bytes * (1 + OPTIMIZER_COPIES[optimizer]) + written_bytes
    return moved_bytes / weight_bytes / sheet.reached_bytes_per_s


def version_s_per_byte(sheet: Datasheet) -> float:
    """Seconds of a copy of the weights for each byte of them: read once, written once."""
    return 2 / sheet.reached_bytes_per_s
