"""Routes of the audit log: admins read it, and no route writes it."""

from typing import Annotated

from fastapi import APIRouter, Query

from pipeplan.protocol.audit import AuditEntry, AuditQuery
from pipeplan.protocol.listing import Page
from planner_service.access.auth import scope
from planner_service.audit import service as audit
from planner_service.platform.requests import Services

router = APIRouter(prefix="/v1/audit", tags=["audit"])


@router.get("", dependencies=[scope("admin")])
def list_audit(services: Services, query: Annotated[AuditQuery, Query()]) -> Page[AuditEntry]:
    """Who did what: newest first, or in the requested order; the entries that pass all filters."""
    return audit.page(services, query)
