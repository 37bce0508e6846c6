"""Uses a client that openapi-python-client has made, in that client's environment: every operation of the API, once.

python generated_client.py URL TOKEN IDS: IDS are those of jobs and runs that have ended, as JSON. The package
`pipeplan_api` must be importable. It ends with a traceback at the first answer that the client does not understand.
"""

import enum
import importlib
import json
import sys
import typing
from collections.abc import Iterator
from datetime import datetime
from typing import Any

PACKAGE = "pipeplan_api"
AGENT = "node-1"


class Calls:
    """The generated functions by the ids of their operations, and which of them were called."""

    def __init__(self, url: str, token: str) -> None:
        self.client = importlib.import_module(f"{PACKAGE}.client").AuthenticatedClient(base_url=url, token=token)
        paths = self.client.get_httpx_client().get("/openapi.json").json()["paths"]
        self.described = {
            operation["operationId"]: operation | {"method": method}
            for operations in paths.values()
            for method, operation in operations.items()
        }
        self.called: set[str] = set()

    def example(self, name: str, which: str | None = None) -> Any:
        """The description's example of a request."""
        content = self.described[name]["requestBody"]["content"]["application/json"]
        examples = content["examples"]
        return examples[which or next(iter(examples))]["value"]

    def __call__(self, name: str, /, **given: Any) -> Any:
        """What the operation's function has read from the answer, which says the same as the answer's text."""
        response = self.answer(name, given)
        status = int(response.status_code)
        if status == 204:
            return None
        assert 200 <= status < 300, f"{name}: {status} {response.content.decode()}"
        parsed = response.parsed
        if isinstance(parsed, str):
            assert parsed == response.content.decode(), name
        else:
            assert parsed is not None, f"{name}: nothing is read from {response.content[:200]!r}"
            assert _alike(parsed.to_dict(), json.loads(response.content)), f"{name}: {parsed}"
        return parsed

    def refused(self, name: str, /, **given: Any) -> Any:
        """The problem that the operation's function has read."""
        response = self.answer(name, given)
        assert int(response.status_code) >= 400 and response.parsed is not None, name
        assert _alike(response.parsed.to_dict(), json.loads(response.content)), name
        return response.parsed

    def answer(self, name: str, given: dict[str, Any]) -> Any:
        """The answer of the operation's function."""
        self.called.add(name)
        module = importlib.import_module(f"{PACKAGE}.api.{self.described[name]['tags'][0]}.{name}")
        hints = typing.get_type_hints(module.sync_detailed)
        arguments = {key: _as(hints[key], value) for key, value in given.items()}
        return module.sync_detailed(client=self.client, **arguments)


def _as(hint: Any, value: Any) -> Any:
    """The value as the function takes it: a model, a member of an enumeration, or as it is."""
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if isinstance(kind, type)]
    if isinstance(value, dict):
        return next(_models(kinds, value))
    enums = [kind for kind in kinds if issubclass(kind, enum.Enum)]
    return enums[0](value) if enums else value


def _models(kinds: list[type], value: dict[str, Any]) -> Iterator[Any]:
    """The value as each of the models that it fits."""
    for kind in kinds:
        try:
            model = kind.from_dict(value)  # type: ignore[attr-defined]
            if _alike(model.to_dict() | value, model.to_dict()):
                yield model
        except (AttributeError, KeyError, TypeError, ValueError):
            continue


def _alike(one: Any, other: Any) -> bool:
    """Whether two documents say the same; moments may be written in several ways."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, str) and isinstance(other, str) and one != other:
        return datetime.fromisoformat(one) == datetime.fromisoformat(other)
    return bool(one == other)


def use(call: Calls, ids: dict[str, list[str]]) -> None:
    """Every operation: those that change something first, then those that read."""
    profile = call("create_profile", body=call.example("create_profile")).id
    cluster = call("create_cluster", body=call.example("create_cluster")).id
    asked = call.example("create_plan")
    plans = [call("create_plan", body=asked | {"batch_size": size}).id for size in (16, 32)]
    assert call("create_plan", body=asked | {"cluster_id": cluster, "profile_id": profile}).id == plans[0]
    huge = call.example("create_profile")
    huge["blocks"][0]["weight_bytes"] = 2**50
    refused = asked | {"profile_id": call("create_profile", body=huge).id}
    assert call("create_plan", body=refused).reasons, "no plan fits"
    assert call("create_plan", body=asked | {"batch_size": 48}, prefer="respond-async").task.kind == "plan", "a job"
    assert call.refused("get_plan", plan_id="0" * 32).status == 404
    assert call.refused("create_plan", body=asked | {"batch_size": 0}).errors[0].field == "batch_size"
    alias = call("put_alias", name="team/gpt-prod", body={"plan_id": plans[0]})
    call("put_alias", name="passing", body={"plan_id": plans[1]})
    call("delete_alias", name="passing")
    token = call("create_token", body=call.example("create_token")).id
    call("revoke_token", token_id=token)
    agent = call("register_agent", body=call.example("register_agent")).id
    call("heartbeat_agent", agent_id=agent, body=call.example("heartbeat_agent"))
    _work(call)

    known: dict[str, Any] = {
        "profile_id": profile,
        "cluster_id": cluster,
        "plan_id": plans[0],
        "job_id": ids["job_id"][0],
        "run_id": ids["run_id"][0],
        "agent_id": agent,
        "token_id": token,
        "name": alias.name,
        "model": call("get_profile", profile_id=profile).model.name,
        "prefix": profile[:6],
    }
    several = {"compare_plans": plans, "get_calibration": ids["run_id"]}
    for name, operation in call.described.items():
        if operation["method"] == "get":
            wanted = [each for each in operation.get("parameters", ()) if each["required"]]
            call(name, **{each["name"]: _value(each, known | {"id": several.get(name)}) for each in wanted})
    listed = call("list_plans", content=True).items
    assert {one.id for one in listed} >= set(plans), "the list of whole plans"
    assert call.called == set(call.described), set(call.described) - call.called


def _work(call: Calls) -> None:
    """An agent's jobs: one is completed, one fails and is enqueued again, one is handed back."""
    for ending in ("complete_job", "fail_job", "release_job"):
        job = call("enqueue_job", body=call.example("enqueue_job")).id
        while True:
            lease = call("lease_job", body={"agent": AGENT})
            token = {"token": lease.token}
            if lease.job.id == job:
                break
            call("fail_job", job_id=lease.job.id, body=call.example("fail_job") | token)
        call("heartbeat_job", job_id=job, body=call.example("heartbeat_job") | token)
        call(ending, job_id=job, body=call.example(ending) | token)
        if ending == "fail_job":
            call("retry_job", job_id=job)
        if ending != "complete_job":
            call("cancel_job", job_id=job)


def _value(parameter: dict[str, Any], known: dict[str, Any]) -> Any:
    """What a parameter that must be given gets: what is known to be there, or the first value that it may have."""
    found = known.get(parameter["name"])
    return parameter["schema"]["enum"][0] if found is None else found


if __name__ == "__main__":
    use(Calls(*sys.argv[1:3]), json.loads(sys.argv[3]))
