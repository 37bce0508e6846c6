"""`pipeplan check`: whether a plan's numbers hold, and whether a locked plan is still the best one."""

from dataclasses import asdict, fields, replace
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from pipeplan.cli.calibrate import read_calibration
from pipeplan.cli.clusters import read_cluster
from pipeplan.cli.console import CHANGED, show_table, working
from pipeplan.cli.lock import check_lock, is_lock
from pipeplan.cli.service import Token, Url
from pipeplan.cli.solve import takes_options
from pipeplan.documents.certificate import PROVEN_GAP
from pipeplan.documents.files import dump, load
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError, require, require_amount
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.verify import verify
from pipeplan.questions.locked import GAIN, TOLERANCE, Thresholds


@takes_options
def check(
    plan: Annotated[Path, typer.Argument(help="The plan's file, or a lock: `pipeplan lock` writes it.")],
    options: Options,
    profile: Annotated[
        list[Path] | None, typer.Option(help="The profile that it was made from; for unequal devices all of them.")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="The cluster that it was made for: a file, or a name.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in the batch asked for; default: the plan's.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="The calibration that corrected its costs.")] = None,
    tolerance: Annotated[
        float, typer.Option(help="Lock: how much measured times and speeds may change, as a fraction.")
    ] = TOLERANCE,
    gain: Annotated[float, typer.Option(help="Lock: how much faster another plan may be, as a fraction.")] = GAIN,
    within: Annotated[
        float, typer.Option(help=f"Plan: how far from the optimum it may be, as a fraction; default: {PROVEN_GAP:g}.")
    ] = PROVEN_GAP,
    offline: Annotated[bool, typer.Option("--offline", help="Lock: do not ask the service about the alias.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Checks a plan's origin, price and proof. The exit status is 7 if one of them does not hold.

    The proof covers the batch and the options of the request for the plan: give the same ones. Options that the plan
    itself holds (optimizer, accounting of memory, master weights) need not be given. A witness is checked by its
    numbers. The claim of a search by play is checked by searching its space again, without what that search found. A
    plan without either is not proven, nor is one whose bound is below it by more than --within.

    A lock is checked against the profile and the cluster that are given, else against those in it: exit status 7, and a
    diff, where blocks, cluster or calibration have changed, or the planner finds a better plan. Where a service is
    named (--url, PIPEPLAN_URL), it is asked whether the alias still points there.
    """
    usual = Options()
    if is_lock(plan):
        given = [field.name for field in fields(Options) if getattr(options, field.name) != getattr(usual, field.name)]
        given += ["batch_size"] if batch_size is not None else []
        given += ["within"] if within != PROVEN_GAP else []
        require(not given, "options", "must be left out: a lock holds the options of its plan", given)
        check_lock(
            plan,
            profiles=profile or (),
            cluster=cluster,
            calibration=calibration,
            thresholds=Thresholds(tolerance=tolerance, gain=gain),
            url=url,
            token=token,
            offline=offline,
            as_json=as_json,
        )
        return
    require_amount("within", within)
    held = load(Plan, plan)
    if not profile or cluster is None:
        missing = "cluster" if profile else "profile"
        raise InvalidInputError(missing, "is required: a plan's file does not hold it, only a lock does", None)
    options = replace(
        options,
        optimizer=options.optimizer or held.optimizer,
        memory=held.memory_accounting if options.memory == usual.memory else options.memory,
        master_weights=held.master_weights if options.master_weights is None else options.master_weights,
    )
    problem = PlanningProblem(
        profile=load(Profile, profile[0]),
        cluster=read_cluster(cluster),
        batch_size=held.batch_size if batch_size is None else batch_size,
        options=options,
        calibration=read_calibration(calibration),
        other_profiles=tuple(load(Profile, other) for other in profile[1:]),
    )
    with working("checking origin, costs, play and proof"):
        findings = verify(held, problem)
    gap, right = findings[-1].gap, all(finding.holds for finding in findings)
    share = inf if gap is None or not right else gap
    proven = share <= PROVEN_GAP
    if as_json:
        document = {"plan_id": content_id(held), "proven": proven, "gap": gap}
        typer.echo(dump(document | {"findings": [asdict(one) for one in findings]}))
    else:
        rows = [(one.what, "holds" if one.holds else "does not hold", one.detail) for one in findings]
        show_table(("checked", "", "found"), rows)
        far = "" if held.certificate is None or gap is None else held.certificate.optimality
        typer.echo(far if proven else f"not proven{far and f': {far}'}")
    if share > max(within, PROVEN_GAP):
        raise SystemExit(CHANGED)
