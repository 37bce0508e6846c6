"""The service's clients: documents and errors of the library in and out.

`Client` blocks, `AsyncClient` is awaited; both have every operation of `client.operations`, with the same arguments.
"""

import inspect
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args

import httpx

from pipeplan.client.connection import TIMEOUT_S, AsyncConnection, Connection, RetryClock
from pipeplan.client.exchange import Steps, service_url
from pipeplan.client.operations import Operations
from pipeplan.client.reading import AsyncItems, Following, Items, Pages, follow, follow_async
from pipeplan.errors import InvalidInputError, require
from pipeplan.protocol.runs import Event

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE_S = 10.0
"""For how long a request that is safe to repeat is sent again."""


def _named(method: Callable[..., Any], operation: Callable[..., Any], result: Any) -> None:
    """Gives a client's method the name, the arguments and the docstring of the operation, and what it returns."""
    method.__name__, method.__doc__ = operation.__name__, operation.__doc__
    signature = inspect.signature(operation).replace(return_annotation=result)
    method.__signature__ = signature  # type: ignore[attr-defined]


def _result(operation: Callable[..., Any]) -> Any:
    """The result type of an operation's steps, or of its pages' items."""
    kind = get_args(inspect.signature(operation).return_annotation)[-1]
    return None if kind is type(None) else kind


def _blocking(operation: Callable[Concatenate[Operations, P], Steps[T]]) -> "Callable[Concatenate[Client, P], T]":
    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.connection.run(operation(self.operations, *args, **kwargs))

    _named(method, operation, _result(operation))
    return method


def _listed(operation: Callable[Concatenate[Operations, P], Pages[T]]) -> "Callable[Concatenate[Client, P], Items[T]]":
    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> Items[T]:
        return Items(self.connection, operation(self.operations, *args, **kwargs))

    _named(method, operation, Items[_result(operation)])  # type: ignore[misc]
    return method


def _followed(
    operation: Callable[Concatenate[Operations, P], Following],
) -> "Callable[Concatenate[Client, P], Iterator[Event]]":
    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Event]:
        return follow(self.connection, operation(self.operations, *args, **kwargs))

    _named(method, operation, Iterator[Event])
    return method


