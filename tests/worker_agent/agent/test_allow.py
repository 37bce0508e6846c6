"""What jobs may name: built-in factories and those of the operator's list, nothing that their modules hold besides."""

import sqlite3
import threading
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from fastapi.testclient import TestClient

from pipeplan.client.exchange import DEFAULT_URL
from pipeplan.errors import InvalidInputError
from pipeplan.protocol.jobs import Job, ProfileTask, RunTask, allows
from planner_service.app import create_app
from planner_service.platform.settings import Settings
from tests.waiting import wait_until
from worker_agent.agent import settings
from worker_agent.agent.agent import NodeAgent
from worker_agent.agent.client import AgentClient
from worker_agent.agent.settings import (
    BUILT_IN,
    AgentSettings,
    load_settings,
    require_allowed,
    require_allowed_schedule,
)
from worker_agent.models.spec import load_factory, parse_spec

MLP = "worker_agent.models.presets:mlp?width=8"
DATA = "worker_agent.models.text:random_tokens?vocab_size=10"


def running(*, model: str = MLP, data: str = DATA, loss: str | None = None) -> RunTask:
    """A task that names these."""
    return RunTask(plan_id="p", model=model, data=data, loss=loss, steps=1)


def refusal(task: ProfileTask | RunTask, *allow: str) -> InvalidInputError | None:
    """Why the task is refused; None if it is not."""
    try:
        require_allowed(task, allow)
    except InvalidInputError as error:
        return error
    return None


@pytest.mark.parametrize("model", ["hf:gpt2?n_layer=2", MLP, "worker_agent.models.presets:sleep"])
def test_what_is_built_in_passes_without_a_list(model: str) -> None:
    assert refusal(ProfileTask(model=model, microbatch_sizes=(1,))) is None
    assert refusal(running(model=model, loss="worker_agent.models.losses:mean_of_squares")) is None


@pytest.mark.parametrize("name", [name for name in BUILT_IN if not name.endswith("*")])
def test_every_built_in_factory_is_one_of_our_own(name: str) -> None:
    factory = load_factory(parse_spec(name, field="model"), field="model")
    assert factory.__module__ == name.partition(":")[0]


@pytest.mark.parametrize("pattern", ["mine.models:tiny", "mine.models:*", "mine.*", "mine.models:t*", "*"])
def test_an_operators_pattern_passes_with_any_options(pattern: str) -> None:
    assert refusal(running(model="mine.models:tiny?width=8&path=a.b:c"), "other:*", pattern) is None


@pytest.mark.parametrize(
    "pattern", ["mine.models:tin", "mine.models:tiny2", "mine:*", "models:*", "mine.models:[t]iny"]
)
def test_an_operators_pattern_allows_nothing_else(pattern: str) -> None:
    assert refusal(running(model="mine.models:tiny"), pattern) is not None


@pytest.mark.parametrize("field", ["model", "data", "loss"])
def test_anything_else_is_refused_naming_field_rule_and_value(field: str) -> None:
    error = refusal(running(**{field: "os:system?command=true"}), "mine.*")
    assert error is not None
    assert (error.field, error.value) == (field, "os:system?command=true")
    assert "must be a factory that this agent's operator allows" in error.rule


@pytest.mark.parametrize(
    "spec",
    [
        "worker_agent.models.hugging_face:os.system",
        "worker_agent.models.spec:importlib.import_module",
        "worker_agent.models.presets:torch.hub.load",
        "worker_agent.models.spec:call_factory",
    ],
)
def test_what_our_own_modules_import_is_not_built_in(spec: str) -> None:
    """A pattern over our modules once let a job name os.system."""
    assert refusal(running(model=spec)) is not None


@pytest.mark.parametrize("spec", ["hf:/home/other/config.json", "hf:config.json?n_layer=2", "hf:../config.json"])
def test_a_nodes_files_are_not_built_in(spec: str) -> None:
    assert refusal(running(model=spec)) is not None
    assert refusal(running(model=spec), spec.partition("?")[0]) is None


