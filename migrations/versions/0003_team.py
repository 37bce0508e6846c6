"""What a team's service keeps. A pair of functions a noun; they are taken back in reverse.

Revision ID: 0003
Revises: 0002
"""

from collections.abc import Callable

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


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


NOUNS: tuple[tuple[Callable[[], None], Callable[[], None]], ...] = (
    (_make_tokens, _drop_tokens),
    (_add_plan_jobs, _drop_plan_jobs),
    (_create_events, _drop_events),
    (_create_idempotency_keys, _drop_idempotency_keys),
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
