"""OpenAPI: the API's description, with examples of requests that work as they stand, in their order.

The service reads bodies by its own rules. This module therefore adds their contents to what FastAPI knows.
"""

import json
import re
from copy import deepcopy
from dataclasses import asdict
from http import HTTPStatus
from typing import Any, get_args

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import iter_route_contexts
from pydantic import TypeAdapter

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.files import DEGREES, PRICE, SAID
from pipeplan.documents.identity import content_id
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.documents.profile import Block, Device, Model, Profile
from pipeplan.errors import ConflictError, InvalidInputError, NotFoundError
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.protocol.agents import Presence, Registration
from pipeplan.protocol.estimates import ModelPlanRequest
from pipeplan.protocol.jobs import Completion, Failure, Heartbeat, LeaseRequest, Progress, Release, Task
from pipeplan.protocol.listing import Noun
from pipeplan.protocol.plans import PLAYED, AliasTarget, PlanRequest
from pipeplan.protocol.problems import MEDIA_TYPE, Problem, problem_of
from pipeplan.protocol.tokens import NewToken
from planner_service.access.auth import demands_of, is_public, scope
from planner_service.platform.base_path import base_of
from planner_service.platform.context import Context, Solve
from planner_service.platform.requests import limit_of, size_of

MIB = 2**20
DEVICE = Device(name="A100-40GB", memory_bytes=40 * 2**30)
MODEL = "hf:gpt2?n_layer=4&n_embd=256&n_head=8"
DATA = "worker_agent.models.text:random_tokens?vocab_size=50257"
TOKEN = "the token of the lease"


MEASUREMENTS = tuple(
    Measurement(
        microbatch_size=size,
        forward_s=0.004 * size,
        backward_s=2 * 0.004 * size,
        input_bytes=size * MIB,
        output_bytes=size * MIB,
        activation_bytes=4 * size * MIB,
    )
    for size in (1, 2)
)
PROFILE = Profile(
    model=Model(name="gpt2-small-4", spec=MODEL),
    device=DEVICE,
    dtype="float32",
    blocks=tuple(Block(name=f"block{i}", weight_bytes=12 * MIB, measurements=MEASUREMENTS) for i in range(4)),
)
CLUSTER = Cluster(device=DEVICE, levels=(Level(size=2, bandwidth_bytes_per_s=3e11, latency_s=5e-6),))
PLAN_REQUEST = PlanRequest(
    profile_id=content_id(PROFILE),
    cluster_id=content_id(CLUSTER),
    planner="pipedream-2bw",
    batch_size=16,
    options=Options(),
)
INSTANCE = "5f1c2a9e"
REGISTRATION = {
    "name": "node-1",
    "instance": INSTANCE,
    "host": "gpu-a",
    "address": "10.0.0.1",
    "port": 29500,
    "devices": 8,
    "device_name": DEVICE.name,
    "memory_bytes": DEVICE.memory_bytes,
    "torch_version": "2.9.0",
    "driver": "570.86",
    "version": "0.1.0",
    "allow": ["hf:*", "worker_agent.models.text:random_tokens"],
}
PROFILE_TASK = {"kind": "profile", "model": MODEL, "microbatch_sizes": [1, 2], "devices": 2}


REQUEST_ID = "X-Request-ID"
TAKES_IDS = ("/v1/plans/compare", "/v1/runs/calibration")
"""Routes that name stored things outside of the path."""

NAMED = {f"{noun}_id": "the id, or the first of its digits: at least 4" for noun in get_args(Noun)} | {
    "plan_id": "the id, an alias, or the first of the id's digits: at least 4"
}

REFERENCE = "#/components/schemas/"
VALUES = ("const", "default", "enum", "example", "examples")
"""The keys of the description that hold no schemas."""

JSON = "application/json"

