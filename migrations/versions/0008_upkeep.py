"""What the service does for itself: whose turn it is with which chore, and when a document was last asked for.

Retention finds what refers to a profile or a cluster by an index.

Revision ID: 0008
Revises: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

DOCUMENTS = ("profiles", "clusters", "plans")
REFERRING = ("profile_id", "cluster_id")


def upgrade() -> None:
    """Adds the table, the columns and the indexes; of what is there it is not known when it was last asked for."""
    op.create_table(
        "chores",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("held_until", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_chores"),
    )
    for table in DOCUMENTS:
        op.add_column(table, sa.Column("used_at", sa.DateTime(timezone=True), nullable=True))
    for column in REFERRING:
        is_there = sa.text(f"{column} IS NOT NULL")
        op.create_index(f"ix_jobs_{column}", "jobs", [column], sqlite_where=is_there, postgresql_where=is_there)


def downgrade() -> None:
    """Drops them."""
    for column in REFERRING:
        op.drop_index(f"ix_jobs_{column}", "jobs")
    for table in DOCUMENTS:
        op.drop_column(table, "used_at")
    op.drop_table("chores")
