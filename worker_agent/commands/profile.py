"""`pipeplan-agent profile`: measures a model here, or estimates it for another device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeplan.cli.console import progress_lines, require_extra, typed_spec
from pipeplan.documents.alike import alike
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import dump, parse, require_place, write_document
from pipeplan.documents.forms import Form
from pipeplan.documents.profile import Profile, numbers
from pipeplan.errors import InvalidInputError, require
from pipeplan.protocol.estimates import FormsAsked
from pipeplan.protocol.jobs import ProfileTask

if TYPE_CHECKING:  # they need torch, which the command imports when it is called
    from worker_agent.profiler.datasheets import Datasheet
    from worker_agent.profiler.job import ProfileJob

Spec = "preset:NAME?... or package.module:factory?key=value&..."

MEASURING = ("autocast", "device", "clock", "warm_up_rounds", "rounds", "seconds")
"""Options that say how to measure."""

OF_FORMS = (
    *("tensor_degree", "context_degree", "expert_degree", "expert_tensor_degree"),
    *("most_tensor", "most_context", "most_expert", "most_devices"),
    *("sequence_parallel", "attention", "fusion", "precision"),
)
"""The options of forms to estimate: `estimates.FormsAsked`."""


def profile(
    context: typer.Context,
    model: Annotated[str, typer.Option(help=f"The model: hf:FAMILY?key=value&..., hf:config.json, {Spec}")],
    analytic: Annotated[
        str | None,
        typer.Option(help="Estimate instead of measuring: a datasheet's name (a100-80gb, h100-sxm, ...) or file."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help=f"The data: {Spec}; default: random (hf: at most 512 tokens a sequence)."),
    ] = None,
    loss: Annotated[str | None, typer.Option(help=f"The loss: {Spec}; default: by the targets' type.")] = None,
    microbatch_sizes: Annotated[str, typer.Option(help="Samples in a microbatch, several sizes.")] = "1,2,4,8",
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "float32",
    autocast: Annotated[
        str | None,
        typer.Option(help="bfloat16 or float16: what blocks with float32 weights compute in, as in a run with it."),
    ] = None,
    devices: Annotated[int, typer.Option(help="Devices to load at once, and to describe: GPUs, or cores.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    clock: Annotated[str, typer.Option(help="auto, processor, or wall for blocks that only wait.")] = "auto",
    warm_up_rounds: Annotated[int, typer.Option(help="Rounds that are not counted.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds that are counted, at least.")] = 5,
    seconds: Annotated[
        float, typer.Option(help="Measure each size for so long; up to 10 times as long while rounds differ.")
    ] = 1.0,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, adam or adamw.")] = "sgd",
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens a sequence of hf: models' random data; default: at most 512.")
    ] = None,
    forms: Annotated[
        bool, typer.Option("--forms", help="With --analytic: add forms, in which several devices share blocks.")
    ] = False,
    tensor_degree: Annotated[int | None, typer.Option("--tensor", help="Only forms with this degree.")] = None,
    context_degree: Annotated[int | None, typer.Option("--context", help="Only forms with this degree.")] = None,
    expert_degree: Annotated[int | None, typer.Option("--expert", help="Only forms with this degree.")] = None,
    expert_tensor_degree: Annotated[
        int | None, typer.Option("--expert-tensor", help="Only forms with this tensor degree of experts.")
    ] = None,
    most_devices: Annotated[int | None, typer.Option(help="Forms whose stages have at most this many devices.")] = None,
    most_tensor: Annotated[int, typer.Option(help="Forms for powers of two up to this, where possible.")] = 8,
    most_context: Annotated[int, typer.Option(help="Forms for powers of two up to this, where possible.")] = 1,
    most_expert: Annotated[int, typer.Option(help="Forms for powers of two up to this, where possible.")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel/--no-sequence-parallel", help="With tensor parallelism: share tokens.")
    ] = True,
    attention: Annotated[str, typer.Option(help="Of forms: flash, or unfused as in 2021.")] = "flash",
    fusion: Annotated[
        str, typer.Option(help="Of forms: whose elementwise operations are fused: all blocks', the loss', or none.")
    ] = "all",
    precision: Annotated[
        str | None, typer.Option(help="Of forms: fp8, mxfp8 or nvfp4, in which linear layers compute.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the profile.")] = None,
    cluster_output: Annotated[Path | None, typer.Option(help="Where to write the cluster.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The profile on standard output, nothing else.")] = False,
) -> None:
    """Measures a model block by block, on this node's devices.

    The links between them are measured, too.

    With --analytic nothing is measured and no device is needed: times follow from the model's operations and a
    datasheet, and the profile says so. --devices is then the number of devices in the written cluster.
    """
    require_extra("worker")
    from worker_agent.profiler.job import ProfileJob

    require_place(output)
    require_place(cluster_output, field="cluster_output")
    typed_spec(model, field="model")
    try:
        sizes = [int(size) for size in microbatch_sizes.split(",")]
    except ValueError:
        rule = "must be whole numbers with commas between"
        raise InvalidInputError("microbatch_sizes", rule, microbatch_sizes) from None
    named = {name: value for name, value in context.params.items() if name in ProfileTask.model_fields}
    task = parse(ProfileTask, named | {"microbatch_sizes": sizes})
    _require_used(context)
    job = ProfileJob(task=task, loss=loss, device=device, clock=clock)
    cluster: Cluster | None
    with _progress_bar(f"{'measuring' if analytic is None else 'estimating'} {model}") as on_progress:
        if analytic is None:
            from worker_agent.profiler.launch import measure

            found, cluster = measure(job, on_progress)
        else:
            from worker_agent.profiler.analytic import estimate_cluster
            from worker_agent.profiler.datasheets import find_datasheet

            sheet = find_datasheet(analytic)
            cluster = estimate_cluster(sheet, devices) if cluster_output is not None else None
            found = _estimated(job, sheet, context.params, on_progress)
    _write(output, found, "output")
    if cluster is not None:
        _write(cluster_output, cluster, "cluster_output")
    if as_json:
        typer.echo(dump(asdict(found)))
    else:
        _show(found, cluster)


def _require_used(context: typer.Context) -> None:
    """Raises InvalidInputError for an option without effect, given the others."""
    values = context.params

    def refuse(names: Sequence[str], rule: str) -> None:
        for name in names:
            source = context.get_parameter_source(name)
            given = source is not None and source.name == "COMMANDLINE"
            require(not given, name.removesuffix("_degree"), rule, values[name])

    if values["analytic"] is not None:
        refuse(MEASURING, "cannot be given with --analytic, which measures nothing")
        if values["cluster_output"] is None:
            refuse(
                ("devices",), "is for --cluster-output here: with --analytic it counts the written cluster's devices"
            )
    else:
        refuse(("forms",), "is for --analytic: forms are estimated")
    if values["forms"]:
        refuse(("data", "loss"), "must be left out with --forms, which are of the model's own random tokens")
    else:
        refuse(OF_FORMS, "is for --forms, which says what devices do that share blocks")


def _estimated(
    job: "ProfileJob", sheet: "Datasheet", values: Mapping[str, Any], on_progress: Callable[[int, int, str], None]
) -> Profile:
    """The profile of the datasheet's device, with the forms that the command's options ask for."""
    import torch

    from worker_agent.profiler.analytic import estimate_profile
    from worker_agent.profiler.forms import profile_with_forms

    torch.set_num_threads(1)  # nothing is computed, and waiting threads take processor time
    sizes = job.task.microbatch_sizes
    if not values["forms"]:
        return estimate_profile(
            job, sheet, lambda size: on_progress(sizes.index(size), len(sizes), f"microbatches of {size}")
        )
    asked = FormsAsked(**{name.removesuffix("_degree"): values[name] for name in OF_FORMS})

    def on_form(done: int, every: int, form: Form) -> None:
        on_progress(done, every, f"tensor {form.tensor}, context {form.context}, expert {form.expert}")

    return profile_with_forms(asked, job.task, sheet, on_form)


@contextmanager
def _progress_bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error, or lines if that is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        with progress_lines() as say:
            yield lambda done, total, message: say(f"{what}: {done} of {total} steps, now {message}")
        return
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=None)
        yield lambda done, total, message: progress.update(bar, completed=done, total=total, description=message)


def _write(path: Path | None, content: Any, field: str) -> None:
    if path is not None:
        write_document(path, dump(asdict(content)), field=field)


def _show(found: Profile, cluster: Cluster | None) -> None:
    """A table of the largest microbatch size, and the devices' properties."""
    from rich.console import Console
    from rich.table import Table

    from pipeplan.formats import seconds, several, size

    microbatch_size = found.microbatch_sizes[-1]
    how = " (estimated)" if found.estimated else ""
    arithmetic = numbers(found.dtype, found.autocast)
    table = Table(
        title=f"{found.model.name} on {found.device.name}, {arithmetic}, microbatches of {microbatch_size}{how}"
    )
    table.add_column("block")
    for heading in ("forward", "backward", "weights", "kept", "output"):
        table.add_column(heading, justify="right")
    rows = []
    for block, m in zip(found.blocks, found.at(microbatch_size), strict=True):
        held = (block.weight_bytes, m.activation_bytes, m.output_bytes)
        rows.append((seconds(m.forward_s), seconds(m.backward_s), *map(size, held)))
    for start, _, name in alike([block.name for block in found.blocks], rows):
        table.add_row(name, *rows[start])
    console = Console()
    console.print(table)
    if found.estimated:
        console.print("estimated: times are computed from the device's datasheet, not measured")
    elif found.method is not None and found.method.standard_error is not None:
        error = f"{found.method.standard_error:.1%}"
        console.print(f"measured in {found.method.rounds} rounds: a round's mean time has a standard error of {error}")
    if cluster is None:
        return
    level = cluster.levels[0]
    devices = f"{several(level.size, 'device')} with {size(cluster.device.memory_bytes)}"
    if level.size > 1:
        link = f"{level.bandwidth_bytes_per_s / 1e9:.2f} GB/s after {seconds(level.latency_s)}"
        devices = f"{devices} each; between neighbours {link}"
    console.print(devices)
