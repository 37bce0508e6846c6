"""Exports: a stored plan as other systems read it."""

from planner_service.contract.documents import parse
from planner_service.core.cluster import Cluster
from planner_service.core.profile import Profile
from planner_service.exports.chrome_trace import BATCHES
from planner_service.exports.formats import FORMATS, Format, format_named
from planner_service.exports.source import Source
from planner_service.services import clusters, plans, profiles
from planner_service.services.context import Context

NAMES = tuple(FORMATS)
MEDIA_TYPES = tuple(dict.fromkeys(one.media_type for one in FORMATS.values()))


def export(context: Context, plan_id: str, name: str) -> tuple[Format, str]:
    """The plan in a format. Raises NotFoundError, and InvalidInputError where the format cannot express it at all."""
    chosen = format_named(name)
    plan = plans.get(context, plan_id)
    if name == "chrome-trace":
        plans.require_playable(plan, BATCHES)
    asked = plans.summary(context, plan_id)
    profile = parse(Profile, profiles.document(context, asked.profile_id))
    source = Source(
        plan_id=plan_id,
        plan=plan,
        cluster=parse(Cluster, clusters.document(context, asked.cluster_id)),
        block_names=tuple(block.name for block in profile.blocks),
    )
    return chosen, chosen.write(source)
