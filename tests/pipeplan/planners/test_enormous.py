"""Sizes beyond what a float counts byte by byte, and batches beyond what anybody trains with: every planner ends."""

import pytest

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.documents.profile import Block, Device, Model, Profile
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import MAX_BATCH_SIZE, Options, PlanningProblem
from pipeplan.planners.solve import solve
from tests.pipeplan.model_forms import transformer

DEVICE = Device(name="any", memory_bytes=10**11)
CLUSTER = Cluster(device=DEVICE, levels=(Level(size=2, bandwidth_bytes_per_s=1e10, latency_s=1e-6),))


def _profile(weight_bytes: int, activation_bytes: int) -> Profile:
    measured = Measurement(
        microbatch_size=1,
        forward_s=0.01,
        backward_s=0.02,
        input_bytes=100,
        output_bytes=100,
        activation_bytes=activation_bytes,
    )
    blocks = tuple(
        Block(name=f"block {number}", weight_bytes=weight_bytes, measurements=(measured,)) for number in range(4)
    )
    return Profile(model=Model(name="any"), device=DEVICE, dtype="float32", blocks=blocks)


@pytest.mark.parametrize("planner", ["pipedream", "pipedream-2bw", "gpipe", "auto"])
@pytest.mark.parametrize(
    ("weight_bytes", "activation_bytes"), [(2**53 + 1, 1000), (10**18 + 7, 1000), (1000, 2**62), (10**23, 10**23)]
)
def test_what_is_far_too_large_is_found_to_be(planner: str, weight_bytes: int, activation_bytes: int) -> None:
    profile = _profile(weight_bytes, activation_bytes)
    problem = PlanningProblem(profile=profile, cluster=CLUSTER, batch_size=8, options=Options())
    answer = solve(planner, problem)
    assert isinstance(answer, Infeasible)


@pytest.mark.parametrize("batch_size", [MAX_BATCH_SIZE - 2**20 + 1, MAX_BATCH_SIZE])
@pytest.mark.parametrize(
    ("planner", "options"),
    [
        ("auto", Options()),
        ("auto", Options(chunks=2)),
        ("pipedream", Options(microbatch_size=1)),
        ("pipedream-2bw", Options()),
        ("exact", Options()),
        ("exact", Options(schedule="1f1b-interleaved")),
        ("auto", Options(engine="megatron")),
        ("auto", Options(engine="deepspeed")),
        ("auto", Options(engine="fsdp")),
    ],
)
def test_the_largest_batch_is_answered(planner: str, options: Options, batch_size: int) -> None:
    """Two billion microbatches were listed one by one: minutes, and gigabytes."""
    profile = transformer(layers=6, hidden=256, heads=4, sequence=128, vocabulary=1024, tensors=(1, 2))
    levels = (Level(size=4, bandwidth_bytes_per_s=2e11, latency_s=2e-6),)
    cluster = Cluster(device=profile.device, levels=levels)
    problem = PlanningProblem(profile=profile, cluster=cluster, batch_size=batch_size, options=options)
    assert isinstance(solve(planner, problem), Plan)


def test_a_larger_batch_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"batch_size: must be at most 2147483647 samples, got 10000000000"):
        PlanningProblem(profile=_profile(1, 1), cluster=CLUSTER, batch_size=10_000_000_000)
