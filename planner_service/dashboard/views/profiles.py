"""The profiles."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner_service.api.bodies import Services
from planner_service.contract.profiles import ProfileQuery
from planner_service.dashboard.queries import query_of
from planner_service.dashboard.rendering import page
from planner_service.services import profiles

router = APIRouter()


@router.get("/profiles")
def list_profiles(services: Services, request: Request) -> HTMLResponse:
    """A page of the profiles that pass the address's filters."""
    query = query_of(ProfileQuery, request)
    return page(request, "profiles.html", profiles=profiles.page(services, query))
