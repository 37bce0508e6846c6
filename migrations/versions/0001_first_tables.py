"""First tables: profiles, clusters, plans, jobs, runs.

Revision ID: 0001
Revises: none
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the tables, those that others refer to first."""
    _create_profiles()
    _create_clusters()
    _create_plans()
    _create_jobs()
    _create_runs()


def downgrade() -> None:
    """Drops the tables, their indexes with them, in the opposite order."""
    for table in ("runs", "jobs", "plans", "clusters", "profiles"):
        op.drop_table(table)


def _create_profiles() -> None:
    op.create_table(
        "profiles",
        _sequence(),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("model_name", sa.Text(), nullable=False),
        sa.Column("device_name", sa.Text(), nullable=False),
        sa.Column("dtype", sa.String(16), nullable=False),
        sa.Column("blocks", sa.Integer(), nullable=False),
        _time("created_at"),
        *_keys("profiles", "id"),
    )


def _create_clusters() -> None:
    op.create_table(
        "clusters",
        _sequence(),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("device_name", sa.Text(), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        _time("created_at"),
        *_keys("clusters", "id"),
    )


def _create_plans() -> None:
    op.create_table(
        "plans",
        _sequence(),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("solve_time_s", sa.Float(), nullable=False),
        sa.Column("planner", sa.String(64), nullable=False),
        sa.Column("model_name", sa.Text(), nullable=False),
        sa.Column("profile_id", sa.String(32), nullable=False),
        sa.Column("cluster_id", sa.String(32), nullable=False),
        sa.Column("schedule", sa.String(32), nullable=False),
        sa.Column("depth", sa.Integer(), nullable=False),
        sa.Column("width", sa.Integer(), nullable=True),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.Column("batch_size", sa.BigInteger(), nullable=False),
        sa.Column("microbatch_size", sa.BigInteger(), nullable=False),
        sa.Column("microbatches", sa.BigInteger(), nullable=False),
        sa.Column("throughput_samples_per_s", sa.Float(), nullable=False),
        sa.Column("bubble_fraction", sa.Float(), nullable=False),
        _time("created_at"),
        *_keys("plans", "id"),
        _reference("plans", "profile_id", "profiles"),
        _reference("plans", "cluster_id", "clusters"),
    )
    op.create_index("ix_plans_profile_id", "plans", ["profile_id"])
    op.create_index("ix_plans_cluster_id", "plans", ["cluster_id"])


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        _sequence(),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("agent", sa.String(200), nullable=True),
        sa.Column("token", sa.String(64), nullable=True),
        _time("lease_expires_at", nullable=True),
        sa.Column("progress", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("profile_id", sa.String(32), nullable=True),
        sa.Column("cluster_id", sa.String(32), nullable=True),
        sa.Column("run_id", sa.String(32), nullable=True),
        sa.Column("result_id", sa.String(32), nullable=True),
        sa.Column("idempotency_key", sa.String(200), nullable=True),
        _time("created_at"),
        _time("updated_at"),
        sa.CheckConstraint(
            "state IN ('queued', 'leased', 'succeeded', 'failed', 'cancelled')", name=op.f("ck_jobs_state")
        ),
        *_keys("jobs", "id", "idempotency_key"),
        _reference("jobs", "profile_id", "profiles"),
        _reference("jobs", "cluster_id", "clusters"),
    )
    op.create_index("ix_jobs_state_sequence", "jobs", ["state", "sequence"])
    op.create_index("ix_jobs_state_lease_expires_at", "jobs", ["state", "lease_expires_at"])


def _create_runs() -> None:
    op.create_table(
        "runs",
        _sequence(),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("plan_id", sa.String(32), nullable=False),
        sa.Column("report", sa.Text(), nullable=True),
        sa.Column("timeline", sa.Text(), nullable=True),
        sa.Column("predicted_samples_per_s", sa.Float(), nullable=True),
        sa.Column("measured_samples_per_s", sa.Float(), nullable=True),
        _time("created_at"),
        *_keys("runs", "id", "job_id"),
        _reference("runs", "job_id", "jobs"),
        _reference("runs", "plan_id", "plans"),
    )
    op.create_index("ix_runs_plan_id", "runs", ["plan_id"])


def _sequence() -> sa.Column[int]:
    return sa.Column(
        "sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
    )


def _time(name: str, *, nullable: bool = False) -> sa.Column[sa.DateTime]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _keys(table: str, *unique: str) -> list[sa.Constraint]:
    primary = sa.PrimaryKeyConstraint("sequence", name=op.f(f"pk_{table}"))
    return [primary, *(sa.UniqueConstraint(column, name=op.f(f"uq_{table}_{column}")) for column in unique)]


def _reference(table: str, column: str, to: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint([column], [f"{to}.id"], name=op.f(f"fk_{table}_{column}_{to}"))
