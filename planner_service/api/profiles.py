"""Routes of the profiles."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from pipeplan.documents.profile import Profile
from planner_service.api.auth import scope
from planner_service.api.bodies import GENERAL_LIMIT, Services, mark_created, sent, takes
from planner_service.api.caching import UNCHANGED, Lane, document_response, stored
from planner_service.api.listing import page_response
from planner_service.contract.listing import Page
from planner_service.contract.profiles import ProfileQuery, ProfileSummary
from planner_service.services import profiles
from planner_service.storage.profiles import PackedProfile

router = APIRouter(prefix="/v1/profiles", tags=["profiles"])

DOCUMENT = Lane(noun="profiles", path="/v1/profiles/{profile_id}", scopes=("read",), load=profiles.document)


@router.post(
    "",
    dependencies=[scope("plan"), takes(GENERAL_LIMIT)],
    status_code=201,
    responses={200: {"model": ProfileSummary, "description": "It was there before"}},
)
def create_profile(
    services: Services, profile: Annotated[PackedProfile, Depends(sent(profiles.read))], response: Response
) -> ProfileSummary:
    """Stores a profile. The same content has the same id and is stored once."""
    summary, new = profiles.keep(services, profile)
    mark_created(response, new, f"/v1/profiles/{summary.id}")
    return summary


@router.get("", dependencies=[scope("read")], response_model=Page[ProfileSummary])
def list_profiles(services: Services, query: Annotated[ProfileQuery, Query()]) -> Response:
    """The profiles: newest first, or in the order asked for; those that pass all filters."""
    return page_response(profiles.page(services, query))


@router.get("/{profile_id}", dependencies=[scope(*DOCUMENT.scopes)], response_model=Profile, responses=UNCHANGED)
def get_profile(services: Services, request: Request, profile_id: str) -> Response:
    """A profile's document. It never changes: its id is its entity tag."""
    content = stored(services, DOCUMENT.noun, profile_id, profiles.document)
    return document_response(request, profile_id, lambda: content)
