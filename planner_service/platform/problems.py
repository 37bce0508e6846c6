"""Problems: every error becomes problem details (RFC 9457), or a page for a person; never a traceback."""

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeplan.documents.names import on_one_line
from pipeplan.documents.validators import rule_of
from pipeplan.errors import PipeplanError
from pipeplan.protocol.problems import MEDIA_TYPE, BrokenRule, Problem, headers_of, problem_of, shown
from planner_service.platform.logs import REQUEST_ID
from planner_service.platform.requests import KEY, may

Page = Callable[[Request, Problem], Response]
"""Renders a problem as a page."""

API_PREFIX = "/v1"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
LOG = logging.getLogger("pipeplan")


def install(app: FastAPI, page: Page) -> None:
    """Answers all errors of the application."""

    def answer(request: Request, problem: Problem) -> Response:
        wants_page = "text/html" in request.headers.get("accept", "")
        if wants_page and not request.url.path.startswith(API_PREFIX):
            return page(request, problem)
        return problem_response(problem)

    def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, PipeplanError)
        response = answer(request, problem_for(request.scope, error))
        response.headers.update(headers_of(error))
        return response

    def frameworks(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        nowhere = error.status_code == HTTPStatus.NOT_FOUND
        detail = f"nothing is at {request.url.path[:200]}" if nowhere else str(error.detail)
        response = answer(request, _problem(HTTPStatus(error.status_code), detail))
        response.headers.update(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            # The framework names the methods of only the first route that matches.
            matching = [route for route in iter_route_contexts(app.routes) if route.path_regex.match(request.url.path)]
            routes = [route for route in matching if route.path == request.url.path] or matching
            known = {method for route in routes for method in route.methods or ()}
            known |= {"HEAD"} if "GET" in known else set()  # answered as GET, without a route of its own
            allowed = ", ".join(method for method in METHODS if method in known)
            response.headers["Allow"] = allowed or response.headers["Allow"]
        return response

    def parameters(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(request, _broken_parameters(error))

    def gone(request: Request, _error: Exception) -> Response:
        return answer(request, _problem(HTTPStatus.BAD_REQUEST, "the body ended before it was whole"))

    def unforeseen(request: Request, error: Exception) -> Response:
        LOG.error("a request failed in an unforeseen way", exc_info=error)
        detail = "the service failed in an unforeseen way; its log has the details under the request's id"
        return answer(request, _problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail))

    app.state.answer = answer
    app.add_exception_handler(PipeplanError, ours)
    app.add_exception_handler(HTTPException, frameworks)
    app.add_exception_handler(RequestValidationError, parameters)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_middleware(Failures, answer=unforeseen)


class Failures:
    """Answers errors that no handler knows.

    The framework would do so outside of all middleware, without a request id and headers.
    """

    def __init__(self, app: ASGIApp, answer: Callable[[Request, Exception], Response]) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on; raises only if a part of the answer has been sent already."""
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await self._answer(Request(scope), error)(scope, receive, send)


def problem_for(scope: Scope, error: PipeplanError) -> Problem:
    """The error as a document for the request's caller. A text for operators goes to the log, and only to admins."""
    problem = problem_of(error)
    if error.outside == problem.detail:
        return problem
    LOG.warning("%s", error)
    if may(scope, ("admin",)):
        return problem
    return problem.model_copy(update={"detail": f"{error.outside}; the service's log says why, under the request's id"})


def problem_response(problem: Problem) -> Response:
    """The problem as it goes over the wire."""
    document = problem.model_dump(mode="json") | {"request_id": REQUEST_ID.get()}
    return JSONResponse(document, problem.status, media_type=MEDIA_TYPE)


def plain(status: HTTPStatus, detail: str) -> Response:
    """A problem that is none of our errors, as it goes over the wire."""
    return problem_response(_problem(status, detail))


async def send_error(error: PipeplanError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers an error outside of any route: a person whom the door let in sees a page, as in a route."""
    problem = problem_for(scope, error)
    response = scope["app"].state.answer(Request(scope), problem) if KEY in scope else problem_response(problem)
    response.headers.update(headers_of(error))
    await response(scope, receive, send)


def described(text: str) -> dict[str, Any]:
    """A problem in the OpenAPI description of a route, for one that only this route can answer."""
    return {"description": text, "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}


def _problem(status: HTTPStatus, detail: str) -> Problem:
    return Problem(title=status.phrase, status=status, detail=detail)


def _broken_parameters(error: RequestValidationError) -> Problem:
    """The problem of path, query or header parameters, which FastAPI reads. Bodies are read by `requests`."""
    rules = [
        BrokenRule(
            field=on_one_line(".".join(str(part) for part in finding["loc"][1:])),
            rule=on_one_line(rule_of(finding["msg"])),
            value=shown(finding["input"]),
        )
        for finding in error.errors()
    ]
    detail = "; ".join(f"{rule.field}: {rule.rule}, got {rule.value!r}" for rule in rules)
    return Problem(
        type="urn:pipeplan:problem:invalid-input",
        title="The input breaks a rule",
        status=HTTPStatus.UNPROCESSABLE_ENTITY,
        detail=detail,
        errors=tuple(rules),
    )
