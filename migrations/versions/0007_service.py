"""Indexes for the choice of a lease: the oldest jobs of a kind, and the oldest of each need and kind.

The token to which an agent's name belongs.

Revision ID: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

BEFORE = ("ix_jobs_state_needs_id_sequence", ["state", "needs_id", "sequence"])
OF_KIND = ("ix_jobs_state_kind_sequence", ["state", "kind", "sequence"])
OF_NEEDS = ("ix_jobs_state_needs_id_kind_sequence", ["state", "needs_id", "kind", "sequence"])


def upgrade() -> None:
    """Replaces the index of needs by one that knows kinds; names belong to nobody until their agents register again."""
    op.drop_index(BEFORE[0], "jobs")
    op.create_index(OF_KIND[0], "jobs", OF_KIND[1])
    op.create_index(OF_NEEDS[0], "jobs", OF_NEEDS[1])
    op.add_column("agents", sa.Column("token_id", sa.String(32), nullable=True))


def downgrade() -> None:
    """Puts the former index back."""
    op.drop_column("agents", "token_id")
    op.drop_index(OF_NEEDS[0], "jobs")
    op.drop_index(OF_KIND[0], "jobs")
    op.create_index(BEFORE[0], "jobs", BEFORE[1])
