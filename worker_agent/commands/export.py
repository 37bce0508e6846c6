"""`pipeplan-agent export`: writes a run's weights in the form in which other programs load them."""

from pathlib import Path
from typing import Annotated

import typer

from pipeplan.cli.console import require_extra
from pipeplan.errors import require


def export(
    run: Annotated[Path, typer.Argument(help="The folder of the run, as `run --out` named it.")],
    to: Annotated[Path, typer.Option(help="A new folder, or an empty one.")],
    step: Annotated[
        int | None, typer.Option(min=1, help="The checkpoint after so many steps; default: the newest whole one.")
    ] = None,
) -> None:
    """Writes a checkpoint's weights for other programs.

    For hf: models it writes a folder for from_pretrained, else one safetensors file.
    """
    require_extra("worker")
    from worker_agent.runtime.export import export_checkpoint

    require(run.is_dir(), "run", "must be the folder of a run", str(run))
    done = export_checkpoint(run / "checkpoints", to, step=step)
    typer.echo(f"the weights after step {done} are in {to}", err=True)
