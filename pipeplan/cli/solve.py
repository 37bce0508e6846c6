"""`pipeplan solve`: plans offline, from a profile in a file or from a model that is estimated (`cli.model`).

Other commands that ask a planner share the planners' options as flags (`takes_options`), and the progress of a search
on standard error (`shown`, `waiting`).
"""

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from pipeplan.cli import completion
from pipeplan.cli.calibrate import read_calibration
from pipeplan.cli.clusters import ClusterName, read_cluster
from pipeplan.cli.console import INFEASIBLE, working
from pipeplan.cli.model import (
    ModelDtype,
    ModelPrecision,
    ModelSpec,
    NoCache,
    SequenceLength,
    estimated_profiles,
    model_asked,
)
from pipeplan.documents.degrees import ANY_OFFLOAD, OFFLOADS
from pipeplan.documents.engines import ENGINES, OUR_RUNTIME, SHARDINGS
from pipeplan.documents.files import dump, read, require_place, write_document
from pipeplan.documents.plan import Infeasible
from pipeplan.documents.profile import Profile
from pipeplan.errors import require, require_one_of
from pipeplan.formats import four_digits, spoken_document
from pipeplan.planners.problem import Observer, Options, PlanningProblem, SearchProgress
from pipeplan.planners.solve import PLANNERS
from pipeplan.planners.solve import solve as ask
from pipeplan.protocol.jobs import Job
from pipeplan.protocol.plans import CHOICES
from pipeplan.schedules.registry import schedule_asked

PlannerName = Annotated[
    str, typer.Option("--planner", help=", ".join(PLANNERS), autocompletion=completion.names(PLANNERS))
]

_HELP = {
    "microbatch_size": "Samples in a microbatch; default: the best.",
    "schedule": "Plan for this schedule only: its name, or package.module:Class of your own.",
    "stages": "The number of stages, or of ranks with several; default: the best.",
    "chunks": "exact, auto: the stages that a rank holds, in 1f1b-interleaved; default: the best.",
    "recompute": "On all stages or none; default: the best by stage, with gpipe all.",
    "recompute_unit": "What to run again: stage, block; other engines: modules, attention or operation; default: best.",
    "synchronisation": "pipedream: all-reduce, or parameter-server as in the paper; default: all-reduce.",
    "memory": "How memory is accounted: training or paper.",
    "optimizer": "sgd, momentum, adam or adamw; default: sgd, for other engines adamw.",
    "recompute_factor": "2BW's c_extra; default: from the profile.",
    "safe_batch": "The batch may be smaller, but not larger.",
    "master_weights": "Gradients, weights and states in float32; default: for 16 bits.",
    "semantics": "Compare by played streams, paper (closed forms) or release (pipedream); default: played.",
    "compression_ratio": "release: count boundaries compressed by this ratio.",
    "straight": "pipedream: one replica a stage.",
    "fewer_machines": "pipedream: leave devices idle.",
    "cuts": "Cuts of a graph: any (default), or single-tensor.",
    "forced_cuts": "A stage begins at this block (place).",
    "forbidden_cuts": "No stage begins at this block (place).",
    "split_backward": "auto: a split backward (2BP) where it is faster.",
    "split_backward_half_way": "auto: where 2BP is used, its memory-saving variant.",
    "synchronous": "Only schedules that train as one process does: no gradient is late.",
    "as_if": "Plan as if the cluster's devices were the profile's; the plan says so.",
    "engine": f"What runs the plan: {', '.join(ENGINES)}; default: {OUR_RUNTIME}.",
    "tensor": "Devices that share a block's matrices; default: the best.",
    "sequence_parallel": "With tensor: share tokens; default: on.",
    "context": "Devices that share a sequence; default: the best.",
    "expert": "Groups of devices that share a block's experts; default: the best.",
    "expert_tensor": "The experts' own tensor degree: 1 or that degree; default: the best.",
    "data": "Replicas of the pipeline; default: as many as there may be.",
    "sharding": f"The states that replicas share: {', '.join(SHARDINGS)}; default: the best.",
    "replicate": "fsdp: groups of replicas, each of which shares the states (HSDP); default: the best.",
    "graphs": "megatron: launch layers as CUDA graphs; default: the best.",
    "a2a_overlap": "megatron: run experts' all-to-all beside another microbatch's compute.",
    "offload": f"What to keep in the host's memory: {', '.join(OFFLOADS)}, or {ANY_OFFLOAD}, the best of "
    "these; default: nothing, if any plan fits so.",
    "offload_share": "The share of the layers whose activations are offloaded: above 0, at most 1; default: best.",
    "time_limit_s": "exact: return the best found by then.",
}
"""What the flag of each field of `Options` is for."""

_DECLARED = {
    "forced_cuts": "--force-cut",
    "forbidden_cuts": "--forbid-cut",
    "split_backward": "--two-bp/--no-two-bp",
    "split_backward_half_way": "--two-bp-half-way",
}
"""The flags whose names differ from their fields."""

_GROUPS = {
    "Pipeline": "microbatch_size schedule synchronous stages chunks safe_batch semantics straight fewer_machines "
    "split_backward split_backward_half_way synchronisation compression_ratio as_if time_limit_s",
    "Memory": "recompute recompute_unit recompute_factor memory optimizer master_weights",
    "Cuts": "cuts forced_cuts forbidden_cuts",
    "Other engines": "engine tensor sequence_parallel context expert expert_tensor data sharding replicate offload"
    " offload_share graphs a2a_overlap",
}
"""The headings of these flags in the help."""


