"""Identities: whose credentials requests bring. What the database knows of them is kept for a moment."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from pipeplan.errors import PipeplanError
from planner_service.contract.tokens import SESSION_PREFIX, TOKEN_PREFIX, Credential, Identity, parse_credential
from planner_service.services import sessions, tokens
from planner_service.services.context import Context
from planner_service.services.token_keys import TokenKey, token_key
from planner_service.services.tokens import Known

KNOWN_FOR_S = 2.0
"""How long a process goes by what it has read: after that a token that was revoked elsewhere is worth nothing here."""

MAX_KNOWN = 10_000
LOG = logging.getLogger("pipeplan.auth")


@dataclass(frozen=True, slots=True)
class _Read:
    known: Known
    at: datetime


class Identities:
    """Finds out whose a token or a session is. Only valid ones are kept, so that guesses fill no memory.

    Requests that bring the same credential at once share one look into the database.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._key: TokenKey | None = None
        self._read: dict[str, _Read] = {}
        self._under_way: dict[str, asyncio.Task[Known | None]] = {}
        self._noted: dict[str, datetime] = {}

    async def of_token(self, text: str, *, may_look: Callable[[], None]) -> Identity | None:
        """Whose token this is; None unless it is valid. `may_look` may raise before an unknown one is looked up."""
        return await self._of(parse_credential(TOKEN_PREFIX, text), tokens.known, may_look)

    async def of_session(self, text: str, *, may_look: Callable[[], None]) -> Identity | None:
        """Whose session this is; None unless it is valid."""
        return await self._of(parse_credential(SESSION_PREFIX, text), sessions.known, may_look)

    async def open_session(self, identity: Identity) -> Credential:
        """A session of whoever has just shown a token."""
        return await asyncio.to_thread(sessions.open_session, self._context, await self._token_key(), identity)

    async def end_session(self, text: str) -> None:
        """Ends the session with this text, if there is one: here at once, elsewhere within KNOWN_FOR_S."""
        credential = parse_credential(SESSION_PREFIX, text)
        if credential is not None and await self.of_session(text, may_look=lambda: None) is not None:
            await asyncio.to_thread(sessions.end_session, self._context, credential.id)
        self.forget()

    def forget(self) -> None:
        """Nothing is gone by any more that was read before."""
        self._read.clear()

    async def note_use(self, identity: Identity) -> None:
        """Writes down that the token was used, at most once a minute. That this fails hinders nobody."""
        now = self._context.now()
        if identity.token_id is None or _within(self._noted.get(identity.token_id), now, tokens.USE_NOTED_S):
            return
        self._noted[identity.token_id] = now
        try:
            await asyncio.to_thread(tokens.note_use, self._context, identity.token_id)
        except PipeplanError as error:
            LOG.warning("the last use of a token could not be noted: %s", error)

    async def _of(
        self,
        credential: Credential | None,
        look_up: Callable[[Context, TokenKey, str], Known | None],
        may_look: Callable[[], None],
    ) -> Identity | None:
        if credential is None:
            return None
        key = await self._token_key()
        known = await self._known(credential, key, look_up, may_look)
        if known is None or not key.proves(credential.secret, known.secret_hash):
            return None
        if known.expires_at is not None and known.expires_at <= self._context.now():
            return None
        return known.identity

    async def _known(
        self,
        credential: Credential,
        key: TokenKey,
        look_up: Callable[[Context, TokenKey, str], Known | None],
        may_look: Callable[[], None],
    ) -> Known | None:
        read = self._read.get(credential.id)
        if read is not None and _within(read.at, self._context.now(), KNOWN_FOR_S):
            return read.known
        if read is None:
            may_look()
        task = self._under_way.get(credential.id)
        if task is None:
            task = asyncio.create_task(self._look(credential.id, key, look_up))
            self._under_way[credential.id] = task
            task.add_done_callback(lambda _: self._under_way.pop(credential.id, None))
        return await asyncio.shield(task)

    async def _look(
        self, identity: str, key: TokenKey, look_up: Callable[[Context, TokenKey, str], Known | None]
    ) -> Known | None:
        at = self._context.now()
        known = await asyncio.to_thread(look_up, self._context, key, identity)
        self._read.pop(identity, None)
        if known is not None:
            if len(self._read) >= MAX_KNOWN:
                self._read.clear()
            self._read[identity] = _Read(known, at)
        return known

    async def _token_key(self) -> TokenKey:
        if self._key is None:
            self._key = await asyncio.to_thread(token_key, self._context)
        return self._key


def _within(moment: datetime | None, now: datetime, duration_s: float) -> bool:
    return moment is not None and timedelta(0) <= now - moment < timedelta(seconds=duration_s)
