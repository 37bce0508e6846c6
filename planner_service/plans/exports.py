"""Exports: a stored plan in other systems' formats."""

from dataclasses import dataclass

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Profile
from pipeplan.documents.tied import TiedWeights
from pipeplan.errors import InvalidInputError
from pipeplan.exports.formats import BATCHES, FORMATS, Format, format_named
from pipeplan.exports.source import ExportSource
from planner_service.documents.service import clusters, profiles
from planner_service.plans import service as plans
from planner_service.platform.context import Context

NAMES = tuple(FORMATS)
VERSIONS = tuple(version for one in FORMATS.values() for version in one.versions)
MEDIA_TYPES = tuple(
    dict.fromkeys(each.media_type for one in FORMATS.values() for each in (one, *one.versions.values()))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A format, with the reason if it cannot express the plan."""

    name: str
    refusal: str | None


def export(context: Context, plan_id: str, name: str, target_version: str | None = None) -> tuple[Format, str]:
    """The plan in a format, for a version of its target.

    Raises NotFoundError, and InvalidInputError where the format cannot express it at all.
    """
    chosen = format_named(name, target_version)
    plan = plans.get(context, plan_id)
    if name == "chrome-trace":
        plans.require_playable(plan, BATCHES)
    return chosen, chosen.write(_source(context, plan_id, plan))


def offers(context: Context, plan_id: str, plan: Plan) -> tuple[Offer, ...]:
    """All formats, for this plan. Raises NotFoundError."""
    source = _source(context, plan_id, plan)
    offered = []
    for name, one in FORMATS.items():
        refusal = None
        try:
            if name == "chrome-trace":  # no play is made to find out whether a trace is possible
                plans.require_playable(plan, BATCHES)
            else:
                one.write(source)
        except InvalidInputError as error:
            refusal = f"{error.field} {error.rule}" if error.field != "format" else error.rule
        offered.append(Offer(name=name, refusal=refusal))
    return tuple(offered)


def _source(context: Context, plan_id: str, plan: Plan) -> ExportSource:
    asked = plans.summary(context, plan_id)
    profile = profiles.document(context, asked.profile_id)
    names, tied_weights = context.parsing.read_stored(_of_blocks, profile, len(profile))
    return ExportSource(
        plan_id=plan_id,
        plan=plan,
        cluster=parse(Cluster, clusters.document(context, asked.cluster_id)),
        block_names=names,
        tied_weights=tied_weights,
    )


def _of_blocks(profile: str) -> tuple[tuple[str, ...], tuple[TiedWeights, ...]]:
    parsed = parse(Profile, profile)
    return tuple(block.name for block in parsed.blocks), (*parsed.tied, *parsed.tied_frozen)
