"""`pipeplan calibrate`: measured runs -> a calibration, and what predictions it makes better."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipeplan.calibration.calibrate import calibrate as fit
from pipeplan.documents.calibration import Calibration
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import dump, read
from pipeplan.documents.profile import Profile
from planner_service.commands.files import write_document
from planner_service.contract.run_files import read_run


def calibrate(
    profile: Annotated[Path, typer.Option(help="The profile's file.")],
    cluster: Annotated[Path, typer.Option(help="The cluster's file.")],
    run: Annotated[list[Path], typer.Option(help="A run's folder; may be repeated.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write the calibration.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Corrects a profile's and a cluster's terms by runs of plans that were made from them."""
    measured, network = read(Profile, profile), read(Cluster, cluster)
    found = fit(measured, network, [read_run(folder) for folder in run])
    document = dump(asdict(found))
    if output is not None:
        write_document(output, document)
    if as_json:
        typer.echo(document)
    else:
        from planner_service.commands.calibration_tables import show_calibration

        show_calibration(found, measured, network)


def read_calibration(path: Path | None) -> Calibration | None:
    """The calibration in a file, if one is named."""
    return None if path is None else read(Calibration, path)
