"""Login: a browser shows a token once and keeps a session's cookie, which no script can read and no other site send."""

from http import HTTPStatus
from urllib.parse import parse_qs

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import RedirectResponse

from planner_service.api.auth import COOKIE, Admission, from_own_page, scope
from planner_service.contract.problems import headers_of, problem_of
from planner_service.core.errors import ForbiddenError, PipeplanError
from planner_service.services.sessions import SESSION_S

MAX_FORM_BYTES = 8 * 1024
FORM = "application/x-www-form-urlencoded"

router = APIRouter(include_in_schema=False)


@router.get("/login")
async def login_page(request: Request) -> Response:
    """The page where a token is entered."""
    return _admission(request).login_page(request, own_path(request.query_params.get("next", "/")), None)


@router.post("/login")
async def login(request: Request) -> Response:
    """Takes a token for a session."""
    fields = await _form(request)
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
    await _admission(request).identities.end_session(request.cookies.get(COOKIE, ""))
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


async def _form(request: Request) -> dict[str, str]:
    """The form's fields, the first of each name. A form needs no more than two, and short ones."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the form must be sent as {FORM}")
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_FORM_BYTES:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a form has at most {MAX_FORM_BYTES} bytes")
    try:
        fields = parse_qs(content.decode(), max_num_fields=10)
    except ValueError as error:
        raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, "the form cannot be read") from error
    return {name: values[0] for name, values in fields.items()}


def _admission(request: Request) -> Admission:
    admission: Admission = request.app.state.admission
    return admission
