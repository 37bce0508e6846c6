"""Tables of the database.

Documents are stored as the JSON text that is sent, with columns for the keys of lists and queues.
"""

from datetime import UTC, datetime

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
)


class UtcTime(TypeDecorator[datetime]):
    """A time in UTC. SQLite keeps no time zone: it is removed before storing and added after reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """The moment as the database keeps it."""
        if value is None:
            return None
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """The moment as the program uses it."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _sequence() -> Column[int]:
    """The order of insertion, which lists and queues follow."""
    return Column("sequence", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)


def _id() -> Column[str]:
    return Column("id", String(32), nullable=False, unique=True)


def _estimated() -> Column[bool]:
    return Column("estimated", Boolean, nullable=False, server_default=false())


def _time(name: str, *, nullable: bool = False) -> Column[datetime]:
    return Column(name, UtcTime(), nullable=nullable)


def _used() -> Column[datetime]:
    """When the document was last stored or requested again; null: not since `created_at`. Exact to USE_NOTED_S."""
    return _time("used_at", nullable=True)


def _device_types() -> Column[str]:
    """The types of a cluster's devices, each with its number: [["A100",8],["V100",16]]."""
    return Column("device_types", Text, nullable=False, server_default="[]")


def _orders(*columns: str, filters: tuple[str, ...] = ()) -> list[Index]:
    """The indexes of the orders of lists; `sequence` orders equal rows. Columns of `filters` come before them."""
    starts: list[tuple[str, ...]] = [(column,) for column in filters] or [()]
    return [Index(None, *start, column, "sequence") for start in starts for column in columns]


profiles = Table(
    "profiles",
    metadata,
    _sequence(),
    _id(),
    Column("content", Text, nullable=False),
    Column("model_name", Text, nullable=False),
    Column("device_name", Text, nullable=False),
    Column("dtype", String(16), nullable=False),
    Column("blocks", Integer, nullable=False),
    _time("created_at"),
    _estimated(),
    _used(),
    *_orders("created_at", "blocks"),
    *_orders("created_at", filters=("model_name", "device_name")),
)

clusters = Table(
    "clusters",
    metadata,
    _sequence(),
    _id(),
    Column("content", Text, nullable=False),
    Column("device_name", Text, nullable=False),
    Column("devices", Integer, nullable=False),
    _time("created_at"),
    _used(),
    _device_types(),
    *_orders("created_at", "devices"),
)

plans = Table(
    "plans",
    metadata,
    _sequence(),
    _id(),
    Column("content", Text, nullable=False),
    Column("request", Text, nullable=False),
    Column("solve_time_s", Float, nullable=False),
    Column("planner", String(64), nullable=False),
    Column("model_name", Text, nullable=False),
    Column("profile_id", String(32), ForeignKey("profiles.id"), nullable=False),
    Column("cluster_id", String(32), ForeignKey("clusters.id"), nullable=False),
    Column("schedule", String(32), nullable=False),
    Column("depth", Integer, nullable=False),
    Column("width", Integer, nullable=True),
    Column("workers", Integer, nullable=False),
    Column("batch_size", BigInteger, nullable=False),
    Column("microbatch_size", BigInteger, nullable=False),
    Column("microbatches", BigInteger, nullable=False),
    # Null where the plan's streams were not played.
    Column("throughput_samples_per_s", Float, nullable=True),
    Column("bubble_fraction", Float, nullable=True),
    Column("closed_form_samples_per_s", Float, nullable=False),
    Column("closed_form_bubble_fraction", Float, nullable=False),
    _time("created_at"),
    _estimated(),
    Column("memory_bytes", BigInteger, nullable=False, server_default="0"),
    Column("device_name", Text, nullable=False, server_default="unknown"),
    Column("devices", Integer, nullable=False, server_default="0"),
    Column("asked_by", String(200), nullable=True),
    Column("planner_version", String(32), nullable=False, server_default="1.0.0"),
    # For a plan stored without a play: the limit of instructions that was tried since, and the process that plays it
    # now, until when. Null: not tried, and none.
    Column("tried_instructions", BigInteger, nullable=True),
    _time("claimed_until", nullable=True),
    _used(),
    _device_types(),
    *_orders("created_at", "throughput_samples_per_s", "memory_bytes"),
    *_orders(
        "created_at",
        "throughput_samples_per_s",
        filters=("profile_id", "cluster_id", "model_name", "planner", "schedule"),
    ),
)

