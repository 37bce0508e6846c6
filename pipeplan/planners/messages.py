"""Messages: the messages that PipeDream's stages have in transit, by the replicas of their neighbours."""

from collections.abc import Sequence
from dataclasses import replace

from pipeplan.costs.graph import boundaries
from pipeplan.costs.memory import Copies, edges_to, training_copies
from pipeplan.documents.plan import Stage
from pipeplan.planners.problem import PlanningProblem
from pipeplan.programs.schedule import Schedule


def messages_of(
    laws: Schedule,
    before: int,
    own: int,
    after: int,
    downstream: int,
    *,
    recompute: bool = False,
    unit: str = "stage",
) -> Copies:
    """The copies of a stage of `own` replicas, whose buffers are those of its messages (`training_copies`).

    `before` and `after` are the replicas of the neighbouring stages, 0 where there is none. `downstream` counts the
    workers of all later stages.
    """
    held_before = None
    if before:
        held = -(-(before + own + downstream) // before)
        held_before = -(-held // edges_to(before, own))
    return training_copies(
        laws,
        "sgd",
        recompute=recompute,
        held=-(-(own + downstream) // own),
        held_before=held_before,
        sends_on=after > 0,
        edges_before=edges_to(own, before) if before else 1,
        edges_after=edges_to(own, after) if after else 1,
        microbatches=1,
        unit=unit,
    )


def with_messages(
    problem: PlanningProblem,
    stages: Sequence[Stage],
    laws: Schedule,
    microbatch_size: int,
    order: Sequence[int] | None = None,
) -> tuple[Stage, ...]:
    """PipeDream's stages, each with the upper bound on a worker's messages in transit.

    A minibatch is a microbatch. The papers' accounting knows no messages.
    """
    if problem.options.memory == "paper":
        return tuple(stages)
    counted = []
    replicas = [0, *(stage.replicas for stage in stages), 0]
    for place, moved in enumerate(boundaries(problem.profile, microbatch_size, stages, order)):
        stage, memory = stages[place], stages[place].memory
        before, own, after = replicas[place : place + 3]
        downstream = sum(replicas[place + 2 :])
        unit = stage.recompute_unit
        count = messages_of(laws, before, own, after, downstream, recompute=stage.recompute, unit=unit)
        if memory is not None:
            buffers = count.buffer_bytes(moved.received_bytes, moved.sent_bytes, moved.kept_output_bytes)
            memory = replace(memory, buffers=buffers)
            stage = replace(stage, memory=memory, memory_bytes=memory.total)
        counted.append(stage)
    return tuple(counted)


def excess_bytes(problem: PlanningProblem, stages: Sequence[Stage]) -> list[int]:
    """By how many bytes each stage exceeds its device; negative where it fits."""
    types = {device.name: device for device in problem.cluster.types}
    only = problem.cluster.types[0]
    devices = [types.get(stage.device or only.name, only) for stage in stages]
    return [stage.memory_bytes - device.usable_bytes for stage, device in zip(stages, devices, strict=True)]
