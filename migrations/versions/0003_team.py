"""What a team's service keeps. A pair of functions a noun; they are taken back in reverse.

Revision ID: 0003
Revises: 0002
"""

import json
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def _frozen(name: str) -> ModuleType:
    """A copy, beside the revisions, of code that the service had when this one was written."""
    spec = spec_from_file_location(f"pipeplan_{name}", Path(__file__).parents[1] / "frozen" / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(name)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


timelines = _frozen("timelines_0003")


def _sequence() -> sa.Column[int]:
    return sa.Column(
        "sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
    )


def _time(name: str, *, nullable: bool = False) -> sa.Column[sa.DateTime]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _make_tokens() -> None:
    op.create_table(
        "server_keys",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("value", sa.String(64), nullable=False),
        _time("created_at"),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_server_keys")),
    )
    op.create_table(
        "tokens",
        _sequence(),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("scopes", sa.String(100), nullable=False),
        sa.Column("secret_hash", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(16), nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        _time("created_at"),
        _time("expires_at", nullable=True),
        _time("revoked_at", nullable=True),
        _time("last_used_at", nullable=True),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_tokens")),
        sa.UniqueConstraint("id", name=op.f("uq_tokens_id")),
    )
    op.create_table(
        "sessions",
        _sequence(),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("secret_hash", sa.String(64), nullable=False),
        sa.Column("token_id", sa.String(32), nullable=False),
        _time("created_at"),
        _time("expires_at"),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_sessions")),
        sa.UniqueConstraint("id", name=op.f("uq_sessions_id")),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name=op.f("fk_sessions_token_id_tokens")),
    )
    op.create_index("ix_sessions_expires_at", "sessions", ["expires_at"])


def _drop_tokens() -> None:
    for table in ("sessions", "tokens", "server_keys"):
        op.drop_table(table)


def _add_askers() -> None:
    for table in ("jobs", "plans"):
        op.add_column(table, sa.Column("asked_by", sa.String(200), nullable=True))


def _drop_askers() -> None:
    for table in ("plans", "jobs"):
        op.drop_column(table, "asked_by")


def _add_plan_jobs() -> None:
    op.add_column("jobs", sa.Column("plan_id", sa.String(32), nullable=True))
    op.add_column("jobs", sa.Column("answer", sa.Text(), nullable=True))


def _drop_plan_jobs() -> None:
    op.drop_column("jobs", "answer")
    op.drop_column("jobs", "plan_id")


def _create_events() -> None:
    op.create_table(
        "events",
        _sequence(),
        sa.Column("job_id", sa.String(32), nullable=True),
        sa.Column("run_id", sa.String(32), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        _time("created_at"),
        sa.PrimaryKeyConstraint("sequence", name="pk_events"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_events_job_id_jobs", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_events_run_id_runs", ondelete="CASCADE"),
        sa.UniqueConstraint("job_id", "number", name="uq_events_job_id_number"),
        sa.UniqueConstraint("run_id", "number", name="uq_events_run_id_number"),
        sa.CheckConstraint("(job_id IS NULL) <> (run_id IS NULL)", name=op.f("ck_events_subject")),
    )


def _drop_events() -> None:
    op.drop_table("events")


def _create_idempotency_keys() -> None:
    op.create_table(
        "idempotency_keys",
        _sequence(),
        sa.Column("caller", sa.String(200), nullable=False),
        sa.Column("key", sa.String(200), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("location", sa.Text(), nullable=True),
        sa.Column("body", sa.Text(), nullable=True),
        _time("held_until"),
        _time("expires_at"),
        sa.PrimaryKeyConstraint("sequence", name="pk_idempotency_keys"),
        sa.UniqueConstraint("caller", "key", name="uq_idempotency_keys_caller_key"),
    )
    op.create_index("ix_idempotency_keys_expires_at", "idempotency_keys", ["expires_at"])


def _drop_idempotency_keys() -> None:
    op.drop_table("idempotency_keys")


def _index(table: str, *columns: str) -> tuple[str, str, list[str]]:
    return "_".join(("ix", table, *columns, "sequence")), table, [*columns, "sequence"]


PLAN_FILTERS = ("profile_id", "cluster_id", "model_name", "planner", "schedule")
ORDERS = (
    *(_index("plans", order) for order in ("created_at", "throughput_samples_per_s", "memory_bytes")),
    *(_index("plans", name, order) for name in PLAN_FILTERS for order in ("created_at", "throughput_samples_per_s")),
    *(_index("profiles", order) for order in ("created_at", "blocks")),
    *(_index("profiles", name, "created_at") for name in ("model_name", "device_name")),
    *(_index("clusters", order) for order in ("created_at", "devices")),
    _index("clusters", "device_name", "created_at"),
)
ROWS_AT_ONCE = 500


def _add_orders() -> None:
    op.add_column("plans", sa.Column("memory_bytes", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("plans", sa.Column("device_name", sa.Text(), server_default="unknown", nullable=False))
    op.add_column("plans", sa.Column("devices", sa.Integer(), server_default="0", nullable=False))
    _fill_plans(op.get_bind())
    op.drop_index("ix_plans_profile_id", "plans")
    op.drop_index("ix_plans_cluster_id", "plans")
    for name, table, columns in ORDERS:
        op.create_index(name, table, columns)


def _fill_plans(connection: sa.Connection) -> None:
    """The memory from the plans' documents, the devices from their clusters."""
    plans = sa.table("plans", *map(sa.column, ("sequence", "content", "memory_bytes", "cluster_id")))
    of_plan = "FROM clusters WHERE clusters.id = plans.cluster_id"
    connection.execute(
        sa.text(f"UPDATE plans SET device_name = (SELECT device_name {of_plan}), devices = (SELECT devices {of_plan})")
    )
    last = 0
    while True:
        some = sa.select(plans.c.sequence, plans.c.content).where(plans.c.sequence > last).order_by(plans.c.sequence)
        rows = connection.execute(some.limit(ROWS_AT_ONCE)).all()
        if not rows:
            return
        for row in rows:
            memory_bytes = max(stage["memory_bytes"] for stage in json.loads(row.content)["stages"])
            change = sa.update(plans).where(plans.c.sequence == row.sequence).values(memory_bytes=memory_bytes)
            connection.execute(change)
        last = rows[-1].sequence


def _drop_orders() -> None:
    for name, table, _ in ORDERS:
        op.drop_index(name, table)
    op.create_index("ix_plans_profile_id", "plans", ["profile_id"])
    op.create_index("ix_plans_cluster_id", "plans", ["cluster_id"])
    for column in ("devices", "device_name", "memory_bytes"):
        op.drop_column("plans", column)


def _create_aliases() -> None:
    op.create_table(
        "aliases",
        _sequence(),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("plan_id", sa.String(32), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("moved_by", sa.String(200), nullable=False),
        _time("created_at"),
        _time("moved_at"),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_aliases")),
        sa.UniqueConstraint("name", name=op.f("uq_aliases_name")),
        sa.ForeignKeyConstraint(["plan_id"], ["plans.id"], name=op.f("fk_aliases_plan_id_plans")),
    )
    op.create_index("ix_aliases_plan_id", "aliases", ["plan_id"])
    op.create_table(
        "alias_moves",
        _sequence(),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("plan_id", sa.String(32), nullable=True),
        sa.Column("moved_by", sa.String(200), nullable=False),
        _time("moved_at"),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_alias_moves")),
    )
    op.create_index("ix_alias_moves_name_sequence", "alias_moves", ["name", "sequence"])


def _drop_aliases() -> None:
    for table in ("alias_moves", "aliases"):
        op.drop_table(table)


JOB_STATES = "state IN ('queued', 'leased', 'succeeded', 'failed', 'cancelled')"
JOB_STATES_NOW = "state IN ('queued', 'leased', 'succeeded', 'failed', 'cancelled', 'dead')"


def _add_agents() -> None:
    _change_check(JOB_STATES, JOB_STATES_NOW)
    op.add_column("jobs", sa.Column("fence", sa.Integer(), server_default="0", nullable=False))
    op.add_column("jobs", sa.Column("needs_id", sa.String(32), server_default="any", nullable=False))
    op.add_column("jobs", sa.Column("needs", sa.Text(), server_default="{}", nullable=False))
    op.add_column("jobs", sa.Column("instance", sa.String(64), nullable=True))
    op.add_column("jobs", sa.Column("gang", sa.Text(), nullable=True))
    op.add_column("jobs", _time("not_before", nullable=True))
    op.create_index("ix_jobs_state_needs_id_sequence", "jobs", ["state", "needs_id", "sequence"])
    _create_agents()


def _create_agents() -> None:
    op.create_table(
        "agents",
        _sequence(),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("instance", sa.String(64), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=True),
        _time("registered_at"),
        _time("last_seen_at"),
        _time("asked_at", nullable=True),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_agents")),
        sa.UniqueConstraint("id", name=op.f("uq_agents_id")),
        sa.UniqueConstraint("name", name=op.f("uq_agents_name")),
    )
    op.create_index("ix_agents_last_seen_at_sequence", "agents", ["last_seen_at", "sequence"])
    _create_reports()


def _create_reports() -> None:
    """The members of gangs, and the ids of the reports that were taken."""
    op.create_table(
        "members",
        _sequence(),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("node_rank", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("agent", sa.String(200), nullable=False),
        sa.Column("instance", sa.String(64), nullable=False),
        sa.Column("token", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        _time("expires_at"),
        _time("ended_at", nullable=True),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_members")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_members_job_id_jobs"), ondelete="CASCADE"),
        sa.UniqueConstraint("job_id", "node_rank", name=op.f("uq_members_job_id_node_rank")),
        sa.CheckConstraint("state IN ('given', 'joined', 'done', 'lost')", name=op.f("ck_members_state")),
    )
    op.create_index("ix_members_agent", "members", ["agent"])
    op.create_table(
        "reports",
        _sequence(),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        _time("created_at"),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_reports")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_reports_job_id_jobs"), ondelete="CASCADE"),
        sa.UniqueConstraint("id", name=op.f("uq_reports_id")),
    )
    op.create_index("ix_reports_job_id", "reports", ["job_id"])


def _remove_agents() -> None:
    for table in ("reports", "members", "agents"):
        op.drop_table(table)
    op.drop_index("ix_jobs_state_needs_id_sequence", "jobs")
    for column in ("not_before", "gang", "instance", "needs", "needs_id", "fence"):
        op.drop_column("jobs", column)
    op.execute("UPDATE jobs SET state = 'failed' WHERE state = 'dead'")
    _change_check(JOB_STATES_NOW, JOB_STATES)


def _change_check(before: str, after: str) -> None:
    """Another CHECK for the jobs' state.

    SQLite changes none in place, and to copy the table would set off the cascades of those that refer to it. Its
    manual's way for changes that leave the rows as they are is to edit the schema's text ("Making Other Kinds Of Table
    Schema Changes").
    """
    if op.get_bind().dialect.name != "sqlite":
        op.drop_constraint(op.f("ck_jobs_state"), "jobs")
        op.create_check_constraint(op.f("ck_jobs_state"), "jobs", after)
        return
    connection = op.get_bind()
    version = connection.exec_driver_sql("PRAGMA schema_version").scalar_one()
    connection.exec_driver_sql("PRAGMA writable_schema=ON")
    edited = "UPDATE sqlite_master SET sql = replace(sql, ?, ?) WHERE type = 'table' AND name = 'jobs'"
    connection.exec_driver_sql(edited, (before, after))
    connection.exec_driver_sql(f"PRAGMA schema_version={version + 1}")
    connection.exec_driver_sql("PRAGMA writable_schema=OFF")


def _pack_timelines() -> None:
    """Timelines and losses out of the documents and into chunks, a run at a time."""
    op.create_table(
        "run_chunks",
        sa.Column("run_id", sa.String(32), nullable=False),
        sa.Column("series", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("part", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("first", sa.BigInteger(), nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "series", "part", name=op.f("pk_run_chunks")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_chunks_run_id_runs"), ondelete="CASCADE"),
    )
    op.add_column("runs", sa.Column("timeline_head", sa.Text(), nullable=True))
    timelines.pack_all(op.get_bind())
    op.drop_column("runs", "timeline")
    op.drop_index("ix_runs_plan_id", "runs")
    op.create_index("ix_runs_plan_id_sequence", "runs", ["plan_id", "sequence"])


def _unpack_timelines() -> None:
    op.drop_index("ix_runs_plan_id_sequence", "runs")
    op.create_index("ix_runs_plan_id", "runs", ["plan_id"])
    op.add_column("runs", sa.Column("timeline", sa.Text(), nullable=True))
    timelines.unpack_all(op.get_bind())
    op.drop_column("runs", "timeline_head")
    op.drop_table("run_chunks")


NOUNS: tuple[tuple[Callable[[], None], Callable[[], None]], ...] = (
    (_make_tokens, _drop_tokens),
    (_add_plan_jobs, _drop_plan_jobs),
    (_create_events, _drop_events),
    (_create_idempotency_keys, _drop_idempotency_keys),
    (_add_orders, _drop_orders),
    (_create_aliases, _drop_aliases),
    (_add_agents, _remove_agents),
    (_pack_timelines, _unpack_timelines),
    (_add_askers, _drop_askers),
)
"""What makes a noun's tables, and what takes them back, in order."""


def upgrade() -> None:
    """Makes them all."""
    for make, _ in NOUNS:
        make()


def downgrade() -> None:
    """Takes them all back."""
    for _, take_back in reversed(NOUNS):
        take_back()
