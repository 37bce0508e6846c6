"""Routes of the aliases."""

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response

from pipeplan.documents.plan import Plan
from pipeplan.errors import InvalidInputError
from pipeplan.protocol.listing import ListQuery, Page
from pipeplan.protocol.plans import MAX_CHARACTERS, PATTERN, Alias, AliasMove, AliasQuery, AliasTarget
from planner_service.access.auth import Caller, scope
from planner_service.aliases import service as aliases
from planner_service.aliases.service import Expected
from planner_service.documents.caching import REVALIDATE, UNCHANGED, document_response, stored
from planner_service.plans import service as plans
from planner_service.platform.problems import described
from planner_service.platform.requests import SMALL, Services, document, mark_created, page_response, takes
from planner_service.platform.stored import tag_of
from planner_service.platform.writers import WritingRoute

router = APIRouter(prefix="/v1/aliases", tags=["aliases"], route_class=WritingRoute)

AliasName = Annotated[
    str,
    Path(
        description="lower-case words, in parts that / separates",
        examples=["gpt-prod"],
        json_schema_extra={"pattern": PATTERN, "minLength": 1, "maxLength": MAX_CHARACTERS},
    ),
]
IfMatch = Annotated[str | None, Header(description='the version that it must have, as its ETag: `"7"`; or `*`')]
IfNoneMatch = Annotated[str | None, Header(description="`*`: it must not be there yet")]
CONFLICTS: dict[int | str, dict[str, Any]] = {412: described("It has been moved in the meantime")}


def expected(if_match: IfMatch = None) -> Expected:
    """The condition of a change, from the request's headers."""
    if if_match is None:
        return Expected()
    tags = [tag.strip() for tag in if_match.split(",")]
    if tags == ["*"]:
        return Expected(present=True)
    if not all(len(tag) > 2 and tag[0] == tag[-1] == '"' for tag in tags):
        raise InvalidInputError("If-Match", 'must be * or entity tags such as "7"', if_match)
    return Expected(versions=tuple(tag.strip('"') for tag in tags))


def expected_or_new(wanted: Annotated[Expected, Depends(expected)], if_none_match: IfNoneMatch = None) -> Expected:
    """The same, or the condition that there is no such alias yet."""
    if if_none_match is None:
        return wanted
    if if_none_match.strip() != "*":
        raise InvalidInputError("If-None-Match", "must be * where something is set", if_none_match)
    if wanted != Expected():
        raise InvalidInputError("If-None-Match", "must not come together with If-Match", if_none_match)
    return Expected(absent=True)


@router.get("", dependencies=[scope("read")], response_model=Page[Alias])
def list_aliases(services: Services, query: Annotated[AliasQuery, Query()]) -> Response:
    """The aliases: newest first, or in the requested order; those that pass all filters."""
    return page_response(aliases.page(services, query))


@router.get("/{name:path}/history", dependencies=[scope("read")], response_model=Page[AliasMove])
def get_alias_history(services: Services, name: AliasName, query: Annotated[ListQuery, Query()]) -> Response:
    """What the alias pointed at, since when, and who moved it: the latest first. It outlives the alias."""
    return page_response(aliases.history(services, name, query))


@router.get("/{name:path}/plan", dependencies=[scope("read", "agent")], response_model=Plan, responses=UNCHANGED)
def get_plan_of_alias(services: Services, request: Request, name: AliasName) -> Response:
    """The plan that the alias points at. Its entity tag is the plan's: it changes when the alias moves."""
    plan_id = aliases.get(services, name).plan_id
    content = stored(services, plans.NOUN, plan_id, plans.document)
    tag = tag_of(plans.NOUN, plan_id, content)
    response = document_response(request, tag, lambda: content, cache_control=REVALIDATE)
    response.headers["Content-Location"] = f"/v1/plans/{plan_id}"
    return response


@router.get("/{name:path}", dependencies=[scope("read", "agent")], response_model=Alias, responses=UNCHANGED)
def get_alias(services: Services, request: Request, name: AliasName) -> Response:
    """Where the alias points."""
    alias = aliases.get(services, name)
    return document_response(request, str(alias.version), alias.model_dump_json, cache_control=REVALIDATE)


@router.put(
    "/{name:path}",
    dependencies=[scope("plan"), takes(SMALL)],
    response_model=Alias,
    responses={**CONFLICTS, 201: {"model": Alias, "description": "The alias is new"}},
)
def put_alias(
    services: Services,
    caller: Caller,
    name: AliasName,
    target: Annotated[AliasTarget, Depends(document(AliasTarget))],
    wanted: Annotated[Expected, Depends(expected_or_new)],
    response: Response,
) -> Alias:
    """Points the alias at a plan; with If-Match if nobody has moved it since, with If-None-Match: * if it is new."""
    alias, new = aliases.put(services, name, target.plan_id, by=caller.name, expected=wanted)
    mark_created(response, new, f"/v1/aliases/{name}")
    response.headers["ETag"] = f'"{alias.version}"'
    return alias


@router.delete("/{name:path}", dependencies=[scope("plan")], status_code=HTTPStatus.NO_CONTENT, responses=CONFLICTS)
def delete_alias(
    services: Services, caller: Caller, name: AliasName, wanted: Annotated[Expected, Depends(expected)]
) -> Response:
    """Deletes the alias; its history stays."""
    aliases.delete(services, name, by=caller.name, expected=wanted)
    return Response(status_code=HTTPStatus.NO_CONTENT)
