"""The service's clients: documents and errors of the library in and out.

`Client` blocks, `AsyncClient` is awaited; both have every operation of `client.operations`, with the same arguments.
"""

import inspect
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_args, get_origin, overload

import httpx

from pipeplan.client.connection import TIMEOUT_S, AsyncConnection, Connection, RetryClock
from pipeplan.client.exchange import Steps, service_url
from pipeplan.client.operations import Operations
from pipeplan.client.reading import AsyncItems, Following, Items, Pages, follow, follow_async
from pipeplan.errors import InvalidInputError, require
from pipeplan.protocol.runs import Event

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")

PATIENCE_S = 10.0
"""For how long a request that is safe to repeat is sent again."""


class _Method(Generic[P, B, A]):
    """An operation as a method of both clients, which returns a B of `Client` and an A of `AsyncClient`."""

    def __init__(self, operation: Callable[Concatenate[Operations, P], object]) -> None:
        self._operation = operation
        self._made: dict[object, Callable[..., Any]] = {}

    @overload
    def __get__(self, client: "Client", owner: object) -> Callable[P, B]: ...
    @overload
    def __get__(self, client: "AsyncClient", owner: object) -> Callable[P, A]: ...
    def __get__(self, client: Any, owner: Any) -> Any:
        if owner not in self._made:
            operation = self._operation

            def method(client: Any, /, *args: Any, **kwargs: Any) -> Any:
                made: Any = operation(client.operations, *args, **kwargs)
                if isinstance(made, Pages):
                    return client._items(client.connection, made)
                if isinstance(made, Following):
                    return client._follow(client.connection, made)
                return client.connection.run(made)

            signature = inspect.signature(operation)
            kind, blocking = signature.return_annotation, issubclass(owner, Client)
            result: Any = Iterator[Event] if blocking else AsyncIterator[Event]
            if kind is not Following:
                result = None if get_args(kind)[-1] is type(None) else get_args(kind)[-1]
            if get_origin(kind) is Pages:
                result = Items[result] if blocking else AsyncItems[result]
            method.__name__, method.__doc__ = operation.__name__, operation.__doc__
            method.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
            self._made[owner] = method
        return self._made[owner] if client is None else MethodType(self._made[owner], client)


@overload
def _method(operation: Callable[Concatenate[Operations, P], Steps[T]]) -> _Method[P, T, Coroutine[Any, Any, T]]: ...
@overload
def _method(operation: Callable[Concatenate[Operations, P], Pages[T]]) -> _Method[P, Items[T], AsyncItems[T]]: ...
@overload
def _method(
    operation: Callable[Concatenate[Operations, P], Following],
) -> _Method[P, Iterator[Event], AsyncIterator[Event]]: ...
def _method(operation: Any) -> Any:
    return _Method(operation)


class _Methods:
    """The operations, as methods of both clients."""

    ready = _method(Operations.ready)
    whoami = _method(Operations.whoami)
    create_profile = _method(Operations.create_profile)
    profile = _method(Operations.profile)
    profile_id = _method(Operations.profile_id)
    profiles = _method(Operations.profiles)
    create_cluster = _method(Operations.create_cluster)
    cluster = _method(Operations.cluster)
    cluster_id = _method(Operations.cluster_id)
    clusters = _method(Operations.clusters)
    create_plan = _method(Operations.create_plan)
    plan = _method(Operations.plan)
    plan_id = _method(Operations.plan_id)
    plan_request = _method(Operations.plan_request)
    plans = _method(Operations.plans)
    compare_plans = _method(Operations.compare_plans)
    plan_alternatives = _method(Operations.plan_alternatives)
    export_plan = _method(Operations.export_plan)
    plan_streams = _method(Operations.plan_streams)
    plan_timeline = _method(Operations.plan_timeline)
    plan_trace = _method(Operations.plan_trace)
    set_alias = _method(Operations.set_alias)
    alias = _method(Operations.alias)
    aliases = _method(Operations.aliases)
    alias_history = _method(Operations.alias_history)
    delete_alias = _method(Operations.delete_alias)
    enqueue_job = _method(Operations.enqueue_job)
    job = _method(Operations.job)
    jobs = _method(Operations.jobs)
    cancel_job = _method(Operations.cancel_job)
    retry_job = _method(Operations.retry_job)
    wait_for_job = _method(Operations.wait_for_job)
    follow_job = _method(Operations.follow_job)
    run = _method(Operations.run)
    runs = _method(Operations.runs)
    run_timeline = _method(Operations.run_timeline)
    calibration = _method(Operations.calibration)
    run_trace = _method(Operations.run_trace)
    follow_run = _method(Operations.follow_run)
    agents = _method(Operations.agents)
    audit = _method(Operations.audit)


class Client(_Methods):
    """A service by its URL. Every method raises the error that the service reports, ServiceError if out of reach.

    `url` and `token` are those of the environment unless given: `PIPEPLAN_URL`, else http://127.0.0.1:8437;
    `PIPEPLAN_TOKEN`, or the content of the file that `PIPEPLAN_TOKEN_FILE` names. An empty token is none.

    A request that gets no answer within `timeout_s` is given up. Requests that are safe to repeat are sent again for up
    to `patience_s`: after a broken connection, and after an answer that asks to retry, once its Retry-After has passed.
    Every POST has an idempotency key. Answers with an entity tag are cached, and not transferred again while they are
    the same. An answer that is not the service's, such as a proxy's page, is a ServiceError. A certificate that is not
    trusted is one as well, without a retry; `SSL_CERT_FILE` names the trusted authorities. Several threads may use a
    client. A closed client sends nothing.
    """

    _items, _follow = Items, staticmethod(follow)

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = PATIENCE_S,
        transport: httpx.BaseTransport | None = None,
        clock: RetryClock | None = None,
    ) -> None:
        self.connection = Connection(
            url=service_url() if url is None else url,
            token=_token(token),
            transport=transport,
            clock=clock or RetryClock(),
            timeout_s=timeout_s,
            patience_s=patience_s,
        )
        self.operations = Operations(self.connection.exchange)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        self.connection.close()


class AsyncClient(_Methods):
    """The same for programs that await. `Client` describes the arguments.

    Methods that return one thing are awaited, lists and events are read with `async for`.
    """

    _items, _follow = AsyncItems, staticmethod(follow_async)

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = PATIENCE_S,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: RetryClock | None = None,
    ) -> None:
        self.connection = AsyncConnection(
            url=service_url() if url is None else url,
            token=_token(token),
            transport=transport,
            clock=clock or RetryClock(),
            timeout_s=timeout_s,
            patience_s=patience_s,
        )
        self.operations = Operations(self.connection.exchange)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.connection.close()


def _token(given: str | None) -> str | None:
    """The given token, or that of the environment, as text or in a file. No error shows its text."""
    if given is not None:
        return given.strip() or None
    token, path = os.environ.get("PIPEPLAN_TOKEN"), os.environ.get("PIPEPLAN_TOKEN_FILE")
    require(not (token and path), "token", "must be set by PIPEPLAN_TOKEN or PIPEPLAN_TOKEN_FILE, not by both", path)
    if not path:
        return token or None
    try:
        read = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError("PIPEPLAN_TOKEN_FILE", "must name a readable text file", path) from error
    require(bool(read), "PIPEPLAN_TOKEN_FILE", "must name a file that holds a token", path)
    return read
