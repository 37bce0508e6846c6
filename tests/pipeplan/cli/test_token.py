"""`pipeplan token`: the first token is made before the service is up."""

import json
from pathlib import Path

import httpx
import pytest

from pipeplan.errors import InvalidInputError
from planner_service.commands.token import duration_s
from tests.planner_service.servers import pipeplan, served


@pytest.mark.parametrize(
    ("text", "expected"), [("90d", 7_776_000), ("12h", 43_200), ("1y", 31_536_000), ("2w", 1_209_600), ("never", None)]
)
def test_a_duration_is_read(text: str, expected: int | None) -> None:
    assert duration_s(text) == expected


@pytest.mark.parametrize("text", ["", "90", "d", "-1d", "1.5d", "0d", "1 d", "9999999999d", "Never", "１d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        duration_s(text)


def test_a_token_is_made_used_and_revoked_beside_the_service(tmp_path: Path) -> None:
    path = tmp_path / "service.sqlite3"
    database = ("--database", f"sqlite:///{path}")
    made = pipeplan("token", "create", "--name", "ci", "--scope", "plan", "--expires", "90d", *database)
    token = made.stdout.strip()
    assert made.returncode == 0
    assert token not in made.stderr
    with served(path, "--host", "0.0.0.0") as url:
        url = url.replace("0.0.0.0", "127.0.0.1")
        headers = {"Authorization": f"Bearer {token}"}
        assert httpx.get(f"{url}/v1/plans").status_code == 401
        assert httpx.get(f"{url}/healthz").status_code == 200
        told = httpx.get(f"{url}/v1/tokens/self", headers=headers).json()
        assert (told["name"], told["scopes"]) == ("ci", ["read", "plan"])
        listed = json.loads(pipeplan("token", "list", "--json", *database).stdout)["items"]
        assert [(one["name"], one["state"], one["created_by"]) for one in listed] == [("ci", "valid", "console")]
        assert listed[0]["last_used_at"] is not None
    revoked = json.loads(pipeplan("token", "revoke", "ci", "--json", *database).stdout)
    assert (revoked["id"], revoked["state"]) == (listed[0]["id"], "revoked")
    again = pipeplan("token", "revoke", "ci", *database)
    assert again.returncode == 4
    assert "there is no token 'ci'" in again.stderr
    assert token not in pipeplan("token", "list", *database).stdout


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--name", "a b", "--scope", "read"), "name"),
        (("--name", "a", "--scope", "root"), "scopes"),
        (("--name", "a", "--scope", "read", "--expires", "soon"), "expires"),
        (("--name", "a"), "scope"),
    ],
)
def test_what_is_no_token_is_one_sentence(tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    answer = pipeplan("token", "create", *options, "--database", f"sqlite:///{tmp_path / 'x.sqlite3'}")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert told in answer.stderr
    assert answer.stderr.count("\n") == 1
    assert not (tmp_path / "x.sqlite3").exists()
