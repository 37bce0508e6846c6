"""`pipeplan lock` and `plan get --format` against a real service, and `check` of a lock without one."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeplan import save
from pipeplan.documents.files import SAID
from planner_service.overview.openapi import CLUSTER, PROFILE
from tests.planner_service.commands.test_plan_command import Run, _create, folder, run, url

__all__ = ["folder", "run", "url"]

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def lock(run: Run, folder: Path, tmp_path: Path) -> Path:
    """The lock of an alias."""
    plan_id = json.loads(_create(run, folder, "--json")[1])["id"]
    run("alias", "set", "prod", plan_id)
    path = tmp_path / "pipeplan.lock"
    status, stdout, stderr = run("lock", "prod", "-o", str(path))
    assert (status, stdout) == (0, "")
    assert f"prod -> {plan_id}" in stderr
    return path


def holds(out: str) -> dict[str, bool]:
    """By what was looked at, whether it holds."""
    return {one["what"]: one["holds"] for one in json.loads(out)["findings"]}


def edited(lock: Path, edit: Edit) -> str:
    """A copy of the lock with a change, by its path."""
    document = json.loads(lock.read_text())
    edit(document)
    path = lock.with_name("edited.lock")
    path.write_text(json.dumps(document))
    return str(path)


def test_a_lock_holds_without_a_service_and_with_one(run: Run, lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(lock.read_text())
    assert (document["schema_version"], document["alias"]) == (1, "prod")
    assert document["ids"]["plan_id"] == document["plan"]["id"]
    status, stdout, _ = run("check", str(lock), "--json")
    assert (status, set(holds(stdout).values())) == (0, {True})
    assert "alias" in holds(stdout)
    monkeypatch.delenv("PIPEPLAN_URL")
    status, stdout, _ = run("check", str(lock), "--json")
    assert status == 0
    assert holds(stdout) == dict.fromkeys(("lock", "blocks", "cluster", "calibration", "better plan"), True)
    away = ("--url", "http://127.0.0.1:9")
    assert run("check", str(lock), *away, "--offline")[0] == 0
    status, stdout, stderr = run("check", str(lock), *away)
    assert (status, stdout) == (6, ""), "a service that is named is asked: silence is no yes"
    assert "cannot be reached" in stderr


def test_documents_that_moved_on_are_told_with_a_diff(run: Run, lock: Path, tmp_path: Path) -> None:
    profile, cluster = tmp_path / "p.json", tmp_path / "c.json"
    first = PROFILE.blocks[0]
    slower = replace(first, measurements=tuple(replace(m, forward_s=1.2 * m.forward_s) for m in first.measurements))
    save(replace(PROFILE, blocks=(slower, *PROFILE.blocks[1:-1])), profile)
    level = CLUSTER.levels[0]
    halved = replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / 2)
    save(replace(CLUSTER, levels=(halved, *CLUSTER.levels[1:])), cluster)
    asked = ("check", str(lock), "--profile", str(profile), "--cluster", str(cluster))
    status, stdout, _ = run(*asked)
    assert status == 7
    assert f"~ {first.name}: forward_s: +20.0 %" in stdout
    assert f"- {PROFILE.blocks[-1].name}: " in stdout
    assert "~ levels.0.bandwidth_bytes_per_s: " in stdout and "(-50.0 %)" in stdout
    found = holds(run(*asked, "--json")[1])
    assert (found["lock"], found["alias"], found["blocks"], found["cluster"]) == (True, True, False, False)
    save(replace(PROFILE, blocks=(slower, *PROFILE.blocks[1:])), profile)
    only = ("check", str(lock), "--profile", str(profile), "--offline", "--gain", "1")
    assert run(*only)[0] == 7
    assert run(*only, "--tolerance", "0.25")[0] == 0


def test_names_in_a_diff_and_in_errors_are_shown_and_never_obeyed(run: Run, lock: Path, tmp_path: Path) -> None:
    first = replace(PROFILE.blocks[0], name="\u202egnp.0")
    save(replace(PROFILE, blocks=(first, *PROFILE.blocks[1:])), tmp_path / "p.json")
    status, stdout, _ = run("check", str(lock), "--profile", str(tmp_path / "p.json"), "--offline")
    assert (status, "+ \\u202egnp.0: " in stdout, "\u202e" in stdout) == (7, True, False)
    assert run("plan", "get", "\u202ezz")[2].startswith("error: there is no plan \\u202ezz,")


def test_an_alias_that_is_gone_or_moved_is_told(run: Run, lock: Path, folder: Path) -> None:
    other = json.loads(_create(run, folder, "--json", "--stages", "2", "--schedule", "pipedream-2bw")[1])["id"]
    run("alias", "set", "prod", other)
    status, stdout, _ = run("check", str(lock))
    assert status == 7
    assert f"prod points at {other}" in stdout and "~ stages (blocks x replicas): " in stdout
    run("alias", "delete", "prod")
    status, stdout, _ = run("check", str(lock))
    assert status == 7
    assert "there is no alias prod any more" in stdout


def faster(document: dict[str, Any]) -> None:
    """A plan that says more than its streams give."""
    document["plan"]["simulated"]["throughput_samples_per_s"] *= 2


def lighter(document: dict[str, Any]) -> None:
    """A profile that is not the one that was hashed."""
    document["asked"]["profile"]["blocks"][0]["weight_bytes"] -= 1


def derived(document: dict[str, Any]) -> None:
    """A figure that only stands beside the plan."""
    document["plan"]["depth"] += 1


def renamed(document: dict[str, Any]) -> None:
    """Another plan's hash."""
    document["ids"]["plan_id"] = "0" * 32


