"""The audit log: who did what. An entry that is there is never changed: the database itself refuses that.

Revision ID: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

FILTERS = ("action", "actor", "token_id", "agent", "object_id")

SQLITE = """
CREATE TRIGGER audit_is_append_only BEFORE UPDATE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log is append only'); END
"""
POSTGRESQL = """
CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'the audit log is append only'; END $$
"""
TRIGGER = "CREATE TRIGGER audit_is_append_only BEFORE UPDATE ON audit EXECUTE FUNCTION audit_is_append_only()"


def upgrade() -> None:
    """Adds the table. Nothing is known of what was done before."""
    text = sa.String(200)
    op.create_table(
        "audit",
        sa.Column("sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("object_id", text, nullable=True),
        sa.Column("actor", text, nullable=False),
        sa.Column("token_id", sa.String(32), nullable=True),
        sa.Column("agent", text, nullable=True),
        sa.Column("via", sa.String(16), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("request_id", sa.String(64), nullable=True),
        sa.PrimaryKeyConstraint("sequence", name="pk_audit"),
    )
    op.create_index("ix_audit_created_at_sequence", "audit", ["created_at", "sequence"])
    for name in FILTERS:
        op.create_index(f"ix_audit_{name}_created_at_sequence", "audit", [name, "created_at", "sequence"])
    if op.get_bind().dialect.name == "sqlite":
        op.execute(SQLITE)
    else:
        op.execute(POSTGRESQL)
        op.execute(TRIGGER)


def downgrade() -> None:
    """Drops it, with what it holds."""
    op.drop_table("audit")
    if op.get_bind().dialect.name != "sqlite":
        op.execute("DROP FUNCTION audit_is_append_only()")
