"""Asked: what every planner checks of a problem before it plans."""

from dataclasses import fields

from planner_service.core.errors import LEAST_AMOUNT, require
from planner_service.core.planner.problem import Options, Problem
from planner_service.core.profile import Measurement

ALWAYS_USED = ("memory", "optimizer", "master_weights", "as_if")
"""Options that every planner has a use for."""

MAX_BLOCKS = 10_000
"""Tables of stages grow with the blocks, and so does every split that is tried."""


def refuse_unused(planner: str, options: Options, used: tuple[str, ...]) -> None:
    """Raises InvalidInputError for an option that is set and that the planner has no use for."""
    for option in fields(options):
        value = getattr(options, option.name)
        fine = value == option.default or option.name in (*used, *ALWAYS_USED)
        require(fine, option.name, f"is not an option of the planner {planner}", value)


def require_schedule(options: Options, allowed: tuple[str, ...], planner: str) -> None:
    """Raises InvalidInputError if the user asks for a schedule that the planner does not plan for."""
    rule = f"must be one of {', '.join(allowed)} for the planner {planner}"
    require(options.schedule is None or options.schedule in allowed, "schedule", rule, options.schedule)


def require_recompute(options: Options, planner: str) -> None:
    """Raises InvalidInputError if the user forbids the recomputation that a planner or schedule lives on."""
    require(options.recompute is not False, "recompute", f"cannot be turned off for {planner}", options.recompute)


def require_stages(problem: Problem) -> None:
    """Raises InvalidInputError for more stages than blocks or devices."""
    stages = problem.options.stages
    if stages is not None:
        blocks, devices = len(problem.profile.blocks), problem.cluster.devices
        require(stages <= blocks, "stages", f"must not be more stages than blocks ({blocks})", stages)
        require(stages <= devices, "stages", f"must not be more stages than devices ({devices})", stages)


def require_few_blocks(problem: Problem) -> None:
    """Raises InvalidInputError for more blocks than a search can split in a few seconds."""
    blocks = len(problem.profile.blocks)
    require(blocks <= MAX_BLOCKS, "profile.blocks", f"must be at most {MAX_BLOCKS} for this planner", blocks)


def measured_at(problem: Problem, microbatch_size: int) -> tuple[Measurement, ...]:
    """The blocks at this size. Raises InvalidInputError if they take no time at all, or it was not measured."""
    sizes = problem.profile.microbatch_sizes
    rule = f"must be one of the measured sizes {list(sizes)}"
    require(microbatch_size in sizes, "microbatch_size", rule, microbatch_size)
    blocks = problem.profile.at(microbatch_size)
    total_s = sum(block.compute_s for block in blocks)
    require(total_s >= LEAST_AMOUNT, "profile.blocks", "must take some time together, forward and backward", total_s)
    return blocks
