"""`pipeplan-agent profile`: measures a model here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from planner_service.contract.documents import dump, parse
from planner_service.contract.extras import require_extra
from planner_service.contract.jobs import ProfileTask
from planner_service.core.cluster import Cluster
from planner_service.core.errors import InvalidInputError, PipeplanError
from planner_service.core.profile import Profile

Spec = "package.module:factory?key=value&..."


def profile(
    model: Annotated[str, typer.Option(help=f"The model: hf:FAMILY?key=value&... or {Spec}")],
    data: Annotated[
        str | None,
        typer.Option(help=f"The data: {Spec}; default: random (hf: at most 512 tokens a sequence)."),
    ] = None,
    loss: Annotated[str | None, typer.Option(help=f"The loss: {Spec}; default: by the targets' type.")] = None,
    microbatch_sizes: Annotated[str, typer.Option(help="Samples in a microbatch, several sizes.")] = "1,2,4,8",
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "float32",
    devices: Annotated[int, typer.Option(help="Devices to load at once, and to describe: GPUs, or cores.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    clock: Annotated[str, typer.Option(help="auto, processor, or wall for blocks that only wait.")] = "auto",
    warm_up_rounds: Annotated[int, typer.Option(help="Rounds that are not counted.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds that are counted: medians over them.")] = 5,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, adam or adamw.")] = "sgd",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the profile.")] = None,
    cluster_output: Annotated[Path | None, typer.Option(help="Where to write the cluster.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The profile on standard output, nothing else.")] = False,
) -> None:
    """Measures a model block by block on this node's devices, and the links between them."""
    require_extra("worker")
    from worker_agent.profiler.job import ProfileJob
    from worker_agent.profiler.measure import measure

    task = parse(
        ProfileTask,
        {
            "model": model,
            "data": data,
            "microbatch_sizes": _sizes(microbatch_sizes),
            "dtype": dtype,
            "optimizer": optimizer,
            "devices": devices,
            "warm_up_rounds": warm_up_rounds,
            "rounds": rounds,
        },
    )
    with _progress_bar() as on_progress:
        measured, cluster = measure(ProfileJob(task=task, loss=loss, device=device, clock=clock), on_progress)
    _write(output, measured)
    _write(cluster_output, cluster)
    if as_json:
        typer.echo(dump(asdict(measured)))
    else:
        _show(measured, cluster)


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInputError("microbatch_sizes", "must be whole numbers with commas between", text) from None


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("starting", total=None)
        yield lambda done, total, message: progress.update(bar, completed=done, total=total, description=message)


def _write(path: Path | None, content: Any) -> None:
    if path is None:
        return
    try:
        path.write_text(dump(asdict(content)) + "\n", encoding="utf-8")
    except OSError as error:
        raise PipeplanError(f"cannot write {path}: {error.strerror}") from error


def _show(measured: Profile, cluster: Cluster) -> None:
    """A table of the largest microbatch size, and what was found about the devices."""
    from rich.console import Console
    from rich.table import Table

    size = measured.microbatch_sizes[-1]
    table = Table(title=f"{measured.model.name} on {measured.device.name}, microbatches of {size}")
    table.add_column("block")
    for heading in ("forward ms", "backward ms", "weights MiB", "kept MiB", "output MiB"):
        table.add_column(heading, justify="right")
    for block, m in zip(measured.blocks, measured.at(size), strict=True):
        times = (f"{m.forward_s * 1e3:.3f}", f"{m.backward_s * 1e3:.3f}")
        sizes = (f"{b / 2**20:.2f}" for b in (block.weight_bytes, m.activation_bytes, m.output_bytes))
        table.add_row(block.name, *times, *sizes)
    console = Console()
    console.print(table)
    level = cluster.levels[0]
    console.print(
        f"{level.size} device(s) with {cluster.device.memory_bytes / 2**30:.1f} GiB each; between neighbours "
        f"{level.bandwidth_bytes_per_s / 1e9:.2f} GB/s after {level.latency_s * 1e6:.0f} us"
    )
