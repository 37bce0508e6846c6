"""The request examples of the API's description. They work as they stand, in this order."""

from dataclasses import asdict
from typing import Any

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Block, Device, Measurement, Model, Profile
from pipeplan.planners.problem import Options, PlanningProblem
from planner_service.contract.jobs import Progress
from planner_service.contract.plans import PlanRequest
from planner_service.services.context import Solve

MIB = 2**20
DEVICE = Device(name="A100-40GB", memory_bytes=40 * 2**30)
MODEL = "hf:gpt2?n_layer=4&n_embd=256"
DATA = "worker_agent.models.text:random_tokens?vocab_size=50257"
TOKEN = "the token of the lease"


def _block(name: str, *, forward_s: float, weight_bytes: int) -> Block:
    measurements = tuple(
        Measurement(
            microbatch_size=size,
            forward_s=forward_s * size,
            backward_s=2 * forward_s * size,
            input_bytes=size * MIB,
            output_bytes=size * MIB,
            activation_bytes=4 * size * MIB,
        )
        for size in (1, 2)
    )
    return Block(name=name, weight_bytes=weight_bytes, measurements=measurements)


PROFILE = Profile(
    model=Model(name="gpt2-small-4", spec=MODEL),
    device=DEVICE,
    dtype="float32",
    blocks=tuple(_block(f"block{i}", forward_s=0.004, weight_bytes=12 * MIB) for i in range(4)),
)
CLUSTER = Cluster(device=DEVICE, levels=(Level(size=2, bandwidth_bytes_per_s=3e11, latency_s=5e-6),))
PLAN_REQUEST = PlanRequest(
    profile_id=content_id(PROFILE),
    cluster_id=content_id(CLUSTER),
    planner="pipedream-2bw",
    batch_size=16,
    options=Options(),
)
INSTANCE = "5f1c2a9e"
REGISTRATION = {
    "name": "node-1",
    "instance": INSTANCE,
    "host": "gpu-a",
    "address": "10.0.0.1",
    "port": 29500,
    "devices": 8,
    "device_name": DEVICE.name,
    "memory_bytes": DEVICE.memory_bytes,
    "torch_version": "2.9.0",
    "driver": "570.86",
    "version": "0.1.0",
    "allow": ["hf:*", "worker_agent.models.text:random_tokens"],
}
PROFILE_TASK = {"kind": "profile", "model": MODEL, "microbatch_sizes": [1, 2], "devices": 2}


def request_examples(solve: Solve) -> dict[str, dict[str, Any]]:
    """By path: the examples by name. The run's plan is what the planner answers to the plan's example."""
    run_task = {"kind": "run", "plan_id": _plan_id(solve), "model": MODEL, "data": DATA, "steps": 20}
    result = {"kind": "profile", "profile": asdict(PROFILE), "cluster": asdict(CLUSTER)}
    progress = Progress(done=3, total=10, message="block 3 of 10").model_dump()
    return {
        "/v1/profiles": {"profile": asdict(PROFILE)},
        "/v1/clusters": {"cluster": asdict(CLUSTER)},
        "/v1/plans": {"plan": PLAN_REQUEST.model_dump(mode="json")},
        "/v1/jobs": {"profile": PROFILE_TASK, "links": {"kind": "links", "devices": 8, "nodes": 2}, "run": run_task},
        "/v1/aliases/{name}": {"alias": {"plan_id": run_task["plan_id"]}},
        "/v1/jobs/lease": {"lease": {"agent": "node-1", "kinds": ["profile", "run"]}},
        "/v1/agents": {"agent": REGISTRATION},
        "/v1/agents/{agent_id}/heartbeat": {"heartbeat": {"instance": INSTANCE, "draining": False}},
        "/v1/jobs/{job_id}/release": {"release": {"token": TOKEN}},
        "/v1/jobs/{job_id}/heartbeat": {"heartbeat": {"token": TOKEN, "progress": progress}},
        "/v1/jobs/{job_id}/complete": {"complete": {"token": TOKEN, "result": result}},
        "/v1/tokens": {"token": {"name": "ci", "scopes": ["plan"], "expires_in_s": 7_776_000}},
        "/v1/jobs/{job_id}/fail": {"fail": {"token": TOKEN, "error": "rank 1 ran out of memory at F3"}},
    }


def _plan_id(solve: Solve) -> str:
    options = PLAN_REQUEST.options
    problem = PlanningProblem(profile=PROFILE, cluster=CLUSTER, batch_size=PLAN_REQUEST.batch_size, options=options)
    answer = solve(PLAN_REQUEST.planner, problem)
    return content_id(answer) if isinstance(answer, Plan) else "0" * 32
