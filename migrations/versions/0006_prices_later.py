"""Plans that were stored without a play are played later: what was tried, and who is at it until when.

On the way down what was added is taken away: earlier releases do not know the mark that it has.

Revision ID: 0006
Revises: 0005
"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

COLUMNS = ("throughput_samples_per_s", "bubble_fraction")
FIGURES = ("time_per_microbatch_s", *COLUMNS)
"""A document's price."""

PLANS = sa.table("plans", *map(sa.column, ("sequence", "content", *COLUMNS)))


def upgrade() -> None:
    """Adds the columns; a plan without a price has not been tried again."""
    op.add_column("plans", sa.Column("tried_instructions", sa.BigInteger(), nullable=True))
    op.add_column("plans", sa.Column("claimed_until", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Drops them, and takes the plays away that were added."""
    connection = op.get_bind()
    added = PLANS.c.content.like('%"added\\_within":%', escape="\\")
    for sequence in connection.execute(sa.select(PLANS.c.sequence).where(added)).scalars().all():
        row = PLANS.c.sequence == sequence
        document = json.loads(connection.execute(sa.select(PLANS.c.content).where(row)).scalar_one())
        document |= dict.fromkeys(("simulated", *FIGURES))
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
        connection.execute(sa.update(PLANS).where(row).values(content=text, **dict.fromkeys(COLUMNS)))
    op.drop_column("plans", "claimed_until")
    op.drop_column("plans", "tried_instructions")
