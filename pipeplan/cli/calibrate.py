"""`pipeplan calibrate`: measured runs -> a calibration, its corrections, and the errors of predictions with it.

The table of runs shows the error of the predicted throughput without the calibration and with it.
"""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pipeplan.calibration.calibrate import calibrate as fit
from pipeplan.cli.clusters import ClusterName, read_cluster
from pipeplan.cli.console import plain_console, working
from pipeplan.documents.calibration import Calibration, mean_absolute_error
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import dump, read, require_place, write_document
from pipeplan.documents.identity import content_id
from pipeplan.documents.profile import Profile
from pipeplan.formats import TermRow, calibration_terms, change, four_digits, percent
from pipeplan.protocol.runs import read_run


def calibrate(
    profile: Annotated[Path, typer.Option(help="The profile's file.")],
    cluster: ClusterName,
    run: Annotated[list[Path], typer.Option(help="A run's folder; may be repeated.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write the calibration.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Corrects a profile's and a cluster's terms from measured runs. The runs' plans were made from both."""
    require_place(output)
    measured, network = read(Profile, profile), read_cluster(cluster)
    with working("reading the runs, and fitting the costs to them"):
        found = fit(measured, network, [read_run(folder) for folder in run])
    document = dump(asdict(found))
    if output is not None:
        write_document(output, document)
    if as_json:
        typer.echo(document)
    else:
        show_calibration(found, measured, network)


def read_calibration(path: Path | None) -> Calibration | None:
    return None if path is None else read(Calibration, path)


def show_calibration(found: Calibration, profile: Profile, cluster: Cluster) -> None:
    """All of it, on standard output."""
    console = plain_console()
    console.print(f"calibration {content_id(found)} of {found.model.name} on {found.device}, {found.dtype}")
    console.print(
        _table(("Term", "Profile", "Calibrated", "Spread", "Observations"), calibration_terms(found, profile, cluster))
    )
    runs = [
        (
            run.schedule,
            f"{run.depth} on {run.workers}, {run.microbatches} x {run.microbatch_size}",
            four_digits(run.measured_samples_per_s),
            change(run.error_before),
            change(run.error_after),
        )
        for run in found.runs
    ]
    console.print(_table(("Run", "Stages", "Measured samples/s", "Profile", "Calibrated"), runs))
    before = mean_absolute_error([run.error_before for run in found.runs])
    after = mean_absolute_error([run.error_after for run in found.runs])
    console.print(f"mean absolute error of the throughput {percent(before)} -> {percent(after)}, on these runs")


def _table(headings: TermRow, rows: Iterable[TermRow]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
