"""A peer: the same documents out of the same database, as FastAPI and SQLAlchemy's ORM are used by their tutorials.

No authentication, no caches, no ids of requests, no metrics: `uvicorn benchmarks.service_peer:app`.
"""

import json
import os
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict
from sqlalchemy import Text, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, defer, mapped_column

from pipeplan.documents.cluster import Cluster

engine = create_engine(f"sqlite:///{os.environ.get('PEER_DATABASE', 'peer.sqlite3')}")
app = FastAPI()


class Base(DeclarativeBase):
    """The tables."""


class PlanRow(Base):
    """A plan."""

    __tablename__ = "plans"

    sequence: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(unique=True)
    content: Mapped[str] = mapped_column(Text)
    planner: Mapped[str]
    throughput_samples_per_s: Mapped[float]
    model_name: Mapped[str]
    profile_id: Mapped[str]
    cluster_id: Mapped[str]
    schedule: Mapped[str]
    depth: Mapped[int]
    width: Mapped[int | None]
    workers: Mapped[int]
    batch_size: Mapped[int]
    microbatch_size: Mapped[int]
    microbatches: Mapped[int]
    bubble_fraction: Mapped[float]
    closed_form_samples_per_s: Mapped[float]
    closed_form_bubble_fraction: Mapped[float]
    solve_time_s: Mapped[float]
    created_at: Mapped[datetime]
    estimated: Mapped[bool]
    memory_bytes: Mapped[int]
    device_name: Mapped[str]
    devices: Mapped[int]
    asked_by: Mapped[str | None]
    planner_version: Mapped[str]


class SummaryOut(BaseModel):
    """A plan as lists show it."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    planner: str
    model_name: str
    profile_id: str
    cluster_id: str
    schedule: str
    depth: int
    width: int | None
    workers: int
    batch_size: int
    microbatch_size: int
    microbatches: int
    throughput_samples_per_s: float
    bubble_fraction: float
    closed_form_samples_per_s: float
    closed_form_bubble_fraction: float
    solve_time_s: float
    created_at: datetime
    estimated: bool
    memory_bytes: int
    device_name: str
    devices: int
    asked_by: str | None
    planner_version: str


class PlanOut(BaseModel):
    """A plan as it is sent."""

    id: str
    content: dict[str, Any]


def session() -> Iterator[Session]:
    """One for each request."""
    with Session(engine) as opened:
        yield opened


Opened = Annotated[Session, Depends(session)]


@app.get("/v1/plans/{plan_id}")
def get_plan(plan_id: str, opened: Opened) -> PlanOut:
    """A plan."""
    row = opened.scalars(select(PlanRow).where(PlanRow.id == plan_id)).one_or_none()
    if row is None:
        raise HTTPException(404)
    return PlanOut(id=row.id, content=json.loads(row.content))


@app.get("/v1/plans")
def list_plans(opened: Opened, planner: str, limit: int = 50) -> list[PlanOut]:
    """The fastest of a planner."""
    query = select(PlanRow).where(PlanRow.planner == planner).order_by(PlanRow.throughput_samples_per_s.desc())
    rows = opened.scalars(query.limit(limit))
    return [PlanOut(id=row.id, content=json.loads(row.content)) for row in rows]


@app.get("/v1/summaries")
def list_summaries(opened: Opened, planner: str, limit: int = 50) -> list[SummaryOut]:
    """The newest of a planner, without their documents."""
    query = select(PlanRow).options(defer(PlanRow.content)).where(PlanRow.planner == planner)
    rows = opened.scalars(query.order_by(PlanRow.created_at.desc()).limit(limit))
    return [SummaryOut.model_validate(row) for row in rows]


@app.get("/healthz")
def healthz() -> str:
    """The process answers."""
    return "ok"


@app.post("/v1/clusters")
def create_cluster(cluster: Cluster) -> int:
    """Reads a cluster as FastAPI reads bodies, and says how many devices it has."""
    return cluster.devices
