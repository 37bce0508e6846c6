"""Measurements: the kinds of jobs that measure a model's profile or the links between devices. Both store documents."""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection

from pipeplan.protocol.jobs import Job, LinksResult, LinksTask, ProfileResult, ProfileTask
from planner_service.agents.needs import Needs, factories_of
from planner_service.documents.store import PackedDocument, clusters, packed_cluster, packed_profile, profiles
from planner_service.jobs.kinds import JobKind
from planner_service.platform.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKept:
    """A profile job's result, as it is stored."""

    profile: PackedDocument
    cluster: PackedDocument


def pack_profile(result: ProfileResult) -> ProfileKept:
    return ProfileKept(profile=packed_profile(result.profile), cluster=packed_cluster(result.cluster))


def pack_links(result: LinksResult) -> PackedDocument:
    return packed_cluster(result.cluster)


def _needs(_connection: Connection, task: ProfileTask | LinksTask) -> Needs:
    nodes = task.nodes if isinstance(task, LinksTask) else 1
    return Needs(nodes=nodes, processes=task.devices, agents=task.agents, factories=factories_of(task))


def _store_profile(context: Context, connection: Connection, _job: Job, kept: ProfileKept) -> Mapping[str, str]:
    profiles.add(connection, kept.profile, context.now())
    clusters.add(connection, kept.cluster, context.now())
    return {"profile_id": kept.profile.id, "cluster_id": kept.cluster.id}


def _store_links(context: Context, connection: Connection, _job: Job, cluster: PackedDocument) -> Mapping[str, str]:
    clusters.add(connection, cluster, context.now())
    return {"cluster_id": cluster.id}


PROFILE = JobKind(name="profile", needs=_needs, pack=pack_profile, store=_store_profile)
LINKS = JobKind(name="links", needs=_needs, pack=pack_links, store=_store_links)
