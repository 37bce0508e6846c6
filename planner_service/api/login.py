"""Login: a browser shows a token once and keeps a session's cookie, which no script can read and no other site send."""

from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from pipeplan.errors import ForbiddenError, PipeplanError
from planner_service.api.auth import COOKIE, Admission, from_own_page, scope, session_text
from planner_service.api.bodies import MAX_FORM_BYTES, Form, takes
from planner_service.contract.problems import headers_of, problem_of
from planner_service.services.sessions import SESSION_S

router = APIRouter(include_in_schema=False)


@router.get("/login")
async def login_page(request: Request) -> Response:
    """The page where a token is entered."""
    return _admission(request).login_page(request, own_path(request.query_params.get("next", "/")), None)


@router.post("/login", dependencies=[takes(MAX_FORM_BYTES)])
async def login(request: Request, fields: Form) -> Response:
    """Takes a token for a session."""
    way_back = own_path(fields.get("next", "/"))
    try:
        credential = await _session_for(request, fields.get("token", ""))
    except PipeplanError as error:
        response = _admission(request).login_page(request, way_back, str(error))
        response.status_code = problem_of(error).status
        response.headers.update(headers_of(error))
        return response
    response = RedirectResponse(way_back, HTTPStatus.SEE_OTHER)
    encrypted = request.url.scheme == "https"
    response.set_cookie(COOKIE, credential, max_age=SESSION_S, httponly=True, samesite="strict", secure=encrypted)
    return response


@router.post("/logout", dependencies=[scope("read")])
async def logout(request: Request) -> Response:
    """Ends the session."""
    await _admission(request).identities.end_session(session_text(request.headers) or "")
    response = RedirectResponse("/login", HTTPStatus.SEE_OTHER)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


def own_path(text: str) -> str:
    """The path on this service that a text is; the first page for any other text, such as another site's address."""
    plain = text.startswith("/") and not text.startswith("//") and "\\" not in text and text.isprintable()
    return text if plain else "/"


async def _session_for(request: Request, token: str) -> str:
    if not from_own_page(request.headers):
        raise ForbiddenError("log in from the service's own page")
    admission = _admission(request)
    identity = await admission.of_token(request.scope, token.strip())
    if "read" not in identity.scopes:
        raise ForbiddenError(f"the token {identity.name!r} does not have the scope read, which the pages ask for")
    return (await admission.identities.open_session(identity)).text()


def _admission(request: Request) -> Admission:
    admission: Admission = request.app.state.admission
    return admission
