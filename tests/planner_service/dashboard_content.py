"""What the dashboard's tests look at: every kind of thing there is, in every state, under names that mean harm."""

from dataclasses import dataclass, replace

from pipeplan.documents.cluster import Cluster, DeviceGroup, Level
from pipeplan.documents.identity import content_id
from pipeplan.documents.profile import Block, Device, Model, Profile
from pipeplan.protocol.agents import Registration
from pipeplan.protocol.jobs import Completion, Failure, Heartbeat, LeaseRequest, Progress
from pipeplan.protocol.plans import PlanRequest
from planner_service.agents import service as agents
from planner_service.aliases import service as aliases
from planner_service.documents.service import clusters, profiles
from planner_service.jobs import service as jobs
from planner_service.overview.openapi import CLUSTER, PROFILE
from planner_service.plans import service as plans
from planner_service.platform.context import Context
from tests.planner_service.examples import PROFILE_TASK, request_document, run_result, run_task, store_plan

EVIL = "<script>alert(1)</script>"
NAMES = (
    EVIL,
    '"><img src=x onerror=alert(1)>',
    "'; DROP TABLE plans; --",
    "{{ 7 * 7 }}{% raw %}",
    "x" * 5000,
    "\u202ebadcode\u202c عربي עברית",
    "🚀" * 60,
    "&lt;b&gt; \u200b ",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The ids of what was stored."""

    plans: tuple[str, ...]
    runs: tuple[str, ...]
    jobs: tuple[str, ...]


def named_plan(context: Context, name: str, **changes: object) -> str:
    """A plan for a model of this name."""
    profile = replace(PROFILE, model=Model(name=name))
    profiles.create(context, profile)
    clusters.create(context, CLUSTER)
    request = PlanRequest.model_validate(request_document(profile_id=content_id(profile), **changes))
    return str(plans.create(context, request).plan_id)


def finished_run(context: Context, plan_id: str, *, steps: int = 4, checkpoint_s: float = 0.0) -> str:
    """A run of the plan that has succeeded."""
    job = jobs.enqueue(context, run_task(plan_id, steps=steps))
    lease = jobs.lease(context, LeaseRequest(agent="node-1"))
    if lease is None or lease.job.id != job.id:
        raise LookupError("another job is in the queue")
    result = run_result(plans.get(context, plan_id), steps=steps, checkpoint_s=checkpoint_s)
    jobs.complete(context, job.id, Completion(token=lease.token, result=result))
    return str(job.run_id)


def failed_run(context: Context, plan_id: str, error: str) -> str:
    """A run of the plan that its agent gave up; its id."""
    job = jobs.enqueue(context, run_task(plan_id))
    lease = jobs.lease(context, LeaseRequest(agent="node-1"))
    if lease is None or lease.job.id != job.id:
        raise LookupError("another job is in the queue")
    jobs.fail(context, job.id, Failure(token=lease.token, error=error))
    return str(job.run_id)


def register(context: Context, name: str) -> None:
    """An agent of this name."""
    told = Registration(
        name=" ".join("".join(one for one in name[:200] if one.isprintable()).split()),  # an own name hides nothing
        instance="instance-1",
        host=name[:500],
        address="10.0.0.1",
        port=29500,
        devices=8,
        device_name=name[:500],
        memory_bytes=80 * 2**30,
        torch_version="2.9",
        version="0.1",
        allow=(name[:500],),
    )
    agents.register(context, told)


def filled(context: Context) -> Content:
    """Stores something of everything."""
    plain = [store_plan(context, batch_size=size) for size in (16, 32, 64)]
    evil = [named_plan(context, name) for name in NAMES]
    _store_odd_documents(context)
    ended = [finished_run(context, plain[0]), *(failed_run(context, plain[0], name[:4000]) for name in NAMES[:2])]
    waiting = jobs.enqueue(context, run_task(plain[1]))
    cancelled = jobs.enqueue(context, PROFILE_TASK)
    jobs.cancel(context, cancelled.id)
    lease = jobs.lease(context, LeaseRequest(agent="node-2"))
    under_way = jobs.enqueue(context, PROFILE_TASK.model_copy(update={"model": EVIL}))
    if lease is not None:
        progress = Progress(done=3, total=10, message=f"block {EVIL}")
        jobs.heartbeat(context, lease.job.id, Heartbeat(token=lease.token, progress=progress))
    for name in ("node-1", *NAMES):
        register(context, name)
    aliases.put(context, "gpt-prod", plain[0], by="ci")
    aliases.put(context, "gpt-prod", plain[1], by=EVIL)
    aliases.put(context, "team/gpt.v2", evil[0], by="ci")
    aliases.put(context, "gone", plain[0], by="ci")
    aliases.delete(context, "gone", by="ci")
    return Content(
        plans=(*plain, *evil), runs=(*ended, str(waiting.run_id)), jobs=(waiting.id, cancelled.id, under_way.id)
    )


def _store_odd_documents(context: Context) -> None:
    """A profile of very many blocks that take no time, and a cluster of many levels and types."""
    still = replace(PROFILE.blocks[0].measurements[0], forward_s=0.0, backward_s=0.0)
    blocks = tuple(
        Block(name=NAMES[index % len(NAMES)] + str(index), weight_bytes=0, measurements=(still,))
        for index in range(700)
    )
    profiles.create(context, Profile(model=Model(name="still"), device=PROFILE.device, dtype="float32", blocks=blocks))
    groups = tuple(DeviceGroup(device=Device(name=name, memory_bytes=2**30), count=128) for name in NAMES[:4])
    levels = (Level(size=2, bandwidth_bytes_per_s=3e11), Level(size=2**8, bandwidth_bytes_per_s=1e9, latency_s=1e-3))
    clusters.create(context, Cluster(levels=levels, groups=groups))
    clusters.create(context, Cluster(device=PROFILE.device, levels=(*levels, *(levels[0],) * 3)))
