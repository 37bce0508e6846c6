"""Results: the measurements of each profiling process, and the profile and cluster made of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import ClassVar

from pipeplan.calibration.fit import factor_for
from pipeplan.costs.estimate import estimate
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.files import dump, parse
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.names import STRICT
from pipeplan.documents.plan import Stage
from pipeplan.documents.profile import Block, Device, Method, Model, Overheads, Profile
from pipeplan.documents.tied import TiedWeights
from pipeplan.programs.program import pipelines_in_a_row
from worker_agent.profiler.block_memory import BlockMemory, SplitMemory
from worker_agent.profiler.exchange import Exchanged
from worker_agent.profiler.job import ProfileJob
from worker_agent.profiler.series import rounds_s, standard_error
from worker_agent.profiler.times import BlockTimes, SplitTimes


@dataclass(frozen=True, kw_only=True)
class BlockFigures(BlockTimes, SplitTimes, BlockMemory, SplitMemory):
    """One block at one microbatch size on one device: seconds of each round, and bytes."""

    __pydantic_config__: ClassVar = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """All that one process measured. `sizes` holds the blocks' figures for each microbatch size, in the task's order.

    The link is the one to the next rank; the last rank of several has none. `without_graph` holds, for each microbatch
    size, the time of a forward without a graph as a share of one with a graph. `updates_s` is by block, and
    `first_update_s` comes on top in every stage. `handing_over_s` is the time in which the first two ranks send or
    take a message of a few bytes, `handing_over_more_s` one of `message_bytes`.
    `model_spec` names the model without a path, where the task's SPEC has one.
    """

    model_name: str
    block_names: tuple[str, ...]
    weight_bytes: tuple[int, ...]
    sizes: tuple[tuple[BlockFigures, ...], ...]
    without_graph: tuple[float, ...]
    updates_s: tuple[float, ...]
    first_update_s: float
    version_s_per_byte: float
    handing_over_s: float | None
    handing_over_more_s: float | None
    message_bytes: int
    tied: tuple[TiedWeights, ...]
    exchanged: Exchanged | None
    bandwidth_bytes_per_s: float | None
    latency_s: float | None
    device: Device
    clock: str
    torch_version: str
    model_spec: str | None = None
    frozen_bytes: tuple[int, ...] = ()
    buffer_bytes: tuple[int, ...] = ()
    tied_frozen: tuple[TiedWeights, ...] = ()

    __pydantic_config__: ClassVar = STRICT


def write_figures(path: Path, figures: RankFigures) -> None:
    """Writes a process's measurements, whole or not at all."""
    aside = path.with_suffix(".part")
    aside.write_text(dump(asdict(figures)), encoding="utf-8")
    aside.replace(path)


def read_figures(path: Path) -> RankFigures | None:
    """A process's measurements; None if it did not finish."""
    return parse(RankFigures, path.read_bytes()) if path.exists() else None


def profile_of(job: ProfileJob, ranks: Sequence[RankFigures]) -> Profile:
    """The profile that all ranks measured together.

    Blocks' times are means over the rounds of all ranks without the extremes (`trimmed_mean`), bytes are the largest of
    any rank, and overheads are medians over the ranks and the microbatch sizes.
    """
    first = ranks[0]
    updates_s = [median(figures.updates_s[index] for figures in ranks) for index in range(len(first.block_names))]
    nothing = (0,) * len(first.block_names)
    frozen_bytes, buffer_bytes = first.frozen_bytes or nothing, first.buffer_bytes or nothing
    trained_bytes = [every - frozen for every, frozen in zip(first.weight_bytes, frozen_bytes, strict=True)]
    update_s_per_byte = least_s_per_byte(updates_s, trained_bytes)
    instruction_s, message_s_per_byte = _handing_over_s(ranks)
    passes = [rounds_s(size) for figures in ranks for size in figures.sizes]
    errors = [error for error in map(standard_error, passes) if error is not None]
    profile = Profile(
        model=Model(name=first.model_name, spec=first.model_spec or job.task.model),
        device=device_of(ranks),
        dtype=job.task.dtype,
        autocast=job.task.autocast,
        blocks=tuple(
            Block(
                name=first.block_names[index],
                weight_bytes=first.weight_bytes[index],
                frozen_bytes=frozen_bytes[index],
                buffer_bytes=buffer_bytes[index],
                update_s=max(updates_s[index] - update_s_per_byte * trained_bytes[index], 0.0),
                cast_bytes=max(size[index].cast_bytes for figures in ranks for size in figures.sizes),
                measurements=tuple(
                    _measurement(size, [figures.sizes[position][index] for figures in ranks])
                    for position, size in enumerate(job.task.microbatch_sizes)
                ),
            )
            for index in range(len(first.block_names))
        ),
        overheads=Overheads(
            update_s_per_byte=update_s_per_byte,
            update_s=median(figures.first_update_s for figures in ranks),
            version_s_per_byte=median(figures.version_s_per_byte for figures in ranks),
            instruction_s=instruction_s,
            message_s_per_byte=message_s_per_byte,
            forward_without_graph=median(share for figures in ranks for share in figures.without_graph),
        ),
        method=Method(
            warm_up_rounds=job.task.warm_up_rounds,
            rounds=min(len(block.forward_s) for figures in ranks for size in figures.sizes for block in size),
            standard_error=max(errors, default=None),
            clock=first.clock,
            concurrent_devices=len(ranks),
            torch_version=first.torch_version,
        ),
        tied=first.tied,
        tied_frozen=first.tied_frozen,
    )
    return _with_exchange(profile, ranks)


