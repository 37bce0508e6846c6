"""Profiles, by their content."""

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, bindparam, insert, select

from pipeplan.documents.identity import canonical_json, text_id
from pipeplan.documents.profile import Profile
from planner_service.contract.listing import Page
from planner_service.contract.profiles import ProfileQuery, ProfileSummary
from planner_service.storage import listing
from planner_service.storage.listing import Listing, equal, insert_once
from planner_service.storage.tables import profiles

_SUMMARY = [column for column in profiles.c if column.name != "content"]

_CONTENT = select(profiles.c.content).where(profiles.c.id == bindparam("asked_id"))
"""Made once: to build a statement takes longer than to execute it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedProfile:
    """A profile in the form in which it is stored: its document, and what lists show of it."""

    id: str
    content: str
    model_name: str
    device_name: str
    dtype: str
    blocks: int
    estimated: bool


def packed(profile: Profile) -> PackedProfile:
    """Packs a profile, a second of work for a large one, and neither transaction nor event loop waits for it."""
    content = canonical_json(profile)
    return PackedProfile(
        id=text_id(content),
        content=content,
        model_name=profile.model.name,
        device_name=profile.device.name,
        dtype=profile.dtype,
        blocks=len(profile.blocks),
        estimated=profile.estimated,
    )


def add(connection: Connection, profile: PackedProfile, now: datetime) -> bool:
    """Stores the profile unless it is there; says whether it is new."""
    if summary(connection, profile.id) is not None:
        return False
    return insert_once(connection, insert(profiles).values(**asdict(profile), created_at=now))


def content(connection: Connection, profile_id: str) -> str | None:
    """The profile's document."""
    return connection.execute(_CONTENT, {"asked_id": profile_id}).scalar_one_or_none()


def summary(connection: Connection, profile_id: str) -> ProfileSummary | None:
    """The profile as lists show it."""
    row = connection.execute(select(*_SUMMARY).where(profiles.c.id == profile_id)).one_or_none()
    return None if row is None else _summary(row)


def page(connection: Connection, query: ProfileQuery) -> Page[ProfileSummary]:
    """The profiles that the query asks for."""
    filters = [
        equal("model", profiles.c.model_name, query.model),
        equal("device", profiles.c.device_name, query.device),
        equal("dtype", profiles.c.dtype, query.dtype),
        equal("estimated", profiles.c.estimated, query.estimated),
        *listing.created(profiles.c.created_at, query),
    ]
    return listing.page(connection, _LISTING, listing.cut_of(query), filters)


def _summary(row: Row[Any]) -> ProfileSummary:
    return ProfileSummary(
        id=row.id,
        model=row.model_name,
        device=row.device_name,
        dtype=row.dtype,
        blocks=row.blocks,
        created_at=row.created_at,
        estimated=row.estimated,
    )


_LISTING = Listing(
    table=profiles,
    query=select(*_SUMMARY),
    item=_summary,
    sorts={"created_at": profiles.c.created_at, "blocks": profiles.c.blocks},
)
