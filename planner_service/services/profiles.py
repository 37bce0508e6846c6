"""Profiles: stored by content, never changed."""

from pipeplan.documents.files import parse_sent
from pipeplan.documents.profile import Profile
from planner_service.contract.listing import Page
from planner_service.contract.profiles import ProfileQuery, ProfileSummary
from planner_service.services.context import Context, found
from planner_service.storage import profiles as storage
from planner_service.storage.listing import Cut
from planner_service.storage.profiles import PackedProfile


def read(content: bytes) -> PackedProfile:
    """The profile that a body holds, as it is stored. Raises InvalidInputError."""
    return storage.packed(parse_sent(Profile, content))


def create(context: Context, profile: Profile) -> tuple[ProfileSummary, bool]:
    """Stores a profile, and says whether it is new."""
    return keep(context, storage.packed(profile))


def keep(context: Context, profile: PackedProfile) -> tuple[ProfileSummary, bool]:
    """The same of one that is packed."""
    with context.database.write() as connection:
        new = storage.add(connection, profile, context.now())
        return found("profile", profile.id, storage.summary(connection, profile.id)), new


def document(context: Context, profile_id: str) -> str:
    """The profile's JSON text. Raises NotFoundError."""
    with context.database.read() as connection:
        return found("profile", profile_id, storage.content(connection, profile_id))


def page(context: Context, query: ProfileQuery) -> Page[ProfileSummary]:
    """The profiles that the query asks for."""
    with context.database.read() as connection:
        return storage.page(connection, query)


def newest(context: Context, cut: Cut) -> Page[ProfileSummary]:
    """A page of profiles, newest first."""
    return page(context, ProfileQuery(limit=cut.limit, cursor=cut.cursor))
