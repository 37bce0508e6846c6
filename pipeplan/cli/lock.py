"""`pipeplan lock`: writes a plan, with everything that it was made from, to a file for CI; and checks that file."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeplan.cli.calibrate import read_calibration
from pipeplan.cli.clusters import read_cluster
from pipeplan.cli.console import CHANGED, printable, show_table, working
from pipeplan.cli.service import Token, Url, service_at
from pipeplan.documents.files import dump, parse, parse_plan, plan_document, read, read_text, write_document
from pipeplan.documents.identity import plain
from pipeplan.documents.names import require_line
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError, NotFoundError, require, require_unique
from pipeplan.questions.locked import (
    SCHEMA_VERSION,
    Lock,
    LockedQuestion,
    LockFinding,
    Thresholds,
    ids_of,
    moved_on,
    plan_changes,
    whole,
)

if TYPE_CHECKING:
    from pipeplan.client.client import Client

FILE = Path("pipeplan.lock")

_KEYS = ("schema_version", "alias", "ids", "plan", "asked")


def lock(
    plan: Annotated[str, typer.Argument(metavar="ALIAS", help="The alias to lock, or a plan's id.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file.")] = FILE,
    url: Url = None,
    token: Token = None,
) -> None:
    """Writes an alias's plan to pipeplan.lock.

    Profile, cluster and calibration are in it; `pipeplan check` reads it.
    """
    with service_at(url, token) as service:
        plan_id = service.plan_id(plan)
        held, asked = _stored(service, plan_id)
    document = {
        "schema_version": SCHEMA_VERSION,
        "alias": None if plan_id.startswith(plan) else plan,
        "ids": ids_of(held, asked),
        "plan": plan_document(held),
        "asked": plain(asked),
    }
    write_document(output, dump(document))
    model = printable(held.model.name)
    typer.echo(f"{output}: {plan} -> {plan_id}, {model} on {asked.cluster.devices} devices", err=True)


def _stored(service: "Client", plan_id: str) -> tuple[Plan, LockedQuestion]:
    """A service's plan, and its request."""
    plan, request = service.plan(plan_id), service.plan_request(plan_id)
    asked = LockedQuestion(
        planner=request.planner,
        batch_size=request.batch_size,
        options=request.options,
        profile=service.profile(request.profile_id),
        other_profiles=tuple(service.profile(other) for other in request.other_profile_ids),
        cluster=service.cluster(plan.cluster_id),
        calibration=request.calibration,
    )
    return plan, asked


