"""Sizes beyond what a float counts byte by byte: every planner ends, and says that nothing fits."""

import pytest

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import Infeasible
from pipeplan.documents.profile import Block, Device, Model, Profile
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve

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
