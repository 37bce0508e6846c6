"""`pipeplan check`: whether a plan is what it says, by the numbers that it holds."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from pipeplan.cli.calibrate import read_calibration
from pipeplan.cli.clusters import ClusterName, read_cluster
from pipeplan.cli.console import CHANGED, show_table
from pipeplan.cli.solve import takes_options
from pipeplan.documents.files import dump, load
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Profile
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.verify import verify


@takes_options
def check(
    plan: Annotated[Path, typer.Argument(help="The plan's file.")],
    profile: Annotated[list[Path], typer.Option(help="The profile that it was made from; of unequal devices all.")],
    cluster: ClusterName,
    options: Options,
    batch_size: Annotated[int | None, typer.Option(help="Samples in the batch asked for; default: the plan's.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="The calibration that corrected its costs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Checks where a plan comes from, what its streams give, and its proof; exit status 7 where one does not hold.

    The proof is about the batch and the options that the plan was asked for with: give the same ones. What the plan
    itself says of them (optimizer, accounting of memory, master weights) need not be given. A witness is checked by its
    numbers. The claim of a search by play is checked by searching its space again, without what that search found. A
    plan without either is not proven.
    """
    held = load(Plan, plan)
    usual = Options()
    options = replace(
        options,
        optimizer=held.optimizer if options.optimizer == usual.optimizer else options.optimizer,
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
    findings = verify(held, problem)
    proven = all(finding.holds for finding in findings)
    if as_json:
        typer.echo(dump({"plan_id": content_id(held), "proven": proven, "findings": [asdict(one) for one in findings]}))
    else:
        rows = [(one.what, "holds" if one.holds else "does not hold", one.detail) for one in findings]
        show_table(("checked", "", "found"), rows)
        typer.echo("proven" if proven else "not proven")
    if not proven:
        raise SystemExit(CHANGED)
