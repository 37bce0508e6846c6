"""Both clients with a real service: the reference's example, short ids, and events that are awaited."""

import asyncio
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeplan import AsyncClient, Client, save
from pipeplan.errors import InvalidInputError, NotFoundError
from planner_service.overview.openapi import CLUSTER, PLAN_REQUEST, PROFILE
from tests.planner_service.clients.services import Scripted, Time, asked_of, problem
from tests.planner_service.examples import PROFILE_TASK
from tests.planner_service.servers import served

REFERENCE = Path(__file__).parents[3] / "docs" / "client.md"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service."""
    with served(tmp_path_factory.mktemp("service") / "service.sqlite3") as address:
        yield address


def test_the_references_example_works(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.findall(r"```python\n(from.*?)```", REFERENCE.read_text(encoding="utf-8"), re.DOTALL)[0]
    save(replace(PROFILE, device=replace(PROFILE.device, name="unknown")), tmp_path / "profile.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPEPLAN_URL", url)
    seen: dict[str, Any] = {}
    exec(example, seen)
    with Client(url) as service:
        assert service.alias("gpt-prod").plan_id == seen["answer"].plan_id == seen["plan"].id


def test_the_references_example_that_awaits_works(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.findall(r"```python\n(from.*?)```", REFERENCE.read_text(encoding="utf-8"), re.DOTALL)[1]
    monkeypatch.setenv("PIPEPLAN_URL", url)
    with Client(url) as service:
        service.create_profile(PROFILE)
        service.create_cluster(CLUSTER)
        plan_id = service.create_plan(PLAN_REQUEST).plan_id
        assert plan_id is not None
        service.set_alias("gpt-prod", plan_id)
        job_id = service.enqueue_job(PROFILE_TASK).id
        service.cancel_job(job_id)
    statement, rest = example.split("\n\n", 1)
    body = textwrap.indent(rest.replace('"..."', repr(job_id)), "    ")
    seen: dict[str, Any] = {}
    exec(f"{statement}\nasync def main():\n{body}\n    return plan", seen)
    assert asyncio.run(seen["main"]()).throughput_samples_per_s > 0


def test_a_plan_is_found_by_id_alias_and_the_head_of_its_id(url: str) -> None:
    with Client(url) as service:
        profile, cluster = service.create_profile(PROFILE).id, service.create_cluster(CLUSTER).id
        assert (service.profile_id(profile[:8]), service.cluster_id(cluster[:4])) == (profile, cluster)
        ids = []
        for batch_size in (4, 8, 12):
            request = PLAN_REQUEST.model_copy(update={"batch_size": batch_size})
            ids.append(str(service.create_plan(request).plan_id))
        plan_id = ids[0]
        assert {service.plan_id(plan_id[:length]) for length in (10, 31, 32)} == {plan_id}
        service.set_alias(plan_id[:10], ids[1])
        assert service.plan_id(plan_id[:10]) == ids[1], "an alias goes before the beginning of an id"
        service.delete_alias(plan_id[:10])
        for unknown in ("0000000", "nothing", "abc", "A" * 32, "../x"):
            with pytest.raises(NotFoundError, match=f"there is no plan {unknown}"):
                service.plan_id(unknown)
        assert service.plan_request(plan_id) == PLAN_REQUEST.model_copy(update={"batch_size": 4})


def test_heads_of_several_ids_are_refused_with_their_names() -> None:

    for more, end in ((False, "got 'abcd'"), (True, ", and more")):
        matches = httpx.Response(200, json={"ids": ["abcd1", "abcd2"], "more": more})
        ask = asked_of(Client, Scripted(problem(404, "not-found"), matches), Time())
        with pytest.raises(
            InvalidInputError, match="the prefix of one plan's id, and is that of abcd1, abcd2"
        ) as caught:
            ask("plan_id", "abcd")
        assert end in str(caught.value)


def test_what_blocks_and_what_is_awaited_find_the_same(url: str) -> None:
    async def main() -> tuple[list[Any], list[str]]:
        async with AsyncClient(url) as service:
            await service.ready()
            await service.create_profile(PROFILE)
            job = await service.enqueue_job(PROFILE_TASK)
            following = service.follow_job(job.id)
            events = [await anext(following)]
            await service.cancel_job(job.id)
            events += [event async for event in following]
            with pytest.raises(NotFoundError):
                await service.plan("0" * 32)
            return [event.kind for event in events], [one.id async for one in service.profiles()]

    kinds, profiles = asyncio.run(main())
    assert (kinds[0], kinds[-1]) == ("queued", "cancelled")
    with Client(url) as service:
        assert [one.id for one in service.profiles()] == profiles
        job_id = next(service.jobs(limit=1)).id
        assert [event.kind for event in service.follow_job(job_id)] == kinds
        assert service.whoami().name == "local"
