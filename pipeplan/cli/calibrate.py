"""`pipeplan calibrate`: measured runs -> a calibration, what it corrects, and how far off predictions are then.

The table of runs shows the error of the predicted throughput without the calibration and with it.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pipeplan.calibration.calibrate import calibrate as fit
from pipeplan.cli.clusters import ClusterName, read_cluster
from pipeplan.cli.console import PIPED_WIDTH
from pipeplan.documents.calibration import Calibration, Term, mean_absolute_error
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import dump, read, write_document
from pipeplan.documents.identity import content_id
from pipeplan.documents.profile import Profile
from pipeplan.formats import size
from pipeplan.protocol.runs import read_run

Row = tuple[str, str, str, str, str]
"""The term, its value in the profile, the corrected one, the spread, and how many observations."""


def calibrate(
    profile: Annotated[Path, typer.Option(help="The profile's file.")],
    cluster: ClusterName,
    run: Annotated[list[Path], typer.Option(help="A run's folder; may be repeated.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write the calibration.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Corrects a profile's and a cluster's terms by runs of plans that were made from them."""
    measured, network = read(Profile, profile), read_cluster(cluster)
    found = fit(measured, network, [read_run(folder) for folder in run])
    document = dump(asdict(found))
    if output is not None:
        write_document(output, document)
    if as_json:
        typer.echo(document)
    else:
        show_calibration(found, measured, network)


def read_calibration(path: Path | None) -> Calibration | None:
    """The calibration in a file, if one is named."""
    return None if path is None else read(Calibration, path)


def show_calibration(found: Calibration, profile: Profile, cluster: Cluster) -> None:
    """All of it, on standard output."""
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    console.print(f"calibration {content_id(found)} of {found.model.name} on {found.device}, {found.dtype}")
    console.print(_table(("Term", "Profile", "Calibrated", "Spread", "Observations"), _terms(found, profile, cluster)))
    runs = [
        (
            run.schedule,
            f"{run.depth} on {run.workers}, {run.microbatches} x {run.microbatch_size}",
            f"{run.measured_samples_per_s:.4g}",
            f"{run.error_before:+.1%}",
            f"{run.error_after:+.1%}",
        )
        for run in found.runs
    ]
    console.print(_table(("Run", "Stages", "Measured samples/s", "Profile", "Calibrated"), runs))
    before = mean_absolute_error([run.error_before for run in found.runs])
    after = mean_absolute_error([run.error_after for run in found.runs])
    console.print(f"mean absolute error of the throughput {before:.1%} -> {after:.1%}, on these runs")


def _table(headings: Row, rows: Iterable[Row]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _terms(found: Calibration, profile: Profile, cluster: Cluster) -> Iterator[Row]:
    known = profile.overheads
    for name, factors in (
        ("forward, by block", found.forward),
        ("backward, by block", found.backward),
        ("backward's first half, by block", found.backward_input),
        ("backward's second half, by block", found.backward_weight),
    ):
        if factors is not None:
            values = f"{min(factors.values):.3f} to {max(factors.values):.3f}"
            yield name, "1", values, f"{factors.spread:.1%}", str(factors.observations)
    yield from _term("forward without a graph", known.forward_without_graph, found.forward_without_graph)
    yield from _term("recomputed forward", known.recompute, found.recompute)
    yield from _term("backward after its forward", known.backward_after_forward, found.backward_after_forward)
    yield from _term("us an instruction", known.instruction_s, found.instruction_s, 1e6)
    yield from _term("us an update, a MB", known.update_s_per_byte, found.update_s_per_byte, 1e12)
    yield from _term("us a weight version, a MB", known.version_s_per_byte, found.version_s_per_byte, 1e12)
    yield from _term("gradient exchange", known.exchange_factor, found.exchange_factor)
    yield from _term("activation bytes", 1.0, found.activation_factor)
    for terms in found.levels:
        before, after = (
            f"{level.bandwidth_bytes_per_s / 1e9:.3g} GB/s, {level.latency_s * 1e6:.3g} us"
            for level in (cluster.levels[terms.level], terms)
        )
        yield f"network level {terms.level}", before, after, "", str(terms.observations)
    if found.context_bytes is not None:
        held, spread = size(round(found.context_bytes.value)), size(round(found.context_bytes.spread))
        before = size(profile.device.context_bytes)
        yield "beside the tensors", before, held, spread, str(found.context_bytes.observations)
    yield from _term("allocator's reserve", profile.device.allocator_reserve, found.allocator_reserve)


def _term(name: str, known: float, term: Term | None, scale: float = 1.0) -> Iterator[Row]:
    if term is not None:
        before, after, spread = (f"{value * scale:.3g}" for value in (known, term.value, term.spread))
        yield name, before, after, spread, str(term.observations)
