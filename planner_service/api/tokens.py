"""Routes of the tokens: an admin's, and what every caller may know of its own."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from planner_service.api.auth import Caller, scope
from planner_service.api.bodies import SMALL, Page, Services, document, takes
from planner_service.api.idempotency import OnceKey, model_reply, once_response
from planner_service.contract.listing import Page as PageOf
from planner_service.contract.tokens import SCOPES, CreatedToken, NewToken, Token, Whoami
from planner_service.services import tokens
from planner_service.services.context import Context
from planner_service.services.idempotency import perform
from planner_service.storage.idempotency import Reply

router = APIRouter(prefix="/v1/tokens", tags=["tokens"])


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
def list_tokens(services: Services, page: Page) -> PageOf[Token]:
    """The tokens, newest first; those that are over, too."""
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
    """Revokes a token for good, and ends its sessions: in this process at once, in others within 2 seconds. It stays
    to be seen; once more changes nothing.
    """
    revoked = tokens.revoke(services, token_id)
    request.app.state.admission.identities.forget()
    return revoked
