"""Settings: options before the environment before the file before the defaults; wrong ones named, secrets masked."""

import json
import os
from pathlib import Path

import pytest

from pipeplan.errors import InvalidInputError
from planner_service.platform.settings import DEFAULT_PORT, Settings, load_settings, resolve_settings
from tests.planner_service.servers import pipeplan
from worker_agent.agent.settings import AgentSettings


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PIPEPLAN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def test_the_defaults_are_for_this_machine(tmp_path: Path) -> None:
    settings = load_settings()
    assert (settings.host, settings.port, settings.lease_s, settings.max_attempts) == (
        "127.0.0.1",
        DEFAULT_PORT,
        30.0,
        3,
    )
    assert settings.database_url.startswith("sqlite:///")
    assert settings.database_url.endswith("pipeplan.sqlite3")


def test_what_is_chosen_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEPLAN_PORT", "9000")
    monkeypatch.setenv("PIPEPLAN_LEASE_S", "5")
    assert (load_settings().port, load_settings(port=9001).port, load_settings(port=None).lease_s) == (9000, 9001, 5.0)


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("PIPEPLAN_RETENTON", "PIPEPLAN_RETENTION"),
        ("PIPEPLAN_REQUIRE_TOKEN", "PIPEPLAN_REQUIRE_TOKENS"),
        ("PIPEPLAN_TRUSTED_PROXYS_FILE", "PIPEPLAN_TRUSTED_PROXIES"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_one_that_is_meant(
    monkeypatch: pytest.MonkeyPatch, variable: str, meant: str
) -> None:
    monkeypatch.setenv(variable, "a secret perhaps")
    with pytest.raises(InvalidInputError, match=f"{meant} is meant, got '{variable}'") as caught:
        load_settings()
    assert "secret" not in str(caught.value)


def test_the_variables_of_clients_and_agents_are_no_misspellings(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = [f"PIPEPLAN_AGENT_{name.upper()}" for name in AgentSettings.model_fields]
    for variable in ("PIPEPLAN_URL", "PIPEPLAN_TOKEN", "PIPEPLAN_TOKEN_FILE", "PIPEPLAN_SERVICE_PORT", *agents):
        monkeypatch.setenv(variable, "x")
    assert load_settings().port == DEFAULT_PORT


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_every_name_of_this_machine_may_be_listened_on(host: str) -> None:
    assert load_settings(host=host).host == host


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "x"),
        ("lease_s", "0"),
        ("lease_s", "nan"),
        ("token_key", "short"),
        ("requests_per_s", "-1"),
    ],
)
def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"PIPEPLAN_{name.upper()}", value)
    with pytest.raises(InvalidInputError) as caught:
        load_settings()
    assert caught.value.field == name


def _file(folder: Path, text: str) -> Path:
    path = folder / "pipeplan.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_file_is_for_what_nothing_else_sets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = _file(tmp_path, "port = 9000\nlease_s = 5\nmax_attempts = 7\n")
    monkeypatch.setenv("PIPEPLAN_CONFIG", str(path))
    monkeypatch.setenv("PIPEPLAN_LEASE_S", "6")
    resolved = resolve_settings(max_attempts=8, host=None)
    settings = resolved.settings
    assert (settings.port, settings.lease_s, settings.max_attempts, settings.host) == (9000, 6.0, 8, "127.0.0.1")
    sources = {setting.name: setting.source for setting in resolved.shown()}
    assert (sources["port"], sources["lease_s"]) == (f"file {path}", "environment PIPEPLAN_LEASE_S")
    assert (sources["max_attempts"], sources["host"]) == ("option", "default")


def test_the_file_that_is_named_as_an_option_is_the_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIPEPLAN_CONFIG", "/nowhere/at/all.toml")
    assert load_settings(config=_file(tmp_path, "port = 9000")).port == 9000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "'prot'"),
        ("[service]\nport = 1", "'service'"),
        ("port = = 1", "must be a TOML file"),
        ("port = 99999", "port"),
        ("port = 'x'", "from: file"),
        ("lease_s = nan", "lease_s"),
        ("log_level = 'loud'", "log_level"),
    ],
)
def test_a_wrong_file_is_one_clear_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        load_settings(config=_file(tmp_path, text))
    assert said in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "pipeplan.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInputError, match="readable text file"):
        load_settings(config=path)


def test_a_variable_may_name_a_file_that_holds_the_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = tmp_path / "database_url"
    secret.write_text("postgresql://me:hidden-word@host/db\n", encoding="utf-8")
    monkeypatch.setenv("PIPEPLAN_DATABASE_URL_FILE", str(secret))
    assert load_settings().database_url == "postgresql://me:hidden-word@host/db"
    monkeypatch.setenv("PIPEPLAN_DATABASE_URL", "sqlite:////tmp/x")
    with pytest.raises(InvalidInputError, match="not by both"):
        load_settings()


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEPLAN_PORT", "")
    assert load_settings().port == DEFAULT_PORT


def test_every_setting_has_a_meaning() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_the_command_shows_everything_but_secrets(tmp_path: Path) -> None:
    url = "postgresql://me:hidden-word@host/db"
    path = _file(tmp_path, "port = 9000")
    as_json = pipeplan("settings", "--config", str(path), "--json", PIPEPLAN_DATABASE_URL=url)
    shown = {setting["name"]: setting for setting in json.loads(as_json.stdout)["settings"]}
    assert set(shown) == set(Settings.model_fields)
    assert (shown["port"]["value"], shown["port"]["source"]) == (9000, f"file {path}")
    assert shown["database_url"]["value"] == "postgresql://me:***@host/db"
    assert shown["database_url"]["source"] == "environment PIPEPLAN_DATABASE_URL"
    as_table = pipeplan("settings", "--config", str(path), PIPEPLAN_DATABASE_URL=url)
    assert "hidden-word" not in as_json.stdout + as_table.stdout
    assert all(f"\n{name} " in as_table.stdout for name in Settings.model_fields)


def test_what_is_wrong_with_a_secret_does_not_show_it() -> None:
    answer = pipeplan("settings", PIPEPLAN_DATABASE_URL="postgresql://me:hidden-word@host/db", PIPEPLAN_PORT="x")
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: port:")
    assert "hidden-word" not in answer.stderr


def test_the_documentation_names_every_setting() -> None:
    written = (Path(__file__).parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
    assert [name for name in Settings.model_fields if f"`PIPEPLAN_{name.upper()}`" not in written] == []
