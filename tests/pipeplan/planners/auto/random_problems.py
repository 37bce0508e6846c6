"""Random problems of many kinds, by seed: what small whole numbers and equal blocks do not show."""

import random
from dataclasses import replace
from itertools import pairwise

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.profile import Block, Device, Model, Profile
from pipeplan.documents.tied import TiedWeights
from pipeplan.planners.problem import Options, PlanningProblem

KINDS = ("uneven", "latency", "huge", "tight", "prime", "one", "many", "branch", "server", "equal", "deep", "split")
"""Blocks that differ much, long ways, huge boundaries, memory that hardly fits, a batch that is a prime, one device,
more devices than blocks, graphs, a parameter server, equal blocks, many blocks, a split backward.
"""

PLENTY = 10**15


def random_problem(seed: int) -> tuple[str, PlanningProblem]:
    """A kind, and a problem of it on at most twelve devices."""
    draw = random.Random(seed)
    kind = draw.choice(KINDS)
    profile = _profile(draw, kind)
    memory_bytes = _memory_bytes(draw, profile) if kind == "tight" or draw.random() < 0.25 else PLENTY
    device = Device(name="device", memory_bytes=memory_bytes)
    batch_sizes = (2, 3, 5, 7, 11, 13, 17, 23, 31) if kind == "prime" else (1, 2, 4, 6, 8, 12, 16, 24, 48)
    exchange = "parameter-server" if kind == "server" else None
    return kind, PlanningProblem(
        profile=profile,
        cluster=Cluster(device=device, levels=_levels(draw, kind)),
        batch_size=draw.choice(batch_sizes),
        options=Options(optimizer=draw.choice(("sgd", "adam")), synchronisation=exchange),
    )


def mid_size_problem(seed: int) -> PlanningProblem:
    """10 to 16 blocks on 8 to 16 devices with slow networks, and memory that is often tight."""
    draw = random.Random(seed)
    blocks, sigma = draw.randint(10, 16), draw.choice([0.2, 0.4, 0.7])
    sizes, is_split = draw.choice([(1, 2, 4), (1, 2, 4, 8), (1, 2)]), draw.random() < 0.25
    start, kept, sent, weights = (
        draw.choice(each) for each in ([0, 0.5, 1.5], [30, 60, 120], [1, 4, 12], [20, 60, 150])
    )
    made = []
    for index in range(blocks):
        compute, own_weights, output = (draw.lognormvariate(0, sigma) for _ in range(3))
        measured = tuple(
            Measurement(
                microbatch_size=size,
                forward_s=compute * 0.01 * (size + start),
                backward_s=compute * 0.02 * (size + start),
                backward_input_s=compute * 0.01 * (size + start) if is_split else None,
                backward_weight_s=compute * 0.01 * (size + start) if is_split else None,
                input_bytes=int(output * sent * 1e6) * size,
                output_bytes=int(output * sent * 1e6) * size,
                activation_bytes=int(compute * kept * 1e6) * size,
            )
            for size in sizes
        )
        made.append(Block(name=f"block{index}", weight_bytes=int(own_weights * weights * 1e6), measurements=measured))
    inner, outer = draw.choice([(4, 4), (4, 3), (2, 4), (3, 3), (4, 2)])
    held_bytes = sum(6 * block.weight_bytes + 2 * block.measurements[0].activation_bytes for block in made)
    device = Device(name="device", memory_bytes=int(draw.choice([0.15, 0.25, 0.4, 0.7, 1.5]) * held_bytes))
    slow, fast, latency_s = (draw.choice(each) for each in ([1.25e8, 4e8, 1.25e9], [1.25e9, 5e9, 2e10], [0.0, 2e-5]))
    own = draw.choice([None, slow / inner])
    levels = (
        Level(size=inner, bandwidth_bytes_per_s=fast, latency_s=latency_s),
        Level(size=outer, bandwidth_bytes_per_s=slow, latency_s=latency_s, device_bandwidth_bytes_per_s=own),
    )
    model = Model(name="mid-size")
    return PlanningProblem(
        profile=Profile(model=model, device=device, dtype="float32", blocks=tuple(made)),
        cluster=Cluster(device=device, levels=levels),
        batch_size=draw.choice([24, 48, 96]),
    )


