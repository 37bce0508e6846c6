"""Clusters of unequal devices and the profiles on them, written down shortly."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan.documents.cluster import Cluster, DeviceGroup, Level
from pipeplan.documents.profile import Block, Device, Profile
from pipeplan.planners.problem import Options, PlanningProblem
from tests.pipeplan.builders import PLENTY, Cell, profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """So many devices of a type: blocks take `slowness` times as long on them as in the cells."""

    name: str
    count: int = 1
    slowness: float = 1.0
    memory_bytes: int = PLENTY


def mixed_problem(
    cells: Sequence[Cell],
    gpus: Sequence[Gpu],
    *,
    batch_size: int = 8,
    levels: Sequence[tuple[int, float]] = (),
    options: Options | None = None,
    sizes: Sequence[int] = (1,),
) -> PlanningProblem:
    """The cells on these devices, in a row; on one fast level unless levels are given."""
    devices = sum(gpu.count for gpu in gpus)
    chain = profile(cells, sizes=sizes)
    first, *others = {gpu.name: profile_on(chain, gpu) for gpu in gpus}.values()
    return PlanningProblem(
        profile=first,
        other_profiles=tuple(others),
        cluster=Cluster(
            levels=tuple(Level(size=n, bandwidth_bytes_per_s=speed) for n, speed in levels or ((devices, 1e9),)),
            groups=tuple(DeviceGroup(device=_device(gpu), count=gpu.count) for gpu in gpus),
        ),
        batch_size=batch_size,
        options=options or Options(),
    )


def profile_on(chain: Profile, gpu: Gpu) -> Profile:
    """The chain as measured on this type."""
    return replace(chain, device=_device(gpu), blocks=tuple(_slower(block, gpu.slowness) for block in chain.blocks))


def _device(gpu: Gpu) -> Device:
    return Device(name=gpu.name, memory_bytes=gpu.memory_bytes)


def _slower(block: Block, slowness: float) -> Block:
    times = ((m.forward_s * slowness, m.backward_s * slowness, m) for m in block.measurements)
    return replace(block, measurements=tuple(replace(m, forward_s=f, backward_s=b) for f, b, m in times))