def is_lock(path: Path) -> bool:
    """Whether the file is a lock, well-formed or not, and not a plan.

    Raises InvalidInputError if it is not readable.
    """
    if path.suffix == FILE.suffix:
        return True
    text = read_text(path, field="plan")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "schema_version" in document


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; of two equal keys a parser silently keeps the last."""
    require_unique("document", "must not hold a key twice", [key for key, _ in pairs])
    return dict(pairs)


def read_lock(path: Path) -> Lock:
    """The lock in a file. Raises InvalidInputError that names file and field."""
    text = read_text(path, field="plan")
    try:
        document = json.loads(text, object_pairs_hook=_once)
    except InvalidInputError as error:
        raise InvalidInputError(str(path), error.rule, error.value) from error
    except (ValueError, RecursionError) as error:
        rule = "must be a JSON document, as `pipeplan lock` writes it"
        raise InvalidInputError(str(path), rule, text[:60]) from error
    require(isinstance(document, dict), str(path), "must be a JSON object, as `pipeplan lock` writes it", document)
    version = document.get("schema_version")
    rule = f"must be {SCHEMA_VERSION}, the version of this release: write the lock again with `pipeplan lock`"
    require(type(version) is int and version == SCHEMA_VERSION, f"{path}: schema_version", rule, version)
    for key in _KEYS:
        require(key in document, f"{path}: {key}", "is required", None)
    for key in document:
        require(key in _KEYS, f"{path}: {key}", "is not a known key", document[key])
    alias, ids, plan = document["alias"], document["ids"], document["plan"]
    require(alias is None or isinstance(alias, str), f"{path}: alias", "must be a name or null", alias)
    if alias is not None:
        require_line(f"{path}: alias", alias)
    named = isinstance(ids, dict) and all(value is None or isinstance(value, str) for value in ids.values())
    require(named, f"{path}: ids", "must give a hash, or null, for each document by its name", ids)
    require(isinstance(plan, dict), f"{path}: plan", "must be a JSON object", plan)
    try:
        held = parse_plan(plan)
        asked = parse(LockedQuestion, document["asked"])
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error.field}", error.rule, error.value) from error
    derived = {key: value for key, value in plan.items() if key in plan_document(held)}
    return Lock(alias=alias, ids=ids, plan=held, asked=asked, derived=derived)


def check_lock(
    path: Path,
    *,
    profiles: Sequence[Path],
    cluster: str | None,
    calibration: Path | None,
    thresholds: Thresholds,
    url: str | None,
    token: str | None,
    offline: bool,
    as_json: bool,
) -> None:
    """Shows whether the inputs of a lock have changed; exit status 7 if they have.

    The documents of today are those that are given, else those of the plan at which the alias points now, where a
    service is named, else those in the lock.
    """
    held = read_lock(path)
    now, findings = held.asked, [whole(held, json.loads(dump(plan_document(held.plan))))]
    if held.alias is not None and not offline and (url is not None or os.environ.get("PIPEPLAN_URL")):
        pointed, now = _pointed_at(held, url, token)
        findings.append(pointed)
    if profiles:
        read_profiles = tuple(read(Profile, each) for each in profiles)
        now = replace(now, profile=read_profiles[0], other_profiles=read_profiles[1:])
    if cluster is not None:
        now = replace(now, cluster=read_cluster(cluster))
    if calibration is not None:
        now = replace(now, calibration=read_calibration(calibration))
    with working("checking the lock against what it was made from"):
        findings += moved_on(held, now, thresholds)
    _show(held, findings, as_json=as_json)


def _pointed_at(held: Lock, url: str | None, token: str | None) -> tuple[LockFinding, LockedQuestion]:
    """Whether the alias still points at the locked plan, and the request of the plan at which it points."""
    with service_at(url, token) as service:
        try:
            alias = service.alias(str(held.alias))
        except NotFoundError:
            gone = f"there is no alias {held.alias} any more"
            return LockFinding(what="alias", holds=False, detail=gone), held.asked
        if alias.plan_id == held.ids.get("plan_id"):
            return LockFinding(what="alias", holds=True, detail=f"{alias.name} points at the locked plan"), held.asked
        plan, now = _stored(service, alias.plan_id)
    moved = f"{alias.name} points at {alias.plan_id} since {alias.moved_at:%Y-%m-%d %H:%M} UTC, by {alias.moved_by}"
    return LockFinding(what="alias", holds=False, detail=moved, changes=plan_changes(held.plan, plan)), now


def _show(held: Lock, findings: Sequence[LockFinding], *, as_json: bool) -> None:
    unchanged = all(finding.holds for finding in findings)
    if as_json:
        document: dict[str, Any] = {"plan_id": held.ids.get("plan_id"), "alias": held.alias, "unchanged": unchanged}
        typer.echo(dump(document | {"findings": [asdict(one) for one in findings]}))
    else:
        rows = [(one.what, "holds" if one.holds else "does not hold", one.detail) for one in findings]
        show_table(("checked", "", "found"), rows)
        for finding in findings:
            if finding.changes:
                typer.echo(printable("\n".join((f"\n{finding.what}:", *(f"  {line}" for line in finding.changes)))))
        typer.echo("unchanged" if unchanged else "\nmoved on: `pipeplan lock` writes a new lock")
    if not unchanged:
        raise SystemExit(CHANGED)