def easier(document: dict[str, Any]) -> None:
    """Another question than the one that was asked: a better plan would not be found."""
    document["asked"]["batch_size"] += 1


def other_options(document: dict[str, Any]) -> None:
    """The same with an option."""
    document["asked"]["options"]["semantics"] = "paper"


@pytest.mark.each_case
@pytest.mark.parametrize("edit", [faster, lighter, derived, renamed, easier, other_options])
def test_a_lock_that_somebody_edited_does_not_hold(run: Run, lock: Path, edit: Edit) -> None:
    status, stdout, _ = run("check", edited(lock, edit), "--offline", "--json")
    assert status == 7
    assert not holds(stdout)["lock"]


def test_a_lock_from_before_questions_had_a_hash_holds(run: Run, lock: Path) -> None:
    def without(document: dict[str, Any]) -> None:
        del document["ids"]["question_id"]

    status, stdout, _ = run("check", edited(lock, without), "--offline", "--json")
    assert (status, holds(stdout)["lock"]) == (0, True)


def test_a_lock_that_holds_a_key_twice_is_refused(run: Run, lock: Path) -> None:
    lock.write_text(lock.read_text().replace('"schema_version": 1', '"schema_version": 0, "schema_version": 1', 1))
    status, _, stderr = run("check", str(lock), "--offline")
    assert status == 2
    assert "must not hold a key twice, got 'schema_version'" in stderr


def not_a_number(document: dict[str, Any]) -> None:
    """A version that only equals 1."""
    document["schema_version"] = True


def two_lines(document: dict[str, Any]) -> None:
    """An alias that moves the cursor."""
    document["alias"] = "gpt\x1b[31m\n"


def old(document: dict[str, Any]) -> None:
    """Of another release."""
    document["schema_version"] = 0


def cut(document: dict[str, Any]) -> None:
    """Without its plan."""
    del document["plan"]


def unknown(document: dict[str, Any]) -> None:
    """With a key that nobody knows."""
    document["more"] = 1


def no_ids(document: dict[str, Any]) -> None:
    """Hashes of another shape."""
    document["ids"] = ["a"]


def no_amount(document: dict[str, Any]) -> None:
    """A profile that cannot be."""
    document["asked"]["profile"]["blocks"][0]["weight_bytes"] = -1


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (old, "schema_version: must be 1, the version of this release"),
        (not_a_number, "schema_version: must be 1"),
        (two_lines, "alias: must hold no control character"),
        (cut, "plan: is required"),
        (unknown, "more: is not a known key"),
        (no_ids, "ids: must give a hash, or null"),
        (no_amount, "profile.blocks.0.weight_bytes: must be a finite number"),
    ],
)
def test_what_is_no_lock_is_one_sentence(run: Run, lock: Path, edit: Edit, sentence: str) -> None:
    status, stdout, stderr = run("check", edited(lock, edit), "--offline")
    assert (status, stdout, stderr.count("\n")) == (2, "", 1)
    assert sentence in stderr


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '"x"', "[" * 100_000])
def test_a_text_that_is_no_lock_is_one_sentence(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "pipeplan.lock"
    path.write_text(text)
    status, stdout, stderr = run("check", str(path))
    assert (status, stdout, stderr.count("\n")) == (2, "", 1)
    assert "as `pipeplan lock` writes it" in stderr


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (("lock", "nothing"), 4, "error: there is no plan nothing, nor an alias of that name"),
        (("lock", "prod", "--url", "http://127.0.0.1:9"), 6, "error: the service at http://127.0.0.1:9 cannot"),
        (("plan", "get", "prod", "--format", "xml"), 2, "error: --format: must be one of json, yaml, env, torchrun"),
        (("plan", "get", "prod", "--format", "env", "--json"), 2, "error: --format: must be json, or left out"),
        (("check", "nothing.lock"), 2, "error: plan: must be a file that can be read: there is none of this name"),
    ],
)
def test_wrong_questions_are_one_sentence(
    run: Run, lock: Path, arguments: tuple[str, ...], status: int, sentence: str
) -> None:
    ended = run(*arguments)
    assert (ended[0], ended[1], ended[2].count("\n")) == (status, "", 1)
    assert ended[2].startswith(sentence)


def test_options_of_a_plan_are_refused_beside_a_lock(run: Run, lock: Path) -> None:
    for option in (("--stages", "2"), ("--batch-size", "4")):
        status, _, stderr = run("check", str(lock), *option)
        assert status == 2
        assert "must be left out: a lock holds the options of its plan" in stderr


def test_a_plan_is_printed_for_scripts(run: Run, lock: Path, tmp_path: Path) -> None:
    document = json.loads(run("plan", "get", "prod", "--format", "json")[1])
    assert document == json.loads(run("plan", "get", "prod", "--json")[1])
    assert document == json.loads(lock.read_text())["plan"] | {key: document[key] for key in SAID}
    assert yaml.safe_load(run("plan", "get", "prod", "--format", "yaml")[1]) == document
    file = tmp_path / "plan.env"
    assert run("plan", "get", document["id"][:8], "--format", "env", "-o", str(file))[:2] == (0, "")
    script = f"source {file}; echo $PLAN_ID $PLAN_SCHEDULE $PLAN_MICROBATCHES"
    shell = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert shell.stdout.split() == [document["id"], document["schedule"], str(document["microbatches"])]
    script = run("plan", "get", "prod", "--format", "torchrun")[1]
    assert script == run("plan", "export", "prod", "--format", "torchrun")[1]
