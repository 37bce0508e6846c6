"""Routes of the tokens, and of the login.

Admins manage tokens; every caller may see its own. A browser logs in with a token once and keeps the session's cookie,
which no script can read and no other site can send.
"""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from pipeplan.errors import ForbiddenError, PipeplanError
from pipeplan.protocol.listing import Page as PageOf
from pipeplan.protocol.problems import headers_of, problem_of
from pipeplan.protocol.tokens import SCOPES, CreatedToken, NewToken, Token, Whoami
from planner_service.access import service as tokens
from planner_service.access.auth import (
    COOKIE,
    Admission,
    Caller,
    acts_as,
    cookie_path,
    from_own_page,
    scope,
    session_text,
)
from planner_service.access.idempotency import OnceKey, Reply, model_reply, once_response, perform
from planner_service.access.service import SESSION_S
from planner_service.platform.context import Context
from planner_service.platform.requests import MAX_FORM_BYTES, SMALL, CutOf, Form, Services, document, takes
from planner_service.platform.writers import WritingRoute

router = APIRouter(prefix="/v1/tokens", tags=["tokens"], route_class=WritingRoute)


@router.post("", dependencies=[scope("admin"), takes(SMALL)], status_code=201, response_model=CreatedToken)
def create_token(
    services: Services, caller: Caller, new: Annotated[NewToken, Depends(document(NewToken))], key: OnceKey
) -> Response:
    """Makes a token. Its text is in this answer and is never shown again, nor kept under an Idempotency-Key."""

    def create(context: Context) -> Reply:
        created = tokens.create(context, new, by=caller.name)
        return model_reply(created, status=HTTPStatus.CREATED, location=f"/v1/tokens/{created.id}")

    return once_response(perform(services, key, create, secret=True))


@router.get("", dependencies=[scope("admin")])
def list_tokens(services: Services, page: CutOf) -> PageOf[Token]:
    """The tokens, newest first, including expired and revoked ones."""
    return tokens.newest(services, page)


@router.get("/self", dependencies=[scope("read", "agent")])
def get_own_token(services: Services, caller: Caller) -> Whoami:
    """Who the caller is, and what it may do."""
    token = None if caller.token_id is None else tokens.get(services, caller.token_id)
    return Whoami(name=caller.name, scopes=tuple(scope for scope in SCOPES if scope in caller.scopes), token=token)


@router.get("/{token_id}", dependencies=[scope("admin")])
def get_token(services: Services, token_id: str) -> Token:
    """A token."""
    return tokens.get(services, token_id)


@router.post("/{token_id}/revoke", dependencies=[scope("admin")])
def revoke_token(services: Services, request: Request, token_id: str) -> Token:
    """Revokes a token for good, and ends its sessions: in this process at once, in others within 2 seconds. It stays in
    the list; revoking it again changes nothing.
    """
    revoked = tokens.revoke(services, token_id)
    request.app.state.admission.identities.forget()
    return revoked


login_router = APIRouter(include_in_schema=False)


@login_router.get("/login")
async def login_page(request: Request) -> Response:
    """The page where a token is entered."""
    return _admission(request).login_page(request, own_path(request.query_params.get("next", "/")), None)


@login_router.post("/login", dependencies=[takes(MAX_FORM_BYTES)])
async def login(request: Request, fields: Form) -> Response:
    """Exchanges a token for a session."""
    way_back = own_path(fields.get("next", "/"))
    admission = _admission(request)
    try:
        if not from_own_page(request.headers):
            raise ForbiddenError("log in from the service's own page")
        identity = await admission.of_token(request.scope, fields.get("token", "").strip())
        if "read" not in identity.scopes:
            raise ForbiddenError(f"the token {identity.name!r} does not have the scope read, which the pages ask for")
        acts_as(identity)
        credential = (await admission.identities.open_session(identity)).text()
    except PipeplanError as error:
        response = admission.login_page(request, way_back, error.outside)
        response.status_code = problem_of(error).status
        response.headers.update(headers_of(error))
        return response
    response = RedirectResponse(way_back, HTTPStatus.SEE_OTHER)
    encrypted = request.url.scheme == "https"
    response.set_cookie(
        COOKIE,
        credential,
        path=cookie_path(request),
        max_age=SESSION_S,
        httponly=True,
        samesite="strict",
        secure=encrypted,
    )
    return response


@login_router.post("/logout", dependencies=[scope("read")])
async def logout(request: Request) -> Response:
    """Ends the session."""
    await _admission(request).identities.end_session(session_text(request.headers) or "")
    response = RedirectResponse("/login", HTTPStatus.SEE_OTHER)
    response.delete_cookie(COOKIE, path=cookie_path(request), httponly=True, samesite="strict")
    return response


def own_path(text: str) -> str:
    """The path on this service that a text is; the first page for any other text, such as another site's address."""
    plain = text.startswith("/") and not text.startswith("//") and "\\" not in text and text.isprintable()
    return text if plain else "/"


def _admission(request: Request) -> Admission:
    admission: Admission = request.app.state.admission
    return admission
