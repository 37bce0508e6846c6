"""A service's database with so many plans in it, none of which had to be searched for."""

import hashlib
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import insert

from pipeplan.documents.cluster import Level
from pipeplan.documents.files import plan_document
from pipeplan.documents.identity import canonical_json, content_id
from pipeplan.documents.plan import Plan
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from planner_service.documents.store import clusters, packed_cluster, packed_profile, profiles
from planner_service.overview.openapi import CLUSTER, PROFILE
from planner_service.platform.database import Database
from planner_service.platform.migrations import upgrade
from planner_service.platform.tables import plans

PLANNERS = ("pipedream", "pipedream-2bw", "gpipe", "exact", "auto")
SCHEDULES = ("1f1b", "pipedream", "pipedream-2bw", "gpipe", "data-parallel")
ROWS_AT_ONCE = 2000


def fill(path: Path, count: int) -> list[str]:
    """Makes the database, and returns the plans' ids. Only what lists go by and the ids differ among the plans."""
    database = Database(f"sqlite:///{path}")
    upgrade(database)
    cluster = replace(CLUSTER, levels=(Level(size=4, bandwidth_bytes_per_s=3e11),))
    answer = solve("auto", PlanningProblem(profile=PROFILE, cluster=cluster, batch_size=32, options=Options()))
    if not isinstance(answer, Plan):
        raise LookupError("no plan fits")
    text = canonical_json(plan_document(answer))
    start = datetime(2026, 1, 1, tzinfo=UTC)
    with database.write() as connection:
        profile, cluster_row = packed_profile(PROFILE), packed_cluster(cluster)
        profiles.add(connection, profile, start)
        clusters.add(connection, cluster_row, start)
        profile_id, cluster_id = profile.id, cluster_row.id
    ids = [hashlib.sha256(str(index).encode()).hexdigest()[:32] for index in range(count)]
    seeded = random.Random(1)
    for first in range(0, count, ROWS_AT_ONCE):
        rows = [
            {
                "id": plan_id,
                "content": text.replace(content_id(answer), plan_id),
                "request": "{}",
                "solve_time_s": 0.1,
                "planner": seeded.choice(PLANNERS),
                "model_name": f"model-{seeded.randrange(200)}",
                "profile_id": profile_id,
                "cluster_id": cluster_id,
                "schedule": seeded.choice(SCHEDULES),
                "depth": answer.depth,
                "width": answer.width,
                "workers": answer.workers,
                "batch_size": answer.batch_size,
                "microbatch_size": answer.microbatch_size,
                "microbatches": answer.microbatches,
                "throughput_samples_per_s": seeded.uniform(10.0, 1000.0),
                "bubble_fraction": 0.1,
                "closed_form_samples_per_s": answer.closed_form.throughput_samples_per_s,
                "closed_form_bubble_fraction": answer.closed_form.bubble_fraction,
                "created_at": start + timedelta(seconds=first + index),
                "estimated": seeded.random() < 0.1,
                "memory_bytes": seeded.randrange(2**35),
                "device_name": cluster.device.name,
                "devices": cluster.devices,
            }
            for index, plan_id in enumerate(ids[first : first + ROWS_AT_ONCE])
        ]
        with database.write() as connection:
            connection.execute(insert(plans), rows)
    database.close()
    return ids
