"""Settings: from the environment, overridden by what is chosen, wrong ones named."""

from pathlib import Path

import pytest

from planner_service.core.errors import InvalidInputError
from planner_service.settings import DEFAULT_PORT, load_settings


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DATABASE_URL", "HOST", "PORT", "LEASE_S", "MAX_ATTEMPTS", "MAX_BODY_BYTES"):
        monkeypatch.delenv(f"PIPEPLAN_{name}", raising=False)
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


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_every_name_of_this_machine_may_be_listened_on(host: str) -> None:
    assert load_settings(host=host).host == host


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "x"),
        ("lease_s", "0"),
        ("lease_s", "nan"),
        ("host", "0.0.0.0"),
        ("host", "192.0.2.1"),
        ("host", "example.com"),
        ("host", "::"),
    ],
)
def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"PIPEPLAN_{name.upper()}", value)
    with pytest.raises(InvalidInputError) as caught:
        load_settings()
    assert caught.value.field == name