jobs = Table(
    "jobs",
    metadata,
    _sequence(),
    _id(),
    Column("kind", String(16), nullable=False),
    Column("task", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("agent", String(200), nullable=True),
    Column("token", String(64), nullable=True),
    _time("lease_expires_at", nullable=True),
    Column("progress", Text, nullable=True),
    Column("error", Text, nullable=True),
    Column("profile_id", String(32), ForeignKey("profiles.id"), nullable=True),
    Column("cluster_id", String(32), ForeignKey("clusters.id"), nullable=True),
    # No foreign key: runs refer to their job, and a cycle could not be created or dropped in one step.
    Column("run_id", String(32), nullable=True),
    Column("result_id", String(32), nullable=True),
    # Not written any more (idempotency_keys are); SQLite could only copy the table without it.
    Column("idempotency_key", String(200), nullable=True, unique=True),
    # No foreign key: the job still names its result after the plan is pruned.
    Column("plan_id", String(32), nullable=True),
    Column("answer", Text, nullable=True),
    Column("fence", Integer, nullable=False, server_default="0"),
    Column("needs_id", String(32), nullable=False, server_default="any"),
    Column("needs", Text, nullable=False, server_default="{}"),
    Column("instance", String(64), nullable=True),
    Column("gang", Text, nullable=True),
    _time("not_before", nullable=True),
    Column("asked_by", String(200), nullable=True),
    _time("created_at"),
    _time("updated_at"),
    CheckConstraint("state IN ('queued', 'leased', 'succeeded', 'failed', 'cancelled', 'dead')", name="state"),
    Index(None, "state", "sequence"),
    Index(None, "state", "kind", "sequence"),
    Index(None, "state", "needs_id", "kind", "sequence"),
    Index(None, "state", "lease_expires_at"),
)
for _name in ("profile_id", "cluster_id"):  # references to a document are searched before it may be removed
    _given = jobs.c[_name].is_not(None)
    Index(None, jobs.c[_name], sqlite_where=_given, postgresql_where=_given)

runs = Table(
    "runs",
    metadata,
    _sequence(),
    _id(),
    Column("job_id", String(32), ForeignKey("jobs.id"), nullable=False, unique=True),
    Column("plan_id", String(32), ForeignKey("plans.id"), nullable=False),
    # Without its losses, which are chunks; so are the lanes of the timeline of which this is the head.
    Column("report", Text, nullable=True),
    Column("timeline_head", Text, nullable=True),
    Column("predicted_samples_per_s", Float, nullable=True),
    Column("measured_samples_per_s", Float, nullable=True),
    _time("created_at"),
    Index(None, "plan_id", "sequence"),
)

events = Table(
    "events",
    metadata,
    _sequence(),
    Column("job_id", String(32), ForeignKey("jobs.id", ondelete="CASCADE"), nullable=True),
    Column("run_id", String(32), ForeignKey("runs.id", ondelete="CASCADE"), nullable=True),
    Column("number", Integer, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("data", Text, nullable=False),
    _time("created_at"),
    UniqueConstraint("job_id", "number"),
    UniqueConstraint("run_id", "number"),
    CheckConstraint("(job_id IS NULL) <> (run_id IS NULL)", name="subject"),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    _sequence(),
    Column("caller", String(200), nullable=False),
    Column("key", String(200), nullable=False),
    Column("fingerprint", String(64), nullable=False),
    Column("status", Integer, nullable=True),
    Column("location", Text, nullable=True),
    Column("body", Text, nullable=True),
    _time("held_until"),
    _time("expires_at"),
    UniqueConstraint("caller", "key"),
    Index(None, "expires_at"),
)

server_keys = Table(
    "server_keys",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", String(64), nullable=False),
    _time("created_at"),
)

tokens = Table(
    "tokens",
    metadata,
    _sequence(),
    _id(),
    Column("name", String(200), nullable=False),
    Column("scopes", String(100), nullable=False),
    Column("secret_hash", String(64), nullable=False),
    Column("key_id", String(16), nullable=False),
    Column("created_by", String(200), nullable=False),
    _time("created_at"),
    _time("expires_at", nullable=True),
    _time("revoked_at", nullable=True),
    _time("last_used_at", nullable=True),
)

sessions = Table(
    "sessions",
    metadata,
    _sequence(),
    _id(),
    Column("secret_hash", String(64), nullable=False),
    Column("token_id", String(32), ForeignKey("tokens.id"), nullable=False),
    _time("created_at"),
    _time("expires_at", nullable=False),
    Index(None, "expires_at"),
)

aliases = Table(
    "aliases",
    metadata,
    _sequence(),
    Column("name", String(200), nullable=False, unique=True),
    Column("plan_id", String(32), ForeignKey("plans.id"), nullable=False, index=True),
    Column("version", BigInteger, nullable=False),
    Column("moved_by", String(200), nullable=False),
    _time("created_at"),
    _time("moved_at"),
)

alias_moves = Table(
    "alias_moves",
    metadata,
    _sequence(),
    Column("name", String(200), nullable=False),
    # No foreign key: the plan may be pruned, and the history stays. None: the alias was deleted.
    Column("plan_id", String(32), nullable=True),
    Column("moved_by", String(200), nullable=False),
    _time("moved_at"),
    Index(None, "name", "sequence"),
)

agents = Table(
    "agents",
    metadata,
    _sequence(),
    _id(),
    Column("name", String(200), nullable=False, unique=True),
    Column("instance", String(64), nullable=False),
    Column("content", Text, nullable=False),
    Column("draining", Boolean, nullable=False),
    Column("job_id", String(32), nullable=True),
    _time("registered_at"),
    _time("last_seen_at"),
    # When it last requested work and got none; null while it has some.
    _time("asked_at", nullable=True),
    # The token that registered it: while that is valid, no other may use the name. No foreign key: tokens may be
    # removed.
    Column("token_id", String(32), nullable=True),
    Index(None, "last_seen_at", "sequence"),
)

members = Table(
    "members",
    metadata,
    _sequence(),
    Column("job_id", String(32), ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    Column("node_rank", Integer, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("agent", String(200), nullable=False),
    Column("instance", String(64), nullable=False),
    Column("token", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("error", Text, nullable=True),
    _time("expires_at"),
    _time("ended_at", nullable=True),
    UniqueConstraint("job_id", "node_rank"),
    CheckConstraint("state IN ('given', 'joined', 'done', 'lost')", name="state"),
    Index(None, "agent"),
)

reports = Table(
    "reports",
    metadata,
    _sequence(),
    Column("id", String(64), nullable=False, unique=True),
    Column("job_id", String(32), ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False, index=True),
    _time("created_at"),
)

run_chunks = Table(
    "run_chunks",
    metadata,
    Column("run_id", String(32), ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("series", Integer, primary_key=True, autoincrement=False),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("rows", Integer, nullable=False),
    Column("first", BigInteger, nullable=False),
    Column("last", BigInteger, nullable=False),
    Column("content", LargeBinary, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    _sequence(),
    _time("created_at"),
    Column("action", String(32), nullable=False),
    Column("outcome", String(16), nullable=False),
    # No foreign keys: the named objects may be removed. A trigger refuses every update.
    Column("object_id", String(200), nullable=True),
    Column("actor", String(200), nullable=False),
    Column("token_id", String(32), nullable=True),
    Column("agent", String(200), nullable=True),
    Column("via", String(16), nullable=False),
    Column("status", Integer, nullable=True),
    Column("detail", Text, nullable=True),
    Column("request_id", String(64), nullable=True),
    *_orders("created_at"),
    *_orders("created_at", filters=("action", "actor", "token_id", "agent", "object_id")),
)

chores = Table(
    "chores",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("fence", Integer, nullable=False),
    _time("due_at"),
    _time("held_until", nullable=True),
)