_FLAGS: dict[str, Any] = {}
"""The flags, each of its field's type. One that may be left out has a form that switches it off, too."""

for _name, _kind in ((_each.name, get_type_hints(Options)[_each.name]) for _each in fields(Options)):
    _dashed = _name.replace("_", "-")
    _usual = {bool: f"--{_dashed}", bool | None: f"--{_dashed}/--no-{_dashed}"}.get(_kind)
    _declared = _DECLARED.get(_name, _usual)
    _option = typer.Option(*([_declared] if _declared else []), help=_HELP[_name])
    _option.rich_help_panel = next(_heading for _heading, _names in _GROUPS.items() if _name in _names.split())
    if _name in CHOICES:
        _option.autocompletion = completion.names(CHOICES[_name])
    _FLAGS[_name] = Annotated[list[int] if _kind == tuple[int, ...] else _kind, _option]


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Puts a flag for every field of `Options` in the place of the command's parameter `options`."""
    signature = inspect.signature(command, eval_str=True)
    flags = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=list(option.default) if isinstance(option.default, tuple) else option.default,
            annotation=_FLAGS[option.name],
        )
        for option in fields(Options)
    ]

    @wraps(command)
    def with_flags(**given: Any) -> None:
        values = {flag.name: given.pop(flag.name) for flag in flags}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        if values["schedule"] is not None:
            values["schedule"] = schedule_asked(values["schedule"]).name
        command(**given, options=Options(**values))

    kept = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.name != "options"
    ]
    parameters = [*kept, *flags]
    with_flags.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del with_flags.__wrapped__
    return with_flags


@contextmanager
def shown() -> Iterator[Observer]:
    """The observer of a search, which shows its progress on standard error."""
    with working("searching") as say:
        yield lambda progress: say(f"searching: {sentence(progress)}")


@contextmanager
def waiting() -> Iterator[Callable[[Job], None]]:
    """Shows the progress of a plan that a service makes as a job."""
    with working("asking") as say:

        def on_progress(job: Job) -> None:
            if job.state == "queued":
                say(f"job {job.id} waits for a solver")
            else:
                say(f"job {job.id}: " + (job.progress.message if job.progress else "searching"))

        yield on_progress


def sentence(progress: SearchProgress) -> str:
    """The best and the bound, as rates."""
    best = "none yet" if progress.best_s is None else f"{four_digits(1 / progress.best_s)} samples/s"
    bound = f", no plan beyond {four_digits(1 / progress.bound_s)}" if progress.bound_s > 0 else ""
    left = f"{progress.open_shapes} combinations open, {progress.spent:.1f} of {progress.limit:g} s"
    return f"best {best}{bound}; {left}"


@takes_options
def solve(
    cluster: ClusterName,
    batch_size: Annotated[int, typer.Option(help="Samples in a batch.")],
    options: Options,
    profile: Annotated[
        list[Path] | None, typer.Option(help="The profile's file; for unequal devices one for each type.")
    ] = None,
    model: ModelSpec = None,
    sequence_length: SequenceLength = None,
    dtype: ModelDtype = None,
    precision: ModelPrecision = None,
    no_cache: NoCache = False,
    planner: PlannerName = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    calibration: Annotated[Path | None, typer.Option(help="Corrects the costs: `pipeplan calibrate` wrote it.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write the document to this file.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="For other engines: why each degree has its value.")
    ] = False,
) -> None:
    """Finds the fastest plan that fits. If none does, it shows by how much (exit status 3).

    Costs come from --profile, measured or estimated before, or from --model, which is estimated now for the cluster's
    devices by their datasheets.
    """
    from pipeplan.cli.plan_tables import show_choices, show_reasons, show_solution

    require_place(output)
    require_one_of(PLANNERS, "planner", planner)
    ours, rule = options.engine in (None, OUR_RUNTIME), "is for the degrees of another engine: name it with --engine"
    require(not explain or not ours, "explain", rule, explain)
    rule = "must be left out with --json: the document has the choices"
    require(not explain or not as_json, "explain", rule, explain)
    asked = model_asked(
        model, profile, sequence_length=sequence_length, dtype=dtype, precision=precision, no_cache=no_cache
    )
    where, calibrated = read_cluster(cluster), read_calibration(calibration)
    if asked is not None:
        profiles = estimated_profiles(asked, where, batch_size, options)
    else:
        profiles = tuple(read(Profile, each) for each in profile or ())
    problem = PlanningProblem(
        profile=profiles[0],
        cluster=where,
        batch_size=batch_size,
        options=options,
        calibration=calibrated,
        other_profiles=profiles[1:],
    )
    started_s = time.perf_counter()
    with shown() as observe:
        answer = ask(planner, problem, observe)
    document = dump(spoken_document(answer) | {"solve_time_s": time.perf_counter() - started_s})
    if output is not None:
        write_document(output, document)
    if as_json:
        typer.echo(document)
    if isinstance(answer, Infeasible):
        show_reasons(answer)  # on standard error, with --json too
        raise SystemExit(INFEASIBLE)
    if not as_json:
        show_solution(answer)
        if explain:
            show_choices(answer)
