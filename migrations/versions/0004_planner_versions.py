"""Plans name the version of their planner; those that are there already are of the first.

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the column that lists show."""
    op.add_column("plans", sa.Column("planner_version", sa.String(32), server_default="1.0.0", nullable=False))


def downgrade() -> None:
    """Drops it."""
    op.drop_column("plans", "planner_version")
