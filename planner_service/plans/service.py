"""Plans: made on request, stored by content, played again as instruction streams."""

import gzip
import time
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse, parse_plan
from pipeplan.documents.identity import canonical_json, content_id
from pipeplan.documents.named_clusters import is_named, named_cluster
from pipeplan.documents.plan import Answer, Plan
from pipeplan.errors import InvalidInputError, require
from pipeplan.programs.text import format_stream
from pipeplan.programs.timeline import Timeline
from pipeplan.programs.timeline_columns import timeline_columns
from pipeplan.protocol.listing import Page
from pipeplan.protocol.plans import PlanQuery, PlanQuestion, PlanRequest, PlanSummary, Streams, StreamText, is_plan_id
from pipeplan.simulation.predict import predict, program_of
from pipeplan.simulation.trace import chrome_trace
from planner_service.documents.store import clusters, packed_cluster, profiles
from planner_service.plans import store as storage
from planner_service.plans.questions import Answered, Posed
from planner_service.platform import trail
from planner_service.platform.context import Context, found
from planner_service.platform.listing import Cut
from planner_service.platform.stored import Noun, may_change

T = TypeVar("T")

NOUN: Noun = "plans"
"""The name of plans in the cache of documents."""

MAX_PLAYED_INSTRUCTIONS = 500_000
"""The upper bound on instructions that are played for one request: a few seconds of one core."""

MAX_COUNT = 2**63 - 1
"""The largest integer of the database's columns."""

MAX_TIME_LIMIT_S = 60.0
"""How long a solver may search for one request."""

INSTRUCTIONS_A_MICROBATCH = 7
"""A worker's upper bound for one microbatch: forward, recomputation, backward, and two tensors in and out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """A planner's answer; the id is that of the stored plan, None where no plan fits."""

    answer: Answer
    plan_id: str | None
    new: bool
    solve_time_s: float


def create(context: Context, request: PlanRequest) -> Created:
    """Solves the request in this thread and stores the plan. That no plan fits is an answer too, but is not stored."""
    problem = posed(context, request).problem()
    start_s = time.perf_counter()
    answer = context.solve(request.planner, problem)
    answered = Answered(answer=answer, solve_time_s=time.perf_counter() - start_s)
    with context.database.write() as connection:
        return keep(context, connection, request, answered)


def posed(context: Context, request: PlanRequest, *, longest_s: float = MAX_TIME_LIMIT_S) -> Posed:
    """The request's question, with documents unread. Raises InvalidInputError for documents that are not stored, or a
    search that may take too long.
    """
    require_short(request, longest_s)
    with context.database.read() as connection:
        profile = _profile(connection, "profile_id", request.profile_id)
        others = tuple(_profile(connection, "other_profile_ids", other) for other in request.other_profile_ids)
    cluster = cluster_text(context, request.cluster_id)
    return Posed(request=request, profile=profile, cluster=cluster, other_profiles=others)


def require_short(request: PlanQuestion, longest_s: float) -> None:
    """Raises InvalidInputError for a search that may exceed the time limit here."""
    limit_s = request.options.time_limit_s
    rule = f"must be at most {longest_s:g} s here (with `Prefer: respond-async` more)"
    require(limit_s is None or limit_s <= longest_s, "options.time_limit_s", rule, limit_s)


def cluster_text(context: Context, cluster_id: str) -> str:
    """The document of a stored or a named cluster. Raises InvalidInputError if it is neither."""
    with context.database.read() as connection:
        stored = clusters.content(connection, cluster_id)
    return stored or canonical_json(_named(cluster_id))


def keep(
    context: Context, connection: Connection, request: PlanRequest, answered: Answered, *, asked_by: str | None = None
) -> Created:
    """Stores a planner's answer, the caller, and the cluster if the request names one, such as `dgx-h100:4`.

    Raises InvalidInputError for predictions that are not finite.
    """
    answer = answered.answer
    # A profile's extreme quantities can make predictions that are no finite numbers.
    counts = (answer.batch_size, answer.microbatches) if isinstance(answer, Plan) else ()
    try:
        canonical_json(answer)
        storable = all(count <= MAX_COUNT for count in counts)
    except ValueError:
        storable = False
    rule = "must be a profile whose quantities give finite predictions"
    require(storable, "profile_id", rule, request.profile_id)

    context.metrics.observe_solve(request.planner, answered.solve_time_s)
    if not isinstance(answer, Plan):
        return Created(answer=answer, plan_id=None, new=False, solve_time_s=answered.solve_time_s)
    if is_named(request.cluster_id):
        cluster = packed_cluster(_named(request.cluster_id))
        clusters.add(connection, cluster, context.now())
        request = request.model_copy(update={"cluster_id": cluster.id})
    plan_id = content_id(answer)
    new = storage.add(connection, answer, request, answered.solve_time_s, context.now(), asked_by)
    trail.record(connection, "plan.store", plan_id, context.now())
    if not new and answer.simulated is None:  # its play may have been added in the meantime
        content = _found(plan_id, storage.content(connection, plan_id))
        if not may_change(NOUN, content.encode()):
            answer = context.parsing.read_stored(parse_plan, content, len(content))
    return Created(answer=answer, plan_id=plan_id, new=new, solve_time_s=answered.solve_time_s)


def document(context: Context, plan_id: str) -> str:
    """The plan's JSON text. Raises NotFoundError."""
    with context.database.read() as connection:
        return _found(plan_id, storage.content(connection, plan_id))