@pytest.mark.parametrize("spec", ["hf:./folder", "hf:/home/other", "hf:%2Fhome%2Fother%2Fconfig%2Ejson", "hf:a%2Fb"])
def test_a_path_is_not_built_in_however_it_is_written(spec: str) -> None:
    assert refusal(running(model=spec)) is not None


def in_folder(folder: Path, path: object) -> InvalidInputError | None:
    """Why a path is refused where the operator allows a folder; None if it is not."""
    try:
        require_allowed(running(model=f"hf:{quote(str(path))}?n_layer=2"), (), folder)
    except InvalidInputError as error:
        return error
    return None


def test_paths_in_the_operators_folder_are_allowed_and_no_others(tmp_path: Path) -> None:
    folder, outside = tmp_path / "my models", tmp_path / "my models too"
    for where in (folder / "a" / "b", outside):
        where.mkdir(parents=True)
        (where / "config.json").write_text("{}")
    for within in (folder / "a", folder / "a" / "b", folder / "a" / "b" / "config.json", folder / "absent"):
        assert in_folder(folder, within) is None
    for path in (
        outside,
        outside / "config.json",
        folder / ".." / "my models too",
        folder / "a/../../x",
        "a/b",
        folder,
    ):
        error = in_folder(folder, path)
        assert error is not None and error.field == "model" and "--models-dir" in error.rule
    assert refusal(running(model=f"hf:{quote(str(folder))}/a")) is not None


def test_a_link_out_of_the_operators_folder_is_refused_and_one_within_is_not(tmp_path: Path) -> None:
    folder, outside = tmp_path / "models", tmp_path / "outside"
    for where in (folder / "real", folder / "linked", outside):
        where.mkdir(parents=True)
        (where / "config.json").write_text("{}")
    (folder / "out").symlink_to(outside)
    (folder / "real" / "model.safetensors").symlink_to(folder / "linked" / "config.json")
    (folder / "linked" / "model.safetensors").symlink_to(outside / "config.json")
    assert in_folder(folder, folder / "real") is None
    for path in (folder / "out", folder / "out" / "config.json", folder / "linked"):
        error = in_folder(folder, path)
        assert error is not None and "no links out of it" in error.rule


def test_an_agent_reports_its_folder_and_the_service_goes_by_it(tmp_path: Path) -> None:
    allowed = AgentSettings(models_dir=tmp_path).allowed
    assert allows(allowed, f"hf:{tmp_path}/a/b") and not allows(allowed, f"hf:{tmp_path}/../b")
    assert not allows(AgentSettings().allowed, f"hf:{tmp_path}/a/b")


@pytest.mark.parametrize("folder", ["models", "/", "/absent/models"])
def test_a_folder_of_models_must_be_there(folder: str) -> None:
    with pytest.raises(InvalidInputError, match=r"models_dir|MODELS_DIR"):
        load_settings(models_dir=Path(folder))


def test_an_operator_may_allow_a_path_with_a_space() -> None:
    assert refusal(running(model="hf:/my%20models/config.json"), "hf:/my%20models/config.json") is None


@pytest.mark.parametrize("pattern", ["mine.*\n", "a b:c", "mine.models:tiny?depth=2", "*:tiny", "mine", ""])
def test_a_pattern_that_no_spec_could_match_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidInputError, match="allow"):
        load_settings(allow=(pattern,))


def test_a_job_from_before_the_grammar_is_refused_with_its_rule() -> None:
    error = refusal(running(model="mine:tiny\nreboot"), "mine:*")
    assert error is not None
    assert str(error).startswith("model: must hold printable characters and no spaces")


def test_a_pattern_reaches_no_further_than_a_modules_own_names() -> None:
    assert refusal(running(model="mine.models:os.system"), "mine.models:*", "mine.*") is not None
    assert refusal(running(model="mine.models:Tiny.make"), "mine.models:Tiny.*") is None


def test_the_list_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEPLAN_AGENT_ALLOW", '["mine.*", "other:tiny"]')
    assert load_settings().allow == ("mine.*", "other:tiny")
    assert load_settings(allow=("third:*",)).allow == ("third:*",)


