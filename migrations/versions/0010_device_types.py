"""Clusters and plans name every type of a cluster's devices, with its number. Filters find them by each of the types.

Revision ID: 0010
Revises: 0009
"""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

TABLES = ("clusters", "plans")
ROWS_AT_ONCE = 500
CLUSTERS = sa.table("clusters", *map(sa.column, ("sequence", "content", "device_types")))
INDEX = "ix_clusters_device_name_created_at_sequence"


def upgrade() -> None:
    """Adds the columns and fills them from the clusters' documents. The index of the first type has no use now."""
    for table in TABLES:
        op.add_column(table, sa.Column("device_types", sa.Text(), nullable=False, server_default="[]"))
    connection, last = op.get_bind(), 0
    query = sa.select(CLUSTERS.c.sequence, CLUSTERS.c.content).order_by(CLUSTERS.c.sequence).limit(ROWS_AT_ONCE)
    while rows := connection.execute(query.where(CLUSTERS.c.sequence > last)).all():
        for row in rows:
            types = json.dumps(_types(json.loads(row.content)), ensure_ascii=False, separators=(",", ":"))
            changed = sa.update(CLUSTERS).where(CLUSTERS.c.sequence == row.sequence)
            connection.execute(changed.values(device_types=types))
        last = rows[-1].sequence
    op.execute(
        "UPDATE plans SET device_types = (SELECT device_types FROM clusters WHERE clusters.id = plans.cluster_id)"
    )
    op.drop_index(INDEX, "clusters")


def downgrade() -> None:
    """Drops the columns."""
    op.create_index(INDEX, "clusters", ["device_name", "created_at", "sequence"])
    for table in TABLES:
        op.drop_column(table, "device_types")


def _types(cluster: dict[str, Any]) -> list[tuple[str, int]]:
    """The types' names with their numbers, in the order of the devices."""
    if not cluster.get("groups"):
        devices = 1
        for level in cluster["levels"]:
            devices *= level["size"]
        return [(cluster["device"]["name"], devices)]
    counts: dict[str, int] = {}
    for group in cluster["groups"]:
        name = group["device"]["name"]
        counts[name] = counts.get(name, 0) + group["count"]
    return list(counts.items())
