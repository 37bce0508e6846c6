"""Plans, by their content. A plan never changes; how it was asked for, and when, stands beside it."""

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, insert, select

from planner_service.contract.documents import plan_document
from planner_service.contract.listing import Page
from planner_service.contract.plans import PlanRequest, PlanSummary
from planner_service.core.identity import canonical_json, content_id
from planner_service.core.plan import Plan
from planner_service.storage.listing import Cut, insert_once, newest
from planner_service.storage.tables import plans

_SUMMARY = [column for column in plans.c if column.name not in ("content", "request")]


def add(connection: Connection, plan: Plan, request: PlanRequest, solve_time_s: float, now: datetime) -> bool:
    """Stores the plan unless it is there, in which case the first request is kept; says whether it is new."""
    plan_id = content_id(plan)
    if summary(connection, plan_id) is not None:
        return False
    row = insert(plans).values(
        id=plan_id,
        content=canonical_json(plan_document(plan)),
        request=request.model_dump_json(),
        solve_time_s=solve_time_s,
        planner=plan.planner,
        model_name=plan.model.name,
        profile_id=request.profile_id,
        cluster_id=request.cluster_id,
        schedule=plan.schedule,
        depth=plan.depth,
        width=plan.width,
        workers=plan.workers,
        batch_size=plan.batch_size,
        microbatch_size=plan.microbatch_size,
        microbatches=plan.microbatches,
        throughput_samples_per_s=plan.throughput_samples_per_s,
        bubble_fraction=plan.bubble_fraction,
        created_at=now,
        estimated=plan.estimated,
    )
    return insert_once(connection, row)


def content(connection: Connection, plan_id: str) -> str | None:
    """The plan's document."""
    return connection.execute(select(plans.c.content).where(plans.c.id == plan_id)).scalar_one_or_none()


def summary(connection: Connection, plan_id: str) -> PlanSummary | None:
    """The plan as lists show it."""
    row = connection.execute(select(*_SUMMARY).where(plans.c.id == plan_id)).one_or_none()
    return None if row is None else _summary(row)


def page(connection: Connection, cut: Cut) -> Page[PlanSummary]:
    """The newest plans."""
    return newest(connection, select(*_SUMMARY), plans, cut, _summary)


def _summary(row: Row[Any]) -> PlanSummary:
    values = {name: getattr(row, name) for name in PlanSummary.model_fields if name != "model"}
    return PlanSummary(model=row.model_name, **values)
