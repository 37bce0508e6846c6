"""Profiles, and plans made from them, may be estimated; those that are there already were measured.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TABLES = ("profiles", "plans")


def upgrade() -> None:
    """Adds the column that lists show."""
    for table in TABLES:
        op.add_column(table, sa.Column("estimated", sa.Boolean(), server_default=sa.false(), nullable=False))


def downgrade() -> None:
    """Drops it."""
    for table in TABLES:
        op.drop_column(table, "estimated")
