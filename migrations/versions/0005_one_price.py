"""Plans are listed by what their streams give when they are played; the closed form's figures stand beside it.

The columns that held the closed form's figures are renamed, and new ones of their old names hold the played figures,
null where a plan's streams were not played. Documents stay as they are: today's code reads those of every release. On
the way down those of later releases are written as earlier ones read them, under the same ids.

Revision ID: 0005
Revises: 0004
"""

import json
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

RENAMED = {
    "throughput_samples_per_s": "closed_form_samples_per_s",
    "bubble_fraction": "closed_form_bubble_fraction",
}
"""By the name before, the name after. The played figures have the names before."""

FIGURES = ("time_per_microbatch_s", "throughput_samples_per_s", "bubble_fraction")
"""A document's: the closed form's in earlier releases."""

INDEXES = {
    "_".join(("ix_plans", *columns)): columns
    for columns in (
        ("throughput_samples_per_s", "sequence"),
        *(
            (name, "throughput_samples_per_s", "sequence")
            for name in ("profile_id", "cluster_id", "model_name", "planner", "schedule")
        ),
    )
}

ROWS_AT_ONCE = 500

PLANS = sa.table("plans", *map(sa.column, ("sequence", "content", *RENAMED)))


def upgrade() -> None:
    """Renames the columns, and fills those of the played figures from the documents."""
    for name in INDEXES:
        op.drop_index(name, "plans")
    for before, after in RENAMED.items():
        op.execute(f"ALTER TABLE plans RENAME COLUMN {before} TO {after}")
        op.add_column("plans", sa.Column(before, sa.Float(), nullable=True))
    _change(lambda document: {name: (document.get("simulated") or {}).get(name) for name in RENAMED})
    _make_indexes()


def downgrade() -> None:
    """Takes the columns back, and writes later documents as earlier releases read them."""
    for name in INDEXES:
        op.drop_index(name, "plans")
    for before, after in RENAMED.items():
        op.drop_column("plans", before)
        op.execute(f"ALTER TABLE plans RENAME COLUMN {after} TO {before}")
    _change(_earlier)
    _make_indexes()


def _make_indexes() -> None:
    for name, columns in INDEXES.items():
        op.create_index(name, "plans", list(columns))


def _change(values_of: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Sets what the function says of each plan's document."""
    connection, last = op.get_bind(), 0
    while True:
        some = sa.select(PLANS.c.sequence, PLANS.c.content).where(PLANS.c.sequence > last).order_by(PLANS.c.sequence)
        rows = connection.execute(some.limit(ROWS_AT_ONCE)).all()
        if not rows:
            return
        for row in rows:
            values = values_of(json.loads(row.content))
            if values:
                connection.execute(sa.update(PLANS).where(PLANS.c.sequence == row.sequence).values(values))
        last = rows[-1].sequence


def _earlier(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the closed form's figures among its own; nothing where they are there."""
    if "closed_form" not in document:
        return {}
    closed_form = document.pop("closed_form")
    document.update((name, closed_form[name]) for name in FIGURES)
    for other in (*document["alternatives"], *document["pareto"]):
        rate = other.pop("closed_form_samples_per_s", None)
        if other["throughput_samples_per_s"] is None:
            other["throughput_samples_per_s"] = rate
    return {"content": json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)}