def pipeline_problem(seed: int, *, blocks: int | None = None, devices: int | None = None) -> PlanningProblem:
    """6 to 40 blocks on 4 to 16 devices and one or two levels, with slow links or long ways; straight if even."""
    draw = random.Random(seed)
    devices = devices or draw.choice([4, 6, 8, 12, 16])
    blocks = blocks or draw.randint(max(6, devices), 40)
    sigma, weights, sent = draw.choice([0.2, 0.4, 0.8]), draw.choice([1e6, 1e7, 1e8]), draw.choice([1e5, 1e6, 1e7])
    outputs = [int(sent * draw.lognormvariate(0, sigma)) for _ in range(blocks + 1)]
    made = []
    for index, (before, after) in enumerate(pairwise(outputs)):
        compute, own_weights = (draw.lognormvariate(0, sigma) for _ in range(2))
        measured = Measurement(
            microbatch_size=4,
            forward_s=0.01 * compute,
            backward_s=0.02 * compute,
            input_bytes=before,
            output_bytes=after,
            activation_bytes=int(2 * sent * compute),
        )
        made.append(Block(name=f"block{index}", weight_bytes=int(weights * own_weights), measurements=(measured,)))
    latency_s, device = draw.choice([0, 1e-5, 1e-3, 1e-2]), Device(name="device", memory_bytes=PLENTY)
    levels: tuple[Level, ...] = (
        Level(size=devices, bandwidth_bytes_per_s=draw.choice([2e8, 1e9, 1e10]), latency_s=latency_s),
    )
    if draw.random() < 0.5:
        inner = draw.choice([size for size in (2, 3, 4, 8) if devices % size == 0 and size < devices])
        slow = draw.choice([1e8, 4e8, 1.25e9])
        levels = (
            Level(size=inner, bandwidth_bytes_per_s=draw.choice([1e9, 1e10]), latency_s=latency_s / 10),
            Level(size=devices // inner, bandwidth_bytes_per_s=slow, latency_s=latency_s),
        )
    return PlanningProblem(
        profile=Profile(model=Model(name="pipeline"), device=device, dtype="float32", blocks=tuple(made)),
        cluster=Cluster(device=device, levels=levels),
        batch_size=4,
        options=Options(straight=seed % 2 == 0),
    )


def on_three_levels(problem: PlanningProblem, seed: int) -> PlanningProblem:
    """The same problem on 8 to 16 devices in servers in racks, each network slower than the one inside it."""
    draw = random.Random(seed + 7)
    sizes = draw.choice([(2, 2, 4), (2, 4, 2), (4, 2, 2), (2, 2, 2), (2, 3, 2), (3, 2, 2), (2, 2, 3)])
    speeds = [draw.choice(each) for each in ([5e9, 2e10, 1e11], [1e9, 4e9], [1.25e8, 4e8, 1.25e9])]
    latency_s = draw.choice([0.0, 2e-5, 1e-3, 2e-2])
    own = draw.choice([None, speeds[2] / sizes[0]])
    levels = [
        Level(size=size, bandwidth_bytes_per_s=speed, latency_s=latency_s / slower)
        for size, speed, slower in zip(sizes, speeds, (10, 2, 1), strict=True)
    ]
    levels[2] = replace(levels[2], device_bandwidth_bytes_per_s=own)
    return replace(problem, cluster=replace(problem.cluster, levels=tuple(levels)))


def with_ties(problem: PlanningProblem, seed: int) -> PlanningProblem:
    """The same problem, whose last block uses 30 or 90 % of the weights of the first block."""
    profile, share = problem.profile, random.Random(seed + 13).choice([0.3, 0.9])
    shared_bytes = max(1, int(profile.blocks[0].weight_bytes * share))
    tied = TiedWeights(block=0, also=(len(profile.blocks) - 1,), weight_bytes=shared_bytes)
    return replace(problem, profile=replace(profile, tied=(tied,)))


def _profile(draw: random.Random, kind: str) -> Profile:
    blocks = {"many": draw.randint(1, 4), "deep": draw.randint(10, 24)}.get(kind, draw.randint(1, 10))
    sigma = {"uneven": 1.5, "equal": 0.0}.get(kind, 0.35)
    sizes = draw.choice([(1,), (1, 2), (1, 2, 4), (1, 4, 16)])
    is_split = kind == "split" or draw.random() < 0.25
    boundary = draw.choice([1e8, 1e9] if kind == "huge" else [1e4, 1e6, 1e7])
    weights, kept, start = draw.choice([1e5, 1e7, 1e8, 1e9]), draw.choice([1e6, 1e7, 1e8]), draw.choice([0, 0, 1.5])
    outputs = [int(boundary * draw.lognormvariate(0, sigma)) for _ in range(blocks + 1)]
    made = []
    for index, (before, after) in enumerate(pairwise(outputs)):
        forward_s, activations = 0.01 * draw.lognormvariate(0, sigma), kept * draw.lognormvariate(0, sigma)
        measured = tuple(
            Measurement(
                microbatch_size=size,
                forward_s=forward_s * (size + start),
                backward_s=2 * forward_s * (size + start),
                backward_input_s=forward_s * (size + start) if is_split else None,
                backward_weight_s=forward_s * (size + start) if is_split else None,
                input_bytes=before * size,
                output_bytes=after * size,
                activation_bytes=int(activations * size),
            )
            for size in sizes
        )
        held_bytes = int(weights * draw.lognormvariate(0, sigma))
        made.append(Block(name=f"block{index}", weight_bytes=held_bytes, measurements=measured))
    return Profile(
        model=Model(name=kind),
        device=Device(name="device", memory_bytes=PLENTY),
        dtype=draw.choice(("float32", "float16")),
        blocks=tuple(made),
        edges=_edges(draw, blocks) if kind == "branch" and blocks >= 4 else None,
    )


def _edges(draw: random.Random, blocks: int) -> tuple[tuple[int, int], ...]:
    """A chain with connections that skip blocks; sometimes with a block beside it."""
    edges = {(block, block + 1) for block in range(blocks - 1)}
    edges |= {(min(pair), max(pair)) for pair in (draw.sample(range(blocks), 2) for _ in range(draw.randint(1, 3)))}
    if draw.random() < 0.5:
        beside = draw.randint(1, blocks - 2)
        edges = edges - {(beside, beside + 1)} | {(beside - 1, beside + 1), (beside, blocks - 1)}
    return tuple(sorted(edges))


def _memory_bytes(draw: random.Random, profile: Profile) -> int:
    """About what the model needs on one device, or a part of it."""
    weights = sum(block.weight_bytes for block in profile.blocks)
    kept = sum(block.at(1).activation_bytes for block in profile.blocks)
    return int((3 * weights + 2 * kept) * draw.choice([0.1, 0.2, 0.3, 0.5, 0.8, 1.1, 1.5])) + 1


def _levels(draw: random.Random, kind: str) -> tuple[Level, ...]:
    latency_s = draw.choice([1e-3, 1e-2, 1e-1]) if kind == "latency" else draw.choice([0, 1e-5])
    if kind == "one":
        return (Level(size=1, bandwidth_bytes_per_s=1e9, latency_s=latency_s),)
    inside, servers = draw.choice([4, 8] if kind == "many" else [1, 2, 3, 4, 8]), draw.choice([1, 2, 3, 4])
    server = Level(size=inside, bandwidth_bytes_per_s=draw.choice([1e9, 1e10, 1e11]), latency_s=latency_s / 10)
    around = Level(size=servers, bandwidth_bytes_per_s=draw.choice([1e8, 1e9, 1e10]), latency_s=latency_s)
    return (server, around) if inside * servers <= 12 else (server,)