def _awaited(
    operation: Callable[Concatenate[Operations, P], Steps[T]],
) -> "Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]":
    async def method(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.connection.run(operation(self.operations, *args, **kwargs))

    _named(method, operation, _result(operation))
    return method


def _listed_async(
    operation: Callable[Concatenate[Operations, P], Pages[T]],
) -> "Callable[Concatenate[AsyncClient, P], AsyncItems[T]]":
    def method(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> AsyncItems[T]:
        return AsyncItems(self.connection, operation(self.operations, *args, **kwargs))

    _named(method, operation, AsyncItems[_result(operation)])  # type: ignore[misc]
    return method


def _followed_async(
    operation: Callable[Concatenate[Operations, P], Following],
) -> "Callable[Concatenate[AsyncClient, P], AsyncIterator[Event]]":
    def method(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[Event]:
        return follow_async(self.connection, operation(self.operations, *args, **kwargs))

    _named(method, operation, AsyncIterator[Event])
    return method


class Client:
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
            url=_url(url),
            token=_token(token),
            transport=transport,
            clock=clock or RetryClock(),
            timeout_s=timeout_s,
            patience_s=patience_s,
        )
        self.operations = Operations(self.connection.exchange)

    def __enter__(self) -> "Client":
        """The client itself; it is closed with the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Ends the connection."""
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self.connection.close()

    ready = _blocking(Operations.ready)
    whoami = _blocking(Operations.whoami)
    create_profile = _blocking(Operations.create_profile)
    profile = _blocking(Operations.profile)
    profile_id = _blocking(Operations.profile_id)
    profiles = _listed(Operations.profiles)
    create_cluster = _blocking(Operations.create_cluster)
    cluster = _blocking(Operations.cluster)
    cluster_id = _blocking(Operations.cluster_id)
    clusters = _listed(Operations.clusters)
    create_plan = _blocking(Operations.create_plan)
    plan = _blocking(Operations.plan)
    plan_id = _blocking(Operations.plan_id)
    plan_request = _blocking(Operations.plan_request)
    plans = _listed(Operations.plans)
    compare_plans = _blocking(Operations.compare_plans)
    plan_alternatives = _blocking(Operations.plan_alternatives)
    export_plan = _blocking(Operations.export_plan)
    plan_streams = _blocking(Operations.plan_streams)
    plan_timeline = _blocking(Operations.plan_timeline)
    plan_trace = _blocking(Operations.plan_trace)
    set_alias = _blocking(Operations.set_alias)
    alias = _blocking(Operations.alias)
    aliases = _listed(Operations.aliases)
    alias_history = _listed(Operations.alias_history)
    delete_alias = _blocking(Operations.delete_alias)
    enqueue_job = _blocking(Operations.enqueue_job)
    job = _blocking(Operations.job)
    jobs = _listed(Operations.jobs)
    cancel_job = _blocking(Operations.cancel_job)
    retry_job = _blocking(Operations.retry_job)
    wait_for_job = _blocking(Operations.wait_for_job)
    follow_job = _followed(Operations.follow_job)
    run = _blocking(Operations.run)
    runs = _listed(Operations.runs)
    run_timeline = _blocking(Operations.run_timeline)
    calibration = _blocking(Operations.calibration)
    run_trace = _blocking(Operations.run_trace)
    follow_run = _followed(Operations.follow_run)
    agents = _listed(Operations.agents)
    audit = _listed(Operations.audit)


class AsyncClient:
    """The same for programs that await. `Client` describes the arguments.

    Methods that return one thing are awaited, lists and events are read with `async for`.
    """

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
            url=_url(url),
            token=_token(token),
            transport=transport,
            clock=clock or RetryClock(),
            timeout_s=timeout_s,
            patience_s=patience_s,
        )
        self.operations = Operations(self.connection.exchange)

    async def __aenter__(self) -> "AsyncClient":
        """The client itself; it is closed with the block."""
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Ends the connection."""
        await self.close()

    async def close(self) -> None:
        """Ends the connection."""
        await self.connection.close()

    ready = _awaited(Operations.ready)
    whoami = _awaited(Operations.whoami)
    create_profile = _awaited(Operations.create_profile)
    profile = _awaited(Operations.profile)
    profile_id = _awaited(Operations.profile_id)
    profiles = _listed_async(Operations.profiles)
    create_cluster = _awaited(Operations.create_cluster)
    cluster = _awaited(Operations.cluster)
    cluster_id = _awaited(Operations.cluster_id)
    clusters = _listed_async(Operations.clusters)
    create_plan = _awaited(Operations.create_plan)
    plan = _awaited(Operations.plan)
    plan_id = _awaited(Operations.plan_id)
    plan_request = _awaited(Operations.plan_request)
    plans = _listed_async(Operations.plans)
    compare_plans = _awaited(Operations.compare_plans)
    plan_alternatives = _awaited(Operations.plan_alternatives)
    export_plan = _awaited(Operations.export_plan)
    plan_streams = _awaited(Operations.plan_streams)
    plan_timeline = _awaited(Operations.plan_timeline)
    plan_trace = _awaited(Operations.plan_trace)
    set_alias = _awaited(Operations.set_alias)
    alias = _awaited(Operations.alias)
    aliases = _listed_async(Operations.aliases)
    alias_history = _listed_async(Operations.alias_history)
    delete_alias = _awaited(Operations.delete_alias)
    enqueue_job = _awaited(Operations.enqueue_job)
    job = _awaited(Operations.job)
    jobs = _listed_async(Operations.jobs)
    cancel_job = _awaited(Operations.cancel_job)
    retry_job = _awaited(Operations.retry_job)
    wait_for_job = _awaited(Operations.wait_for_job)
    follow_job = _followed_async(Operations.follow_job)
    run = _awaited(Operations.run)
    runs = _listed_async(Operations.runs)
    run_timeline = _awaited(Operations.run_timeline)
    calibration = _awaited(Operations.calibration)
    run_trace = _awaited(Operations.run_trace)
    follow_run = _followed_async(Operations.follow_run)
    agents = _listed_async(Operations.agents)
    audit = _listed_async(Operations.audit)


def _url(given: str | None) -> str:
    """The given URL, or that of the environment."""
    return given if given is not None else service_url()


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
