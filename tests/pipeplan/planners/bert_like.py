"""A chain in the proportions of BERT-32: 32 equal blocks between a heavy embedding and a heavy head."""

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.profile import Block, Device, Model, Profile
from pipeplan.planners.problem import Options, PlanningProblem

HIDDEN, SEQUENCE, VOCABULARY, HEADS = 2560, 512, 30_522, 32
FLOPS = 60e12
SIZES = (1, 2, 4, 8)


def bert_like(
    *, devices: int, memory_bytes: int, options: Options | None = None, batch_size: int = 1024
) -> PlanningProblem:
    """fp16 blocks, servers of 8: NVLink inside, 100 Gb/s between."""
    levels = (
        Level(size=8, bandwidth_bytes_per_s=150e9),
        Level(size=devices // 8, bandwidth_bytes_per_s=12.5e9),
    )
    device = Device(name="V100", memory_bytes=memory_bytes)
    return PlanningProblem(
        profile=_profile(),
        cluster=Cluster(device=device, levels=levels),
        batch_size=batch_size,
        options=options or Options(optimizer="adam"),
    )


def _profile() -> Profile:
    layer = 12 * HIDDEN**2
    table = VOCABULARY * HIDDEN
    moved = 2 * SEQUENCE * HIDDEN
    kept = SEQUENCE * HIDDEN * (34 + 5 * HEADS * SEQUENCE // HIDDEN)
    blocks = [
        _block("embedding", weights=table, flops=2 * SEQUENCE * HIDDEN * 10, kept=2 * moved, input_bytes=8 * SEQUENCE),
        *(
            _block(f"layer {i}", weights=layer, flops=2 * SEQUENCE * layer, kept=kept, input_bytes=moved)
            for i in range(32)
        ),
        _block("head", weights=table, flops=2 * SEQUENCE * table, kept=6 * SEQUENCE * VOCABULARY, input_bytes=moved),
    ]
    device = Device(name="V100", memory_bytes=16 * 10**9)
    return Profile(model=Model(name="BERT-32"), device=device, dtype="float16", blocks=tuple(blocks))


def _block(name: str, *, weights: int, flops: float, kept: int, input_bytes: int) -> Block:
    return Block(
        name=name,
        weight_bytes=2 * weights,
        measurements=tuple(
            Measurement(
                microbatch_size=size,
                forward_s=flops * (size + 0.3) / FLOPS,
                backward_s=2 * flops * (size + 0.3) / FLOPS,
                input_bytes=input_bytes * size,
                output_bytes=2 * SEQUENCE * HIDDEN * size,
                activation_bytes=kept * size,
            )
            for size in SIZES
        ),
    )
