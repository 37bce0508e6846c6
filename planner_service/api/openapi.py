"""The API's description. Bodies are read by our own rules, so that what they hold is added to what FastAPI knows."""

from copy import deepcopy
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import iter_route_contexts
from pydantic import TypeAdapter

from planner_service.api.auth import demands_of, is_public, scope
from planner_service.api.examples import request_examples
from planner_service.contract.agents import Presence, Registration
from planner_service.contract.aliases import AliasTarget
from planner_service.contract.jobs import Completion, Failure, Heartbeat, LeaseRequest, Release, Task
from planner_service.contract.plans import PlanRequest
from planner_service.contract.problems import MEDIA_TYPE, Problem
from planner_service.contract.tokens import NewToken
from planner_service.core.cluster import Cluster
from planner_service.core.plan import Infeasible, Plan
from planner_service.core.profile import Profile
from planner_service.services.context import Context

REFERENCE = "#/components/schemas/"
JSON = "application/json"

BODIES: dict[str, Any] = {
    "/v1/profiles": Profile,
    "/v1/clusters": Cluster,
    "/v1/plans": PlanRequest,
    "/v1/jobs": Task,
    "/v1/jobs/lease": LeaseRequest,
    "/v1/jobs/{job_id}/heartbeat": Heartbeat,
    "/v1/jobs/{job_id}/complete": Completion,
    "/v1/jobs/{job_id}/fail": Failure,
    "/v1/jobs/{job_id}/release": Release,
    "/v1/agents": Registration,
    "/v1/agents/{agent_id}/heartbeat": Presence,
    "/v1/tokens": NewToken,
    "/v1/aliases/{name}": AliasTarget,
}
"""What each POST and PUT takes."""

OTHERS: dict[str, Any] = {"Problem": Problem, "Plan": Plan, "Infeasible": Infeasible}

DERIVED = {
    "id": {"type": "string", "description": "the hash of the plan's content"},
    "feasible": {"type": "boolean", "const": True},
    "depth": {"type": "integer", "description": "stages"},
    "width": {"type": ["integer", "null"], "description": "replicas, where all stages have the same"},
}
SOLVE_TIME = {"type": "number", "description": "seconds that the planner took for this answer"}


router = APIRouter(include_in_schema=False)


@router.get("/openapi.json", dependencies=[scope("read", "agent")])
def description(request: Request) -> JSONResponse:
    """This description, to whoever may call anything that it describes."""
    return JSONResponse(request.app.openapi())


def install(app: FastAPI) -> None:
    """Gives the application this description; it is made when it is first asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    app.include_router(router)


def _described(app: FastAPI) -> dict[str, Any]:
    context: Context = app.state.context
    description = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        separate_input_output_schemas=False,
    )
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    bodies = _add_schemas(schemas)
    _add_plan_answers(schemas, description["paths"])
    _add_scopes(app, description)
    examples = request_examples(context.solve)
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            if method in ("post", "put") and path in bodies:
                operation["requestBody"] = _request_body(bodies[path], examples[path])
            _set_problems(operation, takes_body="requestBody" in operation, takes_id="{" in path)
    return description


def _add_scopes(app: FastAPI, description: dict[str, Any]) -> None:
    """How a caller says who it is, and which scope each operation asks of it."""
    token = {"type": "http", "scheme": "bearer", "description": "A token (`pipeplan token create`)"}
    description["components"]["securitySchemes"] = {"token": token}
    for route in iter_route_contexts(app.routes):
        path = route.path or ""
        for method, operation in description["paths"].get(path, {}).items():
            if method.upper() not in (route.methods or ()):
                continue
            operation["security"] = [] if is_public(path) else [{"token": []}]
            operation["x-scopes"] = sorted(name for demand in demands_of(route) for name in demand)


def _add_schemas(schemas: dict[str, Any]) -> dict[str, Any]:
    """Adds the schemas of what comes in; returns every body's."""
    kinds = BODIES | OTHERS
    inputs = [(name, "validation", TypeAdapter(kind)) for name, kind in kinds.items()]
    by_key, shared = TypeAdapter.json_schemas(inputs, ref_template=REFERENCE + "{model}")  # type: ignore[arg-type]
    schemas.update(shared.get("$defs", {}))
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return {path: by_key[path, "validation"] for path in BODIES}


def _add_plan_answers(schemas: dict[str, Any], paths: dict[str, Any]) -> None:
    document = deepcopy(schemas["Plan"])
    document["properties"] |= DERIVED
    document["required"] = [*document["required"], *DERIVED]
    answer = deepcopy(document)
    answer["properties"]["solve_time_s"] = SOLVE_TIME
    no = deepcopy(schemas["Infeasible"])
    no["properties"] |= {"feasible": {"type": "boolean", "const": False}, "solve_time_s": SOLVE_TIME}
    schemas |= {"PlanDocument": document, "PlanAnswer": answer, "NoPlanAnswer": no}
    both = {"oneOf": [_reference("PlanAnswer"), _reference("NoPlanAnswer")]}
    created, got = paths["/v1/plans"]["post"], paths["/v1/plans/{plan_id}"]["get"]
    created["responses"]["201"] = _response("A new plan", _reference("PlanAnswer"))
    created["responses"]["200"] = _response("The plan was there before, or no plan fits", both)
    got["responses"]["200"] = _response("The plan", _reference("PlanDocument"))


def _request_body(schema: dict[str, Any], examples: dict[str, Any]) -> dict[str, Any]:
    named = {name: {"value": value} for name, value in examples.items()}
    return {"required": True, "content": {JSON: {"schema": schema, "examples": named}}}


def _set_problems(operation: dict[str, Any], *, takes_body: bool, takes_id: bool) -> None:
    """The problems that the operation may answer with; FastAPI's own form of a 422 is never sent."""
    responses = operation["responses"]
    problems = {
        "401": "A valid token is needed",
        "403": "The token does not have the scope, or another site's page asks",
        "414": "The address is too long",
        "429": "Asked too often",
        "431": "The headers are too large",
    }
    problems |= {"500": "The service failed", "503": "Not now; try again"}
    if responses.pop("422", None) or takes_body:
        problems["422"] = "The input breaks a rule: field, rule and value are named"
    if takes_id:
        problems["404"] = "There is no such thing"
        problems["422"] = "What is asked for breaks a rule"
    if takes_body:
        problems |= {"409": "The present state does not allow it", "413": "The body is too large"}
        problems["415"] = "The body is not sent as JSON"
    elif takes_id and "heartbeat" not in operation["operationId"]:
        problems["409"] = "The present state does not allow it"
    for status, text in problems.items():
        responses[status] = {"description": text, "content": {MEDIA_TYPE: {"schema": _reference("Problem")}}}


def _response(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {JSON: {"schema": schema}}}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": REFERENCE + name}