def test_an_agent_serves_the_service_of_its_clients_unless_it_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().url == DEFAULT_URL
    monkeypatch.setenv("PIPEPLAN_URL", "http://127.0.0.1:2")
    assert load_settings().url == "http://127.0.0.1:2"
    monkeypatch.setenv("PIPEPLAN_AGENT_URL", "http://127.0.0.1:3")
    assert load_settings().url == "http://127.0.0.1:3"
    assert load_settings(url="http://127.0.0.1:4").url == "http://127.0.0.1:4"


def test_a_list_in_the_environment_that_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEPLAN_AGENT_ALLOW", "mine.*")
    with pytest.raises(
        InvalidInputError, match=r"PIPEPLAN_AGENT_ALLOW: must be a JSON list such as .*, got 'mine\.\*'"
    ):
        load_settings()


class _Into(httpx.BaseTransport):
    """Hands requests to a started application."""

    def __init__(self, service: TestClient) -> None:
        self._service = service

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._service.request(
            request.method, request.url.raw_path.decode(), content=request.read(), headers=dict(request.headers)
        )
        return httpx.Response(answer.status_code, content=answer.content)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[TestClient]:
    """The real application on a database of its own. It gives up no job before a lease's length after its start."""
    settings = Settings(database_url=f"sqlite:///{tmp_path / 'service.sqlite3'}", lease_s=1.0)
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as client:
        yield client


def _served(service: TestClient, work_dir: Path, job_id: str) -> tuple[Job, list[str]]:
    """The job once it has ended, and what an agent said that served until then."""
    said: list[str] = []
    client = AgentClient("http://127.0.0.1", transport=_Into(service))
    agent = NodeAgent(AgentSettings(work_dir=work_dir, poll_s=0.01), client, said.append)
    serving = threading.Thread(target=agent.serve)
    serving.start()
    try:
        wait_until(lambda: _job(service, job_id).state not in ("queued", "leased"))
    finally:
        agent.stop()
        serving.join()
        client.close()
    return _job(service, job_id), said


def _job(service: TestClient, job_id: str) -> Job:
    return Job.model_validate_json(service.get(f"/v1/jobs/{job_id}").content)


def test_a_job_that_no_agent_allows_ends_as_failed_with_that_sentence(service: TestClient, tmp_path: Path) -> None:
    task = ProfileTask(model="os:system?command=true", microbatch_sizes=(1,))
    job_id = service.post("/v1/jobs", json=task.model_dump(mode="json")).json()["id"]
    job, said = _served(service, tmp_path / "work", job_id)
    assert (job.state, job.error, job.attempts) == ("failed", str(refusal(task)), 0)
    assert not any("job" in line for line in said)


def test_an_agent_that_is_given_such_a_job_all_the_same_refuses_it(service: TestClient, tmp_path: Path) -> None:
    """The agent does not rely on the service."""
    task = ProfileTask(model="os:system?command=true", microbatch_sizes=(1,))
    job_id = service.post("/v1/jobs", json=task.model_dump(mode="json")).json()["id"]
    with sqlite3.connect(tmp_path / "service.sqlite3") as database:
        database.execute("UPDATE jobs SET needs_id = 'any', needs = '{}'")
    database.close()
    job, said = _served(service, tmp_path / "work", job_id)
    assert (job.state, job.error, job.attempts) == ("failed", str(refusal(task)), 1)
    assert any("model: must be a factory" in line for line in said)
    assert not (tmp_path / "work" / job_id).exists()


def test_a_schedule_is_ours_or_installed_and_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(name="waves", value="waves:Waves", group="pipeplan.schedules")
    monkeypatch.setattr(settings, "installed", lambda: (entry,))
    require_allowed_schedule("1f1b", ())
    require_allowed_schedule("waves", ("waves:*",))
    with pytest.raises(InvalidInputError, match=r"schedule: must be allowed by this agent's operator: .*waves"):
        require_allowed_schedule("waves", ("other:*",))
    with pytest.raises(InvalidInputError, match=r"schedule: must name a schedule that is built in, or installed"):
        require_allowed_schedule("zigzag", ("*",))
