"""Plan jobs: plans that are asked for as jobs, each transaction of them. `plan_runner` does them, in any process."""

from dataclasses import asdict

from sqlalchemy import Connection

from pipeplan.documents.identity import canonical_json
from pipeplan.documents.plan import Infeasible, Plan
from planner_service.contract.jobs import Heartbeat, Job, Lease, LeaseRequest, PlanTask, Progress
from planner_service.contract.plans import PlanRequest
from planner_service.contract.posed import Posed
from planner_service.services import jobs, plans
from planner_service.services.context import Context
from planner_service.solvers.messages import Answered
from planner_service.storage import jobs as storage


def enqueue(context: Context, request: PlanRequest, *, longest_s: float, asked_by: str | None = None) -> Job:
    """Enqueues a plan. Raises InvalidInputError for what no planner could be asked."""
    posed = plans.posed(context, request, longest_s=longest_s)
    context.parsing.read_stored(Posed.check, posed, posed.size)
    return jobs.enqueue(context, PlanTask(request=request), asked_by=asked_by)


def take(context: Context, service: str) -> Lease | None:
    """The oldest plan that is waited for; None where there is none."""
    # Agents may not ask for this kind: the wire's model has no such value.
    return jobs.lease(context, LeaseRequest.model_construct(agent=service, kinds=("plan",), instance=None))


def posed(context: Context, lease: Lease, *, longest_s: float) -> Posed:
    """What a leased job asks."""
    return plans.posed(context, _request(lease.job), longest_s=longest_s)


def beat(context: Context, lease: Lease, progress: Progress | None) -> bool:
    """Renews the lease; whether the job is to go on. Raises LeaseLostError where it is another's by now."""
    return not jobs.heartbeat(context, lease.job.id, Heartbeat(token=lease.token, progress=progress)).cancelled


def is_held(context: Context, lease: Lease) -> bool:
    """Whether the job is still leased, and under this very lease. Writes nothing."""
    with context.database.read() as connection:
        job = storage.get(connection, lease.job.id)
    return job is not None and job.state == "leased" and job.fence == lease.job.fence


def finish(context: Context, lease: Lease, answered: Answered) -> Job:
    """Ends the job with the plan, or with the reasons why there is none; both are stored with it."""

    def end(connection: Connection, job: Job) -> None:
        created = plans.keep(context, connection, _request(job), answered, asked_by=job.asked_by)
        beside: dict[str, object] = {"solve_time_s": answered.solve_time_s}
        if isinstance(answered.answer, Infeasible):
            beside["infeasible"] = asdict(answered.answer)
        storage.succeed(
            connection,
            job.id,
            result_id=created.plan_id or job.id,
            plan_id=created.plan_id,
            answer=canonical_json(beside),
            now=context.now(),
        )

    return jobs.conclude(context, lease.job.id, lease.token, end)


def answer_of(context: Context, job: Job) -> plans.Created | None:
    """What a job that has succeeded answers; None for one that has not."""
    if job.state != "succeeded":
        return None
    answer: Plan | Infeasible | None = job.infeasible
    if job.plan_id is not None:
        answer = plans.get(context, job.plan_id)
    if answer is None:
        return None
    return plans.Created(answer=answer, plan_id=job.plan_id, new=True, solve_time_s=job.solve_time_s or 0.0)


def _request(job: Job) -> PlanRequest:
    if not isinstance(job.task, PlanTask):
        raise LookupError(f"job {job.id} is of kind {job.task.kind}")
    return job.task.request
