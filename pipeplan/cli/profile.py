"""`pipeplan profile`: profiles from other systems' files."""

from pathlib import Path
from typing import Annotated

import typer

from pipeplan.cli import completion
from pipeplan.cli.console import fields_of, working
from pipeplan.documents.files import dump, read_text, require_place, write_document
from pipeplan.documents.profile import DTYPE_BYTES, Device, Model
from pipeplan.errors import InvalidInputError, require_count, require_one_of
from pipeplan.imports.pipedream_graph import import_pipedream_graph
from pipeplan.planners.problem import CUTS

app = typer.Typer(no_args_is_help=True, help="Profiles from other systems' files.")

FORMATS = ("pipedream-graph",)

UNKNOWN_DEVICE_BYTES = 16 * 2**30
"""PipeDream's files do not name their device; its papers measured on GPUs of 16 GB. Planners use the cluster's."""


@app.callback()
def group() -> None:
    """Profiles from other systems' files."""


@app.command("import")
def import_profile(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to import.")],
    source: Annotated[
        str,
        typer.Option(
            "--format", help="pipedream-graph: PipeDream's graph.txt.", autocompletion=completion.names(FORMATS)
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the profile goes.")],
    microbatch_size: Annotated[
        int | None, typer.Option(help="The minibatch that the file was measured with; default: what the file implies.")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="Default: the file's name.")] = None,
    device_name: Annotated[str, typer.Option(help="The device that the file was measured on.")] = "unknown",
    device_memory_bytes: Annotated[int, typer.Option(help="That device's memory.")] = UNKNOWN_DEVICE_BYTES,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    cuts: Annotated[str, typer.Option(help="any keeps the graph, single-tensor makes a chain of it.")] = "any",
) -> None:
    """Writes a profile from another system's measurements. A model with branches stays a graph."""
    require_one_of(FORMATS, "format", source)
    require_one_of(CUTS, "cuts", cuts)
    with fields_of("model"):
        model = Model(name=file.name.partition(".")[0] if model_name is None else model_name)
    with fields_of("device"):
        device = Device(name=device_name, memory_bytes=device_memory_bytes)
    if microbatch_size is not None:
        require_count("microbatch_size", microbatch_size)
    require_one_of(DTYPE_BYTES, "dtype", dtype)
    require_place(output)
    text = read_text(file)
    try:
        with working("importing"):
            profile = import_pipedream_graph(
                text,
                microbatch_size=microbatch_size,
                model=model,
                device=device,
                dtype=dtype,
                single_tensor=cuts == "single-tensor",
            )
    except InvalidInputError as error:
        raise InvalidInputError(f"{file}, {error.field}", error.rule, error.value) from error
    write_document(output, dump(profile))
    size = profile.microbatch_sizes[0]
    typer.echo(f"{output}: {profile.model.name}, {len(profile.blocks)} blocks, microbatches of {size}", err=True)
