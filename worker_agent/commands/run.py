"""`pipeplan-agent run`: executes a plan here, and shows its progress on standard error.

On a terminal the progress is one line that is redrawn; elsewhere it is a new line now and then.
"""

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeplan.cli.console import EVERY_S, require_extra, typed_spec
from pipeplan.documents.files import read
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Plan
from pipeplan.errors import EndedBySignalError, InvalidInputError, require, require_count
from pipeplan.formats import change
from pipeplan.protocol.runs import has_steps
from pipeplan.protocol.training import DESCRIBED_RATES
from pipeplan.schedules.registry import schedule_asked
from pipeplan.simulation.report import Compared

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from worker_agent.engine.processes import Place
    from worker_agent.runtime.job import RunJob
    from worker_agent.runtime.run import RunOutcome
    from worker_agent.runtime.watch import OnProgress, RunProgress

MEETING_S = 900
"""How long a node waits for the others, because they may be started one after another."""

ROOM_FOR_A_BAR = 150
"""Columns of a terminal; narrower ones show only words, on two lines if necessary."""


def run(
    context: typer.Context,
    plan: Annotated[Path, typer.Option(help="The plan's document, as `pipeplan solve --json` prints it.")],
    model: Annotated[
        str,
        typer.Option(
            help="The model: hf:FAMILY?key=value&..., hf:config.json, preset:NAME?... or package.module:factory?..."
        ),
    ],
    data: Annotated[str, typer.Option(help="The data: preset:NAME?... or package.module:factory?key=value&...")],
    steps: Annotated[int, typer.Option(help="Batches to train, including those before a resumed checkpoint.")],
    out: Annotated[Path, typer.Option(help="The run's folder: run.json, trace.json, checkpoints, logs.")],
    seed: Annotated[int, typer.Option(help="For the weights, the dropout and the data's order.")] = 0,
    loss: Annotated[str | None, typer.Option(help="The loss: package.module:function.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", "--lr", help=f"The largest rate; default: {DESCRIBED_RATES}.")
    ] = None,
    lr_schedule: Annotated[
        str, typer.Option(help="How the learning rate decays after the warm-up: constant, linear or cosine.")
    ] = "constant",
    warmup_steps: Annotated[int, typer.Option(help="Steps in which the learning rate rises to its full value.")] = 0,
    decay_steps: Annotated[
        int | None,
        typer.Option(help="The step at which the learning rate has become 0; default: --steps."),
    ] = None,
    clip_norm: Annotated[
        float | None, typer.Option(help="The largest norm of the whole model's gradient; larger ones are scaled to it.")
    ] = None,
    autocast: Annotated[
        str | None,
        typer.Option(help="bfloat16 or float16: what blocks compute in with float32 weights; default: the plan's."),
    ] = None,
    loss_scale: Annotated[
        float | None,
        typer.Option(help="The first dynamic loss scale; default: 65536 with --autocast float16, else none."),
    ] = None,
    batch_norm: Annotated[
        str | None,
        typer.Option(help="Running statistics of each microbatch or minibatch; default: minibatch for gpipe."),
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="The plan's schedule where it is your own, as package.module:Class.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, momentum, adam, adamw; default: the plan's.")] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(help="Steps between checkpoints, and at the end; default: a tenth, 10 at least; 0: none."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the folder's newest good checkpoint, with the options of the folder's run.",
        ),
    ] = False,
    change: Annotated[
        list[str] | None,
        typer.Option(
            help="An option, such as learning-rate, that a resumed run takes from this command line and not from the "
            "folder; may be repeated."
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often to start again from the newest checkpoint when a rank is lost.")
    ] = 0,
    nodes: Annotated[
        int, typer.Option(min=1, help="Nodes that run this command together, with one --out that all of them see.")
    ] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="This node's number among them.")] = 0,
    master_addr: Annotated[str | None, typer.Option(help="The address of node 0, for the others.")] = None,
    master_port: Annotated[int, typer.Option(min=1, max=65535, help="The port of node 0, for the others.")] = 29500,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    transport: Annotated[
        str,
        typer.Option(
            help="How GPUs exchange tensors: nccl, host (through the host; ranks may then share a GPU), or auto: nccl."
        ),
    ] = "auto",
    timeout_s: Annotated[float, typer.Option(help="Seconds that a rank waits for another one.")] = 300.0,
    concatenate: Annotated[
        bool, typer.Option("--concatenate", help="2BP: weight gradients of several microbatches as one product.")
    ] = False,
    recorded_batches: Annotated[
        int | None,
        typer.Option(
            "--record",
            help="Steps at the start, and again at the end, of which every instruction is recorded and drawn; default: "
            "all steps of a run that is not too long for it.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The report on standard output, nothing else.")] = False,
) -> None:
    """Trains a model as a plan says.

    torchrun starts the ranks, on this node or together with others.

    Node 0 of several writes the report; the others give it their ranks, and take --resume and --json from it.
    """
    require_extra("worker")
    from worker_agent.runtime.job import RunDirectory, RunJob, holding
    from worker_agent.runtime.resume import stored_job
    from worker_agent.runtime.run import execute, execute_again, take_part

    for field, text in (("model", model), ("data", data), ("loss", loss)):
        if text is not None:
            typed_spec(text, field=field)
    require_count("steps", steps)  # the job's intervals follow from it
    asked = [name.lstrip("-").replace("-", "_") for name in change or ()]
    changed = tuple("learning_rate" if name == "lr" else name for name in asked)
    require(resume or not changed, "change", "must be given with --resume: a new run takes all options", changed)
    if resume:  # its schedule may be the user's own, which the plan names
        stored_job(RunDirectory(root=out.resolve()).job, lambda _: None)
    chosen = _chosen(plan, optimizer, schedule)
    place = _place(chosen, nodes, node_rank, master_addr, master_port)
    rule = "must be 0 among several nodes: start all of them again with --resume"
    require(place is None or max_restarts == 0, "max_restarts", rule, max_restarts)
    named = {field.name: context.params[field.name] for field in fields(RunJob) if field.name in context.params}
    job = RunJob(
        **named
        | {
            "plan": chosen,
            "checkpoint_every": max(steps // 10, 10) if checkpoint_every is None else checkpoint_every,
            "out": str(out.resolve()),
            "schedules": (schedule,) if schedule is not None and ":" in schedule else (),
        }
    )
    with _going_on(context):
        if place is not None and place.node_rank > 0:
            with shown(job, quiet=quiet) as on_progress:
                take_part(job, on_progress, place, tell=_tell)
            return
        with holding(job.directory.root):
            job = _resumed(job, context, changed) if resume else _begun(job, plan)
            with shown(job, quiet=quiet) as on_progress:
                if place is not None:
                    outcome = execute(job, on_progress, place, tell=_tell)
                else:
                    outcome = execute_again(job, on_progress, restarts=max_restarts, tell=_tell)
    if as_json:
        typer.echo((out / "run.json").read_text())
    else:
        _show(job, outcome)


def _chosen(plan: Path, optimizer: str | None, schedule: str | None) -> Plan:
    """The file's plan, with the requested optimizer if there is one.

    Raises InvalidInputError unless a schedule of the user's own is the plan's.
    """
    chosen = read(Plan, plan)
    if schedule is not None:
        own = schedule_asked(schedule)
        require(own.name == chosen.schedule, "schedule", f"must be the plan's schedule, {chosen.schedule}", own.name)
    return chosen if optimizer is None else replace(chosen, optimizer=optimizer)


def _options(context: typer.Context) -> dict[str, tuple[str, Any]]:
    """The options that were given, by field: each as it is typed, with its value."""
    given = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            given[parameter.name or ""] = parameter.opts[0], context.params[parameter.name or ""]
    return given


@contextmanager
def _going_on(context: typer.Context) -> Iterator[None]:
    """Adds the command that resumes a run to the error of the signal that ended it."""
    try:
        yield
    except EndedBySignalError as error:
        words = ["pipeplan-agent", "run"]
        for field, (option, value) in _options(context).items():
            if field not in ("resume", "change"):
                words += [option] if value is True else [option, str(value)]
        command = shlex.join([*words, "--resume"])
        raise EndedBySignalError(f"{error}; to go on: {command}", error.signal) from error


def _resumed(job: "RunJob", context: typer.Context, changed: Sequence[str]) -> "RunJob":
    """The job from the folder's newest good checkpoint, as the folder says."""
    from worker_agent.runtime.resume import resumed

    job = resumed(job, tell=_tell, given=_options(context).keys(), changed=changed)
    if job.first_step == 0:
        _tell(f"no whole checkpoint in {job.directory.checkpoints}: starting at step 0")
    return job


def _begun(job: "RunJob", plan: Path) -> "RunJob":
    """The job, in a folder that holds nothing of a run. Raises InvalidInputError for a folder that holds one."""
    folder = job.directory
    used = has_steps(folder.root) or folder.checkpoints.exists()
    require(not used, "out", "must be a new folder, or be given with --resume", str(folder.root))
    other = folder.of_others(plan)
    require(other is None, "out", "must hold no other file by the name of a run's: move it", str(other))
    return job


@contextmanager
def shown(job: "RunJob", *, quiet: bool) -> Iterator["OnProgress"]:
    """The observer of a run's progress; with `quiet` it shows nothing."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        with redrawn(job, console) as on_progress:
            yield on_progress
    else:
        yield ProgressLines(
            lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False), time.monotonic
        )


@contextmanager
def redrawn(job: "RunJob", console: "Console") -> Iterator["OnProgress"]:
    """The same on a terminal: one line that is rewritten, and empty at the end."""
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    from worker_agent.runtime.watch import describe

    words = TextColumn("{task.description}", table_column=Column(no_wrap=False, overflow="fold"), markup=False)
    bars = [BarColumn()] if console.width >= ROOM_FOR_A_BAR else []
    with Progress(words, *bars, console=console, transient=True) as progress:
        bar = progress.add_task(f"starting {job.plan.workers} ranks", total=job.steps, completed=job.first_step)
        yield lambda now: progress.update(bar, completed=now.done, description=describe(now))


class ProgressLines:
    """A line `EVERY_S` after the first progress and from then on, and one at the end: logs stay short."""

    def __init__(self, write: Callable[[str], object], clock: Callable[[], float]) -> None:
        self._write = write
        self._clock = clock
        self._told_s: float | None = None

    def __call__(self, progress: "RunProgress") -> None:
        from worker_agent.runtime.watch import describe

        now_s = self._clock()
        if self._told_s is None:
            self._told_s = now_s
        if now_s - self._told_s >= EVERY_S or progress.done == progress.steps:
            self._told_s = now_s
            self._write(describe(progress))


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _place(plan: Plan, nodes: int, node_rank: int, address: str | None, port: int) -> "Place | None":
    """This node's place among several; None for a single node."""
    from worker_agent.agent.node import use_interface_towards
    from worker_agent.engine.processes import Place

    require(plan.workers % nodes == 0, "nodes", f"must divide the plan's {plan.workers} workers", nodes)
    require(node_rank < nodes, "node_rank", f"must be below the number of nodes ({nodes})", node_rank)
    if nodes == 1:
        return None
    if not address:
        raise InvalidInputError("master_addr", "must say where the other nodes reach node 0", address)
    use_interface_towards(address, port)
    return Place(
        node_rank=node_rank,
        nodes=nodes,
        address=address,
        port=port,
        meeting=content_id(plan),
        meeting_s=MEETING_S,
    )


def _show(job: "RunJob", outcome: "RunOutcome") -> None:
    from rich.console import Console
    from rich.table import Table

    from pipeplan.costs.memory import stages_by_rank
    from pipeplan.formats import all_seconds, all_sizes, four_digits, percent, seconds, several, why_missed

    def rates(*values: float) -> tuple[str, ...]:
        return tuple(four_digits(value) for value in values)

    report = outcome.report
    stages, steps = several(job.plan.depth, "stage"), several(report.steps, "step")
    title = f"{report.schedule}, {stages}, {steps} of {report.batch_size} samples"
    table = Table(title=title)
    for heading in ("", "predicted", "measured", "difference"):
        table.add_column(heading, justify="left" if not heading else "right")
    _row(table, "samples/s", report.throughput_samples_per_s, rates)
    again = report.repredicted
    if again is not None:
        _row(table, f"the same, from its first {seconds(again.elapsed_s)}", again.throughput_samples_per_s, rates)
    bubble = report.bubble_fraction
    points = f"{100 * (bubble.measured - bubble.predicted):+.1f} points"
    table.add_row("bubble", percent(bubble.predicted), percent(bubble.measured), points)
    for stage, held in zip(report.stages, stages_by_rank(job.plan), strict=True):
        of = f"stage{'s' * (len(held) > 1)} {', '.join(map(str, held))}"
        _row(table, f"{of}, busy a step", stage.busy_s_per_batch, lambda *times: all_seconds(times))
        if stage.peak_memory_bytes is None:
            table.add_row(f"{of}, peak memory", "", "unknown", "")
        else:
            _row(table, f"{of}, peak memory", stage.peak_memory_bytes, lambda *sizes: all_sizes(sizes))
    console = Console()
    console.print(table)
    if report.missed is not None:
        sentence = why_missed(report.throughput_samples_per_s, report.missed, report.ranks)
        console.print(sentence, soft_wrap=True, highlight=False)
        console.print(f"calibrate: pipeplan calibrate --profile P --cluster C --run {job.out}", soft_wrap=True)
    console.print(f"loss {report.losses[0]:.4f} -> {report.losses[-1]:.4f}; everything in {job.out}")


def _row(table: "Table", name: str, compared: Compared, shown: Callable[..., tuple[str, ...]]) -> None:
    """A row of the two values, which `shown` formats together."""
    difference = change(compared.error) if compared.predicted else ""
    table.add_row(name, *shown(compared.predicted, compared.measured), difference)
