"""Problems: every error becomes problem details (RFC 9457), or a page for a person. Never a traceback."""

import re
from collections.abc import Callable
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from planner_service.contract.problems import MEDIA_TYPE, BrokenRule, Problem, headers_of, problem_of
from planner_service.core.errors import PipeplanError

Page = Callable[[Request, Problem], Response]
"""How a problem looks to a person."""

API_PREFIX = "/v1"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def install(app: FastAPI, page: Page) -> None:
    """Answers all errors of the application."""

    def answer(request: Request, problem: Problem) -> Response:
        wants_page = "text/html" in request.headers.get("accept", "")
        if wants_page and not request.url.path.startswith(API_PREFIX):
            return page(request, problem)
        return problem_response(problem)

    def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, PipeplanError)
        response = answer(request, problem_of(error))
        response.headers.update(headers_of(error))
        return response

    def frameworks(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = answer(request, _problem(HTTPStatus(error.status_code), str(error.detail)))
        response.headers.update(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            response.headers["Allow"] = ", ".join(_allowed(app, request.url.path)) or response.headers["Allow"]
        return response

    def parameters(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(request, _broken_parameters(error))

    def unforeseen(request: Request, _error: Exception) -> Response:
        detail = "the service failed in a way that it does not know; its log has the details"
        return answer(request, _problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail))

    app.add_exception_handler(PipeplanError, ours)
    app.add_exception_handler(HTTPException, frameworks)
    app.add_exception_handler(RequestValidationError, parameters)
    app.add_exception_handler(Exception, unforeseen)


def problem_response(problem: Problem) -> Response:
    """The problem as it goes over the wire."""
    return JSONResponse(problem.model_dump(mode="json"), problem.status, media_type=MEDIA_TYPE)


def _problem(status: HTTPStatus, detail: str) -> Problem:
    return Problem(title=status.phrase, status=status, detail=detail)


def _broken_parameters(error: RequestValidationError) -> Problem:
    """Path, query and header parameters: FastAPI reads them; bodies are read by `bodies`."""
    rules = [
        BrokenRule(
            field=".".join(str(part) for part in finding["loc"][1:]), rule=finding["msg"], value=finding["input"]
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


def _allowed(app: FastAPI, path: str) -> list[str]:
    """The methods of a path: the framework knows only those of the first route that matches."""
    paths = app.openapi()["paths"]
    matching = [template for template in paths if re.fullmatch(re.sub(r"\{[^}]*\}", "[^/]+", template), path)]
    templates = [path] if path in matching else matching
    return [method for method in METHODS if any(method.lower() in paths[template] for template in templates)]