BODIES: dict[str, Any] = {
    "/v1/profiles": Profile,
    "/v1/clusters": Cluster,
    "/v1/plans": PlanRequest | ModelPlanRequest,
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
"""The body of each POST and PUT."""

OTHERS: dict[str, Any] = {"Problem": Problem, "Plan": Plan, "Infeasible": Infeasible}

DERIVED = {
    "id": {"type": "string", "description": "the hash of the plan's content"},
    "feasible": {"type": "boolean", "const": True},
    "depth": {"type": "integer", "description": "stages"},
    "width": {"type": ["integer", "null"], "description": "replicas, where all stages have the same"},
    **{name: {"type": ["number", "null"], "description": PLAYED} for name in PRICE},
    **{name: {"type": "integer", "description": text} for name, text in DEGREES.items() if name != "data"},
    "data": {"type": ["integer", "null"], "description": DEGREES["data"]},
    "sequence_parallel": {"type": "boolean", "description": "whether tensor parallelism shares out the tokens too"},
}
"""The fields that a plan's document adds to the plan."""

CHROME_TRACE = {
    "type": "object",
    "description": "in the Trace Event Format",
    "properties": {
        "traceEvents": {"type": "array", "items": {"type": "object"}},
        "displayTimeUnit": {"type": "string"},
        "otherData": {"type": "object"},
    },
    "required": ["traceEvents"],
}

SPOKEN = {
    name: {"type": [kind, "null"], "description": SAID[name]}
    for name, kind in (("synchronous", "boolean"), ("training", "string"), ("optimality", "string"))
}
"""Further fields of an answer with a plan."""

SOLVE_TIME = {"type": "number", "description": "seconds that the planner took for this answer"}

ENTITY_TAG = {"description": "the version of the content", "schema": {"type": "string"}}
IF_NONE_MATCH = {
    "name": "If-None-Match",
    "in": "header",
    "required": False,
    "description": "the ETag of what the caller has: 304 if it is the same still",
}

PROBLEMS = {
    "401": "A valid token is needed",
    "403": "The token does not have the scope, or another site's page asks",
    "414": "The address is too long",
    "429": "Asked too often",
    "431": "The headers are too large",
    "500": "The service failed",
    "503": "Not now; try again",
}
"""The problems that every operation may answer with."""

PROBLEM_EXAMPLES = {
    "404": problem_of(NotFoundError("there is no plan 0123456789abcdef0123456789abcdef")),
    "409": problem_of(ConflictError("job 0123456789abcdef0123456789abcdef has succeeded already")),
    "422": problem_of(InvalidInputError("batch_size", "must be a whole number of at least 1", 0)),
}

router = APIRouter(include_in_schema=False)


@router.get("/openapi.json", dependencies=[scope("read", "agent")])
def description(request: Request) -> JSONResponse:
    """This description, for every caller that may use any of it."""
    base = base_of(request.scope)
    return JSONResponse(request.app.openapi() | ({"servers": [{"url": base}]} if base else {}))


def install(app: FastAPI) -> None:
    """Gives the application this description; it is made at the first request for it."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def request_examples(solve: Solve) -> dict[str, dict[str, Any]]:
    """By path, the examples by name. The run's plan is the planner's answer to the plan's example."""
    asked = PLAN_REQUEST
    problem = PlanningProblem(profile=PROFILE, cluster=CLUSTER, batch_size=asked.batch_size, options=asked.options)
    answer = solve(asked.planner, problem)
    plan_id = content_id(answer) if isinstance(answer, Plan) else "0" * 32
    run_task = {"kind": "run", "plan_id": plan_id, "model": MODEL, "data": DATA, "steps": 20}
    result = {"kind": "profile", "profile": asdict(PROFILE), "cluster": asdict(CLUSTER)}
    progress = Progress(done=3, total=10, message="block 3 of 10").model_dump()
    return {
        "/v1/profiles": {"profile": asdict(PROFILE)},
        "/v1/clusters": {"cluster": asdict(CLUSTER)},
        "/v1/plans": {"plan": PLAN_REQUEST.model_dump(mode="json")},
        "/v1/jobs": {"profile": PROFILE_TASK, "links": {"kind": "links", "devices": 8, "nodes": 2}, "run": run_task},
        "/v1/aliases/{name}": {"alias": {"plan_id": plan_id}},
        "/v1/jobs/lease": {"lease": {"agent": "node-1", "kinds": ["profile", "run"]}},
        "/v1/agents": {"agent": REGISTRATION},
        "/v1/agents/{agent_id}/heartbeat": {"heartbeat": {"instance": INSTANCE, "draining": False}},
        "/v1/jobs/{job_id}/release": {"release": {"token": TOKEN}},
        "/v1/jobs/{job_id}/heartbeat": {"heartbeat": {"token": TOKEN, "progress": progress}},
        "/v1/jobs/{job_id}/complete": {"complete": {"token": TOKEN, "result": result}},
        "/v1/tokens": {"token": {"name": "ci", "scopes": ["plan"], "expires_in_s": 7_776_000}},
        "/v1/jobs/{job_id}/fail": {"fail": {"token": TOKEN, "error": "rank 1 ran out of memory at F3"}},
    }


def _described(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description of the application, completed."""
    context: Context = app.state.context
    of_framework = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        separate_input_output_schemas=False,
    )
    # Page[Job] is called Page_Job_ there.
    text = re.sub(r'\bPage_(\w+)_(?=")', r"\1Page", json.dumps(of_framework))
    description: dict[str, Any] = json.loads(text)
    schemas = description["components"]["schemas"]
    inputs = [(name, "validation", TypeAdapter(kind)) for name, kind in (BODIES | OTHERS).items()]
    by_key, shared = TypeAdapter.json_schemas(inputs, ref_template=REFERENCE + "{model}")  # type: ignore[arg-type]
    schemas.update(shared.get("$defs", {}))
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _add_text_answers(schemas, description["paths"])
    _add_scopes(app, description)

    examples = request_examples(context.solve)
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            if method in ("post", "put") and path in BODIES:
                named = {name: {"value": value} for name, value in examples[path].items()}
                body = {"schema": by_key[path, "validation"], "examples": named}
                operation["requestBody"] = {"required": True, "content": {JSON: body}}
            takes_id = "{" in path or path in TAKES_IDS
            _set_problems(operation, takes_body="requestBody" in operation, takes_id=takes_id)
            for response in operation["responses"].values():
                header = {"description": "in the log", "schema": {"type": "string"}}
                response.setdefault("headers", {})[REQUEST_ID] = header
            _mend_parameters(operation)
    _drop_titles(description["paths"])
    for name, schema in schemas.items():
        _drop_titles(schema)
        schema["title"] = name
    return description


def _add_text_answers(schemas: dict[str, Any], paths: dict[str, Any]) -> None:
    """Adds the schemas of a plan's document, of a planner's answer and of a trace, which the routes send as text."""
    document, form = schemas.pop("Plan"), schemas.pop("ClosedForm")
    form["properties"]["cost_model"] = {"type": "string", "description": "the plan's"}
    document["properties"] |= DERIVED | {"closed_form": _reference("ClosedFormDocument")}
    document["required"] = [*document["required"], *DERIVED]
    answer = deepcopy(document)
    answer["properties"] |= SPOKEN | {"solve_time_s": SOLVE_TIME}
    no = deepcopy(schemas["Infeasible"])
    no["properties"] |= {"feasible": {"type": "boolean", "const": False}, "solve_time_s": SOLVE_TIME}
    schemas |= {"ClosedFormDocument": form, "PlanDocument": document, "PlanAnswer": answer, "NoPlanAnswer": no}
    schemas["PlanPage"]["properties"]["items"]["items"] = _reference("PlanDocument")
    both = {"oneOf": [_reference("PlanAnswer"), _reference("NoPlanAnswer")]}
    created, got = paths["/v1/plans"]["post"], paths["/v1/plans/{plan_id}"]["get"]
    created["responses"]["201"] = _response("A new plan", _reference("PlanAnswer"))
    created["responses"]["200"] = _response("The plan was stored before, or no plan fits", both)
    pointed = paths["/v1/aliases/{name}/plan"]["get"]
    for operation in (got, pointed):
        operation["responses"]["200"] = _response("The plan", _reference("PlanDocument"))
    schemas["ChromeTrace"] = CHROME_TRACE
    for path in ("/v1/plans/{plan_id}/trace", "/v1/runs/{run_id}/trace"):
        paths[path]["get"]["responses"]["200"] = _response("The trace", _reference("ChromeTrace"))


def _mend_parameters(operation: dict[str, Any]) -> None:
    """Headers get their usual names, and ids say what may stand in their place (`overview.addresses`).

    An optional parameter is never null: neither addresses nor headers have a null. Where the answer has an entity tag,
    a caller may send the one that it has.
    """
    if "304" in operation["responses"]:
        for status in ("200", "304"):
            operation["responses"][status]["headers"]["ETag"] = ENTITY_TAG
        operation.setdefault("parameters", []).append(IF_NONE_MATCH | {"schema": {"type": "string"}})
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "header":
            parameter["name"] = parameter["name"].title()
        if parameter["in"] == "path" and parameter["name"] in NAMED:
            parameter["description"] = NAMED[parameter["name"]]
        schema = parameter["schema"]
        kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
        if len(kinds) == 1:
            del schema["anyOf"]
            parameter["schema"] = schema | kinds[0]
        elif kinds:
            schema["anyOf"] = kinds
        if "enum" in parameter["schema"]:
            parameter["schema"]["enum"] = [value for value in parameter["schema"]["enum"] if value is not None]


def _drop_titles(node: Any) -> None:
    """Removes the titles, which generators take for names: the framework gives one to several schemas."""
    if isinstance(node, list):
        for each in node:
            _drop_titles(each)
    elif isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        for key, inner in node.items():
            if key not in VALUES:
                _drop_titles(inner)


def _add_scopes(app: FastAPI, description: dict[str, Any]) -> None:
    """How callers authenticate, which scope each operation demands, and how large a body it takes."""
    token = {"type": "http", "scheme": "bearer", "description": "A token (`pipeplan token create`)"}
    description["components"]["securitySchemes"] = {"token": token}
    for route in iter_route_contexts(app.routes):
        path = getattr(route, "path_format", route.path) or ""
        for method, operation in description["paths"].get(path, {}).items():
            if method.upper() not in (route.methods or ()):
                continue
            operation["security"] = [] if is_public(path) else [{"token": []}]
            size = size_of(route)
            if size is not None:
                operation["x-max-body-bytes"] = limit_of(app, size)
            operation["x-scopes"] = sorted(name for demand in demands_of(route) for name in demand)


def _set_problems(operation: dict[str, Any], *, takes_body: bool, takes_id: bool) -> None:
    """The operation's possible problems; FastAPI's own form of a 422 is never sent."""
    responses = operation["responses"]
    problems = dict(PROBLEMS)
    if responses.pop("422", None) or takes_body:
        problems["422"] = "The input breaks a rule: field, rule and value are named"
    if takes_id:
        problems["404"] = "There is no such thing"
        problems["422"] = "What is asked for breaks a rule"
    if takes_body:
        problems["409"] = "The present state does not allow it"
        most_bytes = operation["x-max-body-bytes"]
        problems["413"] = f"The body has more than {most_bytes} bytes, or takes too much time or memory to read"
        problems["415"] = "The body is not sent as JSON"
    elif takes_id:
        problems["409"] = "The present state does not allow it"

    for status, text in problems.items():
        phrase = HTTPStatus(int(status)).phrase
        problem = PROBLEM_EXAMPLES.get(status) or Problem(title=phrase, status=int(status), detail=text)
        example = problem.model_dump(mode="json") | {"request_id": "5f2b0c9e1d7a4c36a8e4f1b7d2c90e35"}
        content = {"schema": _reference("Problem"), "example": example}
        responses[status] = {"description": text, "content": {MEDIA_TYPE: content}}


def _response(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {JSON: {"schema": schema}}}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": REFERENCE + name}
