"""Routes of the profiles."""

from typing import Annotated

from fastapi import APIRouter, Depends, Response

from planner_service.api.auth import scope
from planner_service.api.bodies import Page, Services, document, mark_created, raw_json
from planner_service.contract.listing import Page as PageOf
from planner_service.contract.profiles import ProfileSummary
from planner_service.core.profile import Profile
from planner_service.services import profiles

router = APIRouter(prefix="/v1/profiles", tags=["profiles"])


@router.post(
    "",
    dependencies=[scope("plan")],
    status_code=201,
    responses={200: {"model": ProfileSummary, "description": "It was there before"}},
)
def create_profile(
    services: Services, profile: Annotated[Profile, Depends(document(Profile))], response: Response
) -> ProfileSummary:
    """Stores a profile. The same content has the same id and is stored once."""
    summary, new = profiles.create(services, profile)
    mark_created(response, new, f"/v1/profiles/{summary.id}")
    return summary


@router.get("", dependencies=[scope("read")])
def list_profiles(services: Services, page: Page) -> PageOf[ProfileSummary]:
    """The profiles, newest first."""
    return profiles.newest(services, page)


@router.get("/{profile_id}", dependencies=[scope("read")], response_model=Profile)
def get_profile(services: Services, profile_id: str) -> Response:
    """A profile's document."""
    return raw_json(profiles.document(services, profile_id))