def _handing_over_s(ranks: Sequence[RankFigures]) -> tuple[float, float]:
    """A rank's own time for a message, and the time for each byte: means over a sender and a receiver.

    The first is also taken as the overhead of any other instruction: a little Python, and cold caches.
    """
    few_s = [figures.handing_over_s for figures in ranks if figures.handing_over_s is not None]
    more_s = [figures.handing_over_more_s for figures in ranks if figures.handing_over_more_s is not None]
    if not (few_s and more_s):
        return 0.0, 0.0
    added_s, size_bytes = max(fmean(more_s) - fmean(few_s), 0.0), ranks[0].message_bytes
    return fmean(few_s), added_s / size_bytes if size_bytes else 0.0


def least_s_per_byte(updates_s: Sequence[float], trained_bytes: Sequence[int]) -> float:
    """The update's seconds for every byte of trained weights: the minimum over blocks."""
    return min((seconds / size for seconds, size in zip(updates_s, trained_bytes, strict=True) if size), default=0.0)


def _with_exchange(profile: Profile, ranks: Sequence[RankFigures]) -> Profile:
    """Adds the factor with which an exchange of all blocks, as one stage, adds the measured time to a backward."""
    measured = [figures.exchanged for figures in ranks if figures.exchanged is not None]
    if not measured:
        return profile
    cluster, stage = cluster_of(ranks), Stage(start=0, stop=len(profile.blocks), replicas=len(ranks))
    pairs = zip(profile.blocks, measured[0].bytes_by_block, strict=True)
    sizes = tuple(replace(block, weight_bytes=size, frozen_bytes=0, cast_bytes=0) for block, size in pairs)
    exchanged = replace(profile, blocks=sizes, tied=(), tied_frozen=())  # one stage has no copies

    def with_factor(profile: Profile, factor: float) -> Profile:
        return replace(profile, overheads=replace(profile.overheads, exchange_factor=factor))

    def added_s(factor: float) -> float:
        costs = estimate(
            with_factor(exchanged, factor),
            cluster,
            [stage],
            pipelines_in_a_row([len(ranks)]),
            microbatch_size=profile.microbatch_sizes[0],
            optimizer="sgd",
        )
        return costs[0].exchange_tail_s(split=False)

    factor = factor_for(added_s, median(each.added_s for each in measured))
    return profile if factor is None else with_factor(profile, factor)


def cluster_of(ranks: Sequence[RankFigures]) -> Cluster:
    """This node's devices as one level, with the medians of the links between neighbours."""
    return Cluster(
        device=device_of(ranks),
        levels=(
            Level(
                size=len(ranks),
                bandwidth_bytes_per_s=median(r.bandwidth_bytes_per_s for r in ranks if r.bandwidth_bytes_per_s),
                latency_s=median(r.latency_s for r in ranks if r.latency_s is not None),
            ),
        ),
    )


def device_of(ranks: Sequence[RankFigures]) -> Device:
    """The device with the smallest memory for tensors, which represents all."""
    return min((figures.device for figures in ranks), key=lambda device: device.usable_bytes)


_TAKEN_BYTES = ("weight_gradient_bytes", "input_bytes", "output_bytes", "split_gradient_bytes", "workspace_bytes")
_SPARED_BYTES = ("shared_bytes", "kept_output_bytes", "passed_bytes", "split_shared_bytes")


def _measurement(microbatch_size: int, figures: Sequence[BlockFigures]) -> Measurement:
    forward_s = [seconds for block in figures for seconds in block.forward_s]
    backward_s = [seconds for block in figures for seconds in block.backward_s]
    input_s = trimmed_mean([seconds for block in figures for seconds in block.backward_input_s])
    weight_s = trimmed_mean([seconds for block in figures for seconds in block.backward_weight_s])
    if not any(block.defers for block in figures):
        weight_s = 0.0  # only the clock's own time: a plan must not count on work to move
    # A forward whose backward is split replaces calls. The time for this is a cost of the split, and counts in p1.
    replacing_s = 0.0
    if any(block.defers for block in figures):
        split_forward_s = trimmed_mean([seconds for block in figures for seconds in block.split_forward_s])
        replacing_s = max(split_forward_s - trimmed_mean(forward_s), 0.0)
    return Measurement(
        microbatch_size=microbatch_size,
        forward_s=trimmed_mean(forward_s),
        backward_s=trimmed_mean(backward_s),
        backward_input_s=input_s + replacing_s,
        backward_weight_s=weight_s,
        deferred_share=weight_s / (input_s + weight_s) if weight_s else 0.0,
        activation_bytes=max(block.activation_bytes + block.graph_bytes for block in figures),
        split_activation_bytes=max(block.split_activation_bytes + block.split_graph_bytes for block in figures),
        **{name: max(getattr(block, name) for block in figures) for name in _TAKEN_BYTES},
        **{name: min(getattr(block, name) for block in figures) for name in _SPARED_BYTES},
        forward_spread_s=spread(forward_s),
        backward_spread_s=spread(backward_s),
    )


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest tenth; of three values or more, at least one is left out at each end.

    A run's time includes its slow microbatches, so a median is too low. The mean must not include a single pause.
    """
    cut = max(len(values) // 10, 1) if len(values) > 2 else 0
    return fmean(sorted(values)[cut : len(values) - cut])


def spread(values: Sequence[float]) -> float:
    """The interquartile range; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return upper - lower
