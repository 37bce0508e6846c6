"""Clusters on the command line: files, names of known clusters, and `pipeplan clusters`, which lists the names."""

from pathlib import Path
from typing import Annotated

import typer

from pipeplan.cli import completion
from pipeplan.cli.console import show_table
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.devices import KNOWN_TYPES
from pipeplan.documents.files import dump, read, write_document
from pipeplan.documents.identity import plain
from pipeplan.documents.named_clusters import SERVERS, named_cluster
from pipeplan.formats import size

ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="A file, or a name such as dgx-h100:4 (four servers): `pipeplan clusters` lists them.",
        autocompletion=completion.clusters,
    ),
]

LEAST_PLAUSIBLE = 10_000
"""Smaller numbers of bytes, or bytes a second, were most likely meant as GB: the command warns of them."""


def is_file(given: str) -> bool:
    """Whether the text names a file: an existing one, or one by its suffix or its folder."""
    path = Path(given)
    return path.is_file() or path.suffix == ".json" or path.name != given


def read_cluster(given: str) -> Cluster:
    """The cluster in a file or of a name. Raises InvalidInputError if it is neither.

    Warns on standard error if the file's figures look like gigabytes.
    """
    if not is_file(given):
        return named_cluster(given)
    cluster = read(Cluster, Path(given))
    for index, level in enumerate(cluster.levels):
        warn_of_gigabytes(f"{given}: levels.{index}.bandwidth_bytes_per_s", level.bandwidth_bytes_per_s, a_second=True)
    for device in cluster.types:
        warn_of_gigabytes(f"{given}: memory_bytes of {device.name}", device.memory_bytes)
    return cluster


def warn_of_gigabytes(place: str, value: float, *, a_second: bool = False) -> None:
    """Warns on standard error of a number of bytes that was most likely meant in another unit."""
    if 0 < value < LEAST_PLAUSIBLE:
        others = f"{value:g} GB would be {value:g}e9"
        if a_second:
            others = f"{value:g} GB/s would be {value:g}e9, {value:g} Gb/s {value / 8:g}e9"
        typer.echo(f"warning: {place}: {value:g} bytes{' a second' if a_second else ''}; {others}", err=True)


def clusters(
    name: Annotated[str | None, typer.Argument(metavar="NAME[:NODES]", help="Show this one as a cluster file.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write that file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Lists the named clusters, with the sources of their figures. NAME alone is one server."""
    if name is not None:
        document = dump(plain(named_cluster(name)))
        if output is not None:
            write_document(output, document)
        typer.echo(document)
        return
    document = dump(
        [
            {
                "name": server.name,
                "device": KNOWN_TYPES[server.type].device.name,
                "devices": server.devices,
                "link_bandwidth_bytes_per_s": KNOWN_TYPES[server.type].link_bandwidth_bytes_per_s,
                "network_bandwidth_bytes_per_s": server.network_bytes_per_s,
                "device_network_bandwidth_bytes_per_s": server.device_network_bytes_per_s,
                "source": server.source,
            }
            for server in SERVERS.values()
        ]
    )
    if output is not None:
        write_document(output, document)
    if as_json:
        typer.echo(document)
        return
    headings = ("Name", "Devices", "Memory", "GB/s inside", "GB/s between", "GB/s a device", "Source")
    rows = []
    for server in SERVERS.values():
        known = KNOWN_TYPES[server.type]
        speeds = (known.link_bandwidth_bytes_per_s, server.network_bytes_per_s, server.device_network_bytes_per_s)
        rows.append(
            (
                server.name,
                f"{server.devices} x {known.device.name}",
                size(known.device.memory_bytes),
                *(f"{speed / 1e9:g}" for speed in speeds),
                server.source,
            )
        )
    show_table(headings, rows)
