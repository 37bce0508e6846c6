"""Predict: a plan's program, and the timeline that its costs give.

The runtime executes the same streams; here they are played with costs. If a run is too long to be played, its start,
its end and the summary of the whole run are predicted.
"""

from dataclasses import replace
from itertools import chain

from pipeplan.documents.engines import engine_named
from pipeplan.documents.plan import Plan
from pipeplan.errors import InvalidInputError
from pipeplan.programs.communicate import AmongStages, exchange_among_stages
from pipeplan.programs.overlap import overlap_exchanges
from pipeplan.programs.pipeline import pipeline_of
from pipeplan.programs.program import Program, repeat, short_batches
from pipeplan.programs.repeating import Repeating
from pipeplan.programs.timeline import Summary, Timeline, lengthened, summarise
from pipeplan.schedules.registry import BUILT_IN, build, schedule_named
from pipeplan.simulation.play import simulate
from pipeplan.simulation.split_backward import split_backward

TIES_APART = (
    "updates every stage by itself, but stages of this plan share weights, which must be updated together: "
    "no run executes it"
)
"""The reason, after a schedule's name, against plans of models with tied weights in `auto`; a warning elsewhere."""


def program_of(
    plan: Plan,
    *,
    batches: int,
    first_batch: int = 0,
    checkpoint_every: int = 0,
    among_stages: AmongStages | None = None,
    implied: bool = False,
) -> Program:
    """The plan's streams for the batches [first_batch, first_batch + batches), with 2BP's split if it has one.

    Exchanges among replicas overlap with other work, if the plan's engine allows it. Those `among_stages` are the
    plan's own, unless others are named. Transfers may be `implied` (`schedules.registry.build`), unless the backward is
    split.
    """
    pipeline = pipeline_of(plan, batches=batches, first_batch=first_batch)
    program = build(plan.schedule, pipeline, plan.placement, checkpoint_every=checkpoint_every, implied=implied)
    if plan.split_backward:
        program = split_backward(program, plan.costs, half_way=plan.split_backward_half_way)
    return with_exchanges(exchanging_among_stages(program, plan, among_stages), plan)


def exchanging_among_stages(program: Program, plan: Plan, wanted: AmongStages | None = None) -> Program:
    """The program with the wanted exchanges among stages (None: those of the plan's tied weights), and the seconds that
    the plan has for them.
    """
    if wanted is None:
        wanted = AmongStages() if keeps_ties_apart(plan) else AmongStages(tied=tuple(each.stages for each in plan.tied))
    return replace(exchange_among_stages(program, wanted), tied=plan.tied)


def keeps_ties_apart(plan: Plan) -> bool:
    """Whether stages share weights under a schedule that does not update them together: it cannot be run."""
    return bool(plan.tied) and schedule_named(plan.schedule).update != "batch"


def updates_late(plan: Plan) -> int:
    """Upper bound on the lateness of the plan's gradients, in updates; with 0 it trains as one process does."""
    laws = schedule_named(plan.schedule)
    return laws.updates_late(replace(pipeline_of(plan, batches=1), v_shaped=laws.v_shaped))


def with_exchanges(program: Program, plan: Plan) -> Program:
    """The program with gradients exchanged as by the plan's engine: overlapping the compute, or after it."""
    return overlap_exchanges(program) if engine_named(plan.engine).overlaps else program


def long_program_of(
    plan: Plan,
    *,
    batches: int,
    first_batch: int = 0,
    checkpoint_every: int = 0,
    among_stages: AmongStages | None = None,
) -> Program:
    """The same streams. For our own schedules only a few batches are stored, for others all."""
    pipeline = pipeline_of(plan, batches=batches, first_batch=first_batch)
    few = short_batches(pipeline)
    if batches <= few or plan.schedule not in BUILT_IN:  # when other schedules' batches repeat is not known
        return program_of(
            plan,
            batches=batches,
            first_batch=first_batch,
            checkpoint_every=checkpoint_every,
            among_stages=among_stages,
        )
    short = program_of(plan, batches=few, first_batch=first_batch, among_stages=among_stages)
    return repeat(short, batches=batches, checkpoint_every=checkpoint_every)


def predict(
    plan: Plan,
    *,
    batches: int,
    first_batch: int = 0,
    among_stages: AmongStages | None = None,
) -> Timeline:
    """The timeline that the plan's costs give for `batches` batches."""
    program = program_of(plan, batches=batches, first_batch=first_batch, among_stages=among_stages)
    return simulate(program, plan.costs)


def predict_ends(
    plan: Plan,
    *,
    batches: int,
    window: int,
    first_batch: int = 0,
    among_stages: AmongStages | None = None,
) -> tuple[Timeline, Summary]:
    """The first and the last `window` batches, as they would be in the timeline of all of them, and its summary.

    Twice `window` batches are played. The second half is taken as the run's end, later by the batches in the middle,
    each of which takes as long as the median one. Raises InvalidInputError for a window that does not fill the
    pipeline.
    """
    program = long_program_of(plan, batches=batches, first_batch=first_batch, among_stages=among_stages)
    played = predict(plan, batches=2 * window, first_batch=first_batch, among_stages=among_stages)
    summary = lengthened(summarise(played), batches)
    later_s = (batches - 2 * window) * summary.batch_s
    lanes = []
    for lane, stream in zip(played.lanes, program.streams, strict=True):
        instructions = stream.instructions
        if not isinstance(instructions, Repeating) or not instructions.settled < window < batches / 2:
            raise InvalidInputError("window", "must be more batches than fill the pipeline, less than half", window)
        last = instructions[instructions.start(batches - window) :]
        first = instructions.start(window)
        start_s, end_s = (
            tuple(chain(times[:first], (moment_s + later_s for moment_s in times[first:])))
            for times in (lane.start_s, lane.end_s)
        )
        executed = (*lane.instructions[:first], *last)
        lanes.append(replace(lane, instructions=executed, start_s=start_s, end_s=end_s))
    return replace(played, lanes=tuple(lanes)), summary
