"""`pipeplan-agent blocks`: lists the blocks of a model, and what each passes to the next."""

import json
from typing import Annotated

import typer

from pipeplan.cli.console import require_extra, show_table, typed_spec
from pipeplan.documents.files import dump
from pipeplan.errors import require_count
from pipeplan.formats import NONE, size


def blocks(
    model: Annotated[
        str, typer.Argument(help="The model: hf:FAMILY?key=value&..., preset:NAME?... or package.module:factory?...")
    ],
    data: Annotated[
        str | None, typer.Option(help="The data: preset:NAME?... or package.module:factory?...; default: random.")
    ] = None,
    microbatch_size: Annotated[int, typer.Option(help="Samples in the microbatch that passes the blocks.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Lists a model's blocks, and what each passes to the next.

    One microbatch passes them. Presets and Hugging Face models need no weights for that, unless what a block gives
    depends on contents: the command then says so, and makes up to 4 GiB of them. A factory builds its whole model here.
    """
    require_extra("worker")
    typed_spec(model, field="model")
    require_count("microbatch_size", microbatch_size)
    from worker_agent.models.listing import list_blocks

    def on_contents(size_bytes: int) -> None:
        typer.echo(f"what the blocks give depends on contents: {size(size_bytes)} of weights are made here", err=True)

    found = list_blocks(model, data, microbatch_size=microbatch_size, on_contents=on_contents)
    if as_json:
        typer.echo(dump(found))
        return
    rows = [
        (name, size(weights), ", ".join(f"{t.dtype} {' x '.join(map(str, t.shape))}" for t in given) or NONE)
        for name, weights, given in zip(found.names, found.weight_bytes, found.hands_on, strict=True)
    ]
    show_table(("Block", "Weights", "Hands on"), rows)
    if found.own:
        typer.echo("\nTo begin blocks at other modules, set their names in the factory, in this form:\n")
        typer.echo(f"    model.cuts = {json.dumps(list(found.names))}")
