"""Page of the audit log, for admins."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeplan.protocol.audit import ACTIONS, AuditQuery
from planner_service.access.auth import scope
from planner_service.audit import service as audit
from planner_service.platform.pages import page, query_of
from planner_service.platform.requests import Services

router = APIRouter()


@router.get("/audit", dependencies=[scope("admin")])
def list_audit(services: Services, request: Request) -> HTMLResponse:
    """A page of the entries that pass the address's filters."""
    return page(
        request, "audit/audit.html", entries=audit.page(services, query_of(AuditQuery, request)), actions=ACTIONS
    )
