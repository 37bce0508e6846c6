"""The planners' options as flags, the same for every command that asks a planner."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any

import typer

from pipeplan.planners.problem import Options

_FLAGS: dict[str, Any] = {
    "microbatch_size": Annotated[int | None, typer.Option(help="Samples in a microbatch; default: the best.")],
    "schedule": Annotated[str | None, typer.Option(help="Plan for this schedule only.")],
    "stages": Annotated[int | None, typer.Option(help="The number of stages; default: the best.")],
    "recompute": Annotated[
        bool | None, typer.Option("--recompute/--no-recompute", help="On all stages or none; default: each as is best.")
    ],
    "synchronisation": Annotated[str | None, typer.Option(help="pipedream: parameter-server or all-reduce.")],
    "memory": Annotated[str, typer.Option(help="How memory is accounted: training or paper.")],
    "optimizer": Annotated[str, typer.Option(help="sgd, momentum, adam or adamw.")],
    "recompute_factor": Annotated[float | None, typer.Option(help="2BW's c_extra; default: from the profile.")],
    "safe_batch": Annotated[bool, typer.Option("--safe-batch", help="The batch may be smaller, but not larger.")],
    "master_weights": Annotated[
        bool | None,
        typer.Option(
            "--master-weights/--no-master-weights",
            help="Gradients, weights and states in float32; default: for 16 bits.",
        ),
    ],
    "semantics": Annotated[str | None, typer.Option(help="pipedream: paper, or release as its authors' program.")],
    "compression_ratio": Annotated[float | None, typer.Option(help="release: count boundaries, so compressed.")],
    "straight": Annotated[bool, typer.Option("--straight", help="pipedream: one replica a stage.")],
    "fewer_machines": Annotated[bool, typer.Option("--fewer-machines", help="pipedream: leave devices idle.")],
    "cuts": Annotated[str | None, typer.Option(help="Of a graph: any, or single-tensor.")],
    "forced_cuts": Annotated[list[int], typer.Option("--force-cut", help="A stage begins with this block.")],
    "forbidden_cuts": Annotated[list[int], typer.Option("--forbid-cut", help="No stage begins with this block.")],
    "split_backward": Annotated[bool | None, typer.Option("--two-bp/--no-two-bp", help="Split the backward (2BP).")],
    "split_backward_half_way": Annotated[
        bool, typer.Option("--two-bp-half-way", help="auto: where 2BP is used, its memory-saving variant.")
    ],
    "as_if": Annotated[
        bool, typer.Option("--as-if", help="Plan as if the cluster's devices were the profile's; the plan says so.")
    ],
    "time_limit_s": Annotated[float | None, typer.Option(help="exact: return the best found by then.")],
}


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