def get(context: Context, plan_id: str) -> Plan:
    """The plan. Raises NotFoundError."""
    content = document(context, plan_id)
    return context.parsing.read_stored(parse_plan, content, len(content))


def request(context: Context, plan_id: str) -> PlanRequest:
    """The request with which the plan was first stored. Raises NotFoundError."""
    with context.database.read() as connection:
        return _found(plan_id, storage.request(connection, plan_id))


def summary(context: Context, plan_id: str) -> PlanSummary:
    """The plan as lists show it. Raises NotFoundError."""
    with context.database.read() as connection:
        return _found(plan_id, storage.summary(connection, plan_id))


def page(context: Context, query: PlanQuery) -> Page[PlanSummary]:
    """The plans that the query asks for, as lists show them."""
    with context.database.read() as connection:
        return storage.page(connection, query)


def page_of_summaries(context: Context, query: PlanQuery) -> tuple[list[bytes], str | None]:
    """The same as JSON texts, and the cursor of the next page. They are cached: only a play changes a summary."""
    with context.database.read() as connection:
        keys = storage.page_of_keys(connection, query)
        known = context.documents.known("summaries", keys.items)
        missing = {key.partition(" ")[0]: key for key in keys.items if key not in known}
        read = storage.summaries(connection, list(missing)) if missing else []
    for summary in read:
        known[missing[summary.id]] = content = summary.model_dump_json().encode()
        context.documents.put("summaries", missing[summary.id], content)
    return [known[key] for key in keys.items], keys.next_cursor


def page_of_documents(context: Context, query: PlanQuery) -> tuple[list[bytes], str | None]:
    """The plans that the query asks for, whole, as JSON texts, and the cursor of the next page."""
    with context.database.read() as connection:
        found_ids = storage.page_of_ids(connection, query)
        known = context.documents.known("plans", found_ids.items)
        missing = [plan_id for plan_id in found_ids.items if plan_id not in known]
        read = storage.contents(connection, missing) if missing else {}
    for plan_id, content in read.items():
        known[plan_id] = content.encode()
        context.documents.put("plans", plan_id, known[plan_id])
    return [known[plan_id] for plan_id in found_ids.items if plan_id in known], found_ids.next_cursor


def newest(context: Context, cut: Cut) -> Page[PlanSummary]:
    """A page of plans, newest first."""
    return page(context, PlanQuery(limit=cut.limit, cursor=cut.cursor))


def streams(context: Context, plan_id: str, batches: int) -> Streams:
    """Every worker's instructions in the plan's first batches."""
    plan = get(context, plan_id)
    require_playable(plan, batches)
    program = program_of(plan, batches=batches)
    return Streams(
        plan_id=plan_id,
        schedule=plan.schedule,
        batches=batches,
        streams=tuple(
            StreamText(rank=s.rank, stage=s.stage, replica=s.replica, text=format_stream(s.instructions))
            for s in program.streams
        ),
    )


def timeline(context: Context, plan_id: str, batches: int) -> Timeline:
    """The predicted timeline of the plan's first batches."""
    plan = get(context, plan_id)
    require_playable(plan, batches)
    return predict(plan, batches=batches)


def timeline_packed(context: Context, plan_id: str, batches: int) -> bytes:
    """The predicted timeline's columns as JSON, compressed by gzip; played once, then cached. Raises NotFoundError."""
    identity = f"{plan_id}.{batches}"
    ready = context.documents.get("timelines", identity)
    if ready is None:
        columns = timeline_columns(timeline(context, plan_id, batches))
        ready = gzip.compress(canonical_json(columns).encode(), mtime=0)
        context.documents.put("timelines", identity, ready)
    return ready


def trace(context: Context, plan_id: str, batches: int) -> str:
    return chrome_trace({"predicted": timeline(context, plan_id, batches)})


def capacities(context: Context, plan: Plan) -> tuple[int, ...]:
    """The bytes that tensors may take on the devices of every stage."""
    cluster = parse(Cluster, cluster_text(context, plan.cluster_id))
    usable = {device.name: device.usable_bytes for device in cluster.types}
    return tuple(usable.get(stage.device or cluster.device.name, cluster.device.usable_bytes) for stage in plan.stages)


def playable_batches(plan: Plan) -> int:
    """How many batches of the plan may be played for one request; 0 if a single one is too many."""
    # Every microbatch passes every stage once; replicas share them, and the widest stage sets how many there are.
    microbatches = plan.microbatches * len(plan.placement)
    return MAX_PLAYED_INSTRUCTIONS // (INSTRUCTIONS_A_MICROBATCH * microbatches)


def require_playable(plan: Plan, batches: int) -> None:
    """Raises InvalidInputError if a play of `batches` batches would take too long."""
    most = playable_batches(plan)
    rule = f"must be at most {most} for this plan of {plan.workers} workers" if most else "cannot be played: too large"
    require(batches <= most, "batches", rule, batches)


def _named(cluster_id: str) -> Cluster:
    return named_cluster(cluster_id, field="cluster_id", or_else="the id of a stored cluster")


def _profile(connection: Connection, field: str, profile_id: str) -> str:
    content = profiles.content(connection, profile_id)
    if content is None:
        raise InvalidInputError(field, "must be the id of a stored profile", profile_id)
    return content


def _found(name: str, content: T | None) -> T:
    """The plan's content. Raises NotFoundError, whose message covers ids and aliases."""
    return found("plan", name if is_plan_id(name) else f"{name}, nor an alias of that name", content)
