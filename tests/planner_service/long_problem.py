"""A problem that keeps the solver busy for as long as it may: three types of devices, blocks of uneven cost."""

import random

from pipeplan.client.client import Client
from pipeplan.documents.cluster import Cluster, DeviceGroup, Level
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.profile import Block, Device, Model, Profile
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.protocol.plans import PlanRequest

MIB, GIB = 2**20, 2**30
BLOCKS = 30
SLOWNESS = {"A": 1.0, "B": 1.7, "C": 2.3}
DEVICES = {name: Device(name=name, memory_bytes=size * GIB) for name, size in zip(SLOWNESS, (6, 3, 2), strict=True)}
CLUSTER = Cluster(
    groups=tuple(DeviceGroup(device=DEVICES[name], count=count) for name, count in (("A", 8), ("B", 8), ("C", 16))),
    levels=(
        Level(size=8, bandwidth_bytes_per_s=1e10, latency_s=5e-6),
        Level(size=4, bandwidth_bytes_per_s=1e9, latency_s=1e-5),
    ),
)


def profiles() -> tuple[Profile, ...]:
    """The model's profile on each type of device."""
    return tuple(_profile(DEVICES[name], slowness) for name, slowness in SLOWNESS.items())


def problem(time_limit_s: float) -> PlanningProblem:
    """The problem, to be searched for at most so long."""
    first, *others = profiles()
    options = Options(time_limit_s=time_limit_s)
    return PlanningProblem(profile=first, cluster=CLUSTER, batch_size=64, options=options, other_profiles=tuple(others))


def stored_request(service: Client, time_limit_s: float) -> PlanRequest:
    """The request for its plan, from a service that gets what it needs for it."""
    first, *others = [service.create_profile(profile).id for profile in profiles()]
    return PlanRequest(
        profile_id=first,
        other_profile_ids=tuple(others),
        cluster_id=service.create_cluster(CLUSTER).id,
        planner="exact",
        batch_size=64,
        options=Options(time_limit_s=time_limit_s),
    )


def _profile(device: Device, slowness: float) -> Profile:
    draw = random.Random(1)
    blocks = []
    boundary_bytes = MIB
    for index in range(BLOCKS):
        into_bytes, boundary_bytes = boundary_bytes, draw.randint(1, 30) * MIB
        forward_s = slowness * draw.uniform(0.001, 0.02)
        ratio, activation_bytes = draw.uniform(1.6, 2.4), draw.randint(1, 60) * MIB
        measurements = tuple(
            Measurement(
                microbatch_size=size,
                forward_s=size * forward_s,
                backward_s=size * forward_s * ratio,
                input_bytes=size * into_bytes,
                output_bytes=size * boundary_bytes,
                activation_bytes=size * activation_bytes,
            )
            for size in (1, 2, 4)
        )
        weight_bytes = draw.randint(5, 200) * MIB
        blocks.append(Block(name=f"block{index}", weight_bytes=weight_bytes, measurements=measurements))
    return Profile(model=Model(name="uneven"), device=device, dtype="float32", blocks=tuple(blocks))
