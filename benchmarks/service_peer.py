"""A peer: the same documents out of the same database, as FastAPI and SQLAlchemy's ORM are used by their tutorials.

No authentication, no caches, no ids of requests, no metrics: `uvicorn benchmarks.service_peer:app`.
"""

import json
import os
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy import Text, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

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


@app.get("/healthz")
def healthz() -> str:
    """The process answers."""
    return "ok"


@app.post("/v1/clusters")
def create_cluster(cluster: Cluster) -> int:
    """Reads a cluster as FastAPI reads bodies, and says how many devices it has."""
    return cluster.devices
