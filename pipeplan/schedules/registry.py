"""Registry: all schedules by name, and the program of a schedule for a pipeline.

Pipeline and placement in, one stream per worker out.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from pipeplan.documents.plan import Worker
from pipeplan.errors import InvalidInputError, not_one_of, require
from pipeplan.programs.communicate import communicate, with_exchanges
from pipeplan.programs.instructions import Backward, BackwardInput, Instruction, recompute
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.program import Program, Stream, checkpoint, pipelines_in_a_row
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.data_parallel import DataParallel, DataParallelASP
from pipeplan.schedules.dual_pipe_v import DualPipeV
from pipeplan.schedules.gpipe import GPipe
from pipeplan.schedules.interleaved import Interleaved
from pipeplan.schedules.naive import Naive
from pipeplan.schedules.one_f_one_b import OneFOneB
from pipeplan.schedules.pipedream import PipeDream, VerticalSync
from pipeplan.schedules.two_bw import TwoBW
from pipeplan.schedules.v_half import VHalf
from pipeplan.schedules.zb_h1 import ZBH1
from pipeplan.schedules.zb_v import ZBV

GROUP = "pipeplan.schedules"
"""The entry-point group of other packages' schedules: a schedule's name = its class."""

MOST_CHARACTERS = 32

_BACKWARD = (Backward, BackwardInput)

_KNOWN: dict[str, Schedule] = {}
"""By name."""


def register(schedule: Schedule) -> Schedule:
    """Registers a schedule by its name, and returns the one registered under this name: the first of its class.

    Raises InvalidInputError for a name that another schedule has.
    """
    name = schedule.name
    plain = 0 < len(name) <= MOST_CHARACTERS and name.isascii() and all(c.isalnum() or c in "-_." for c in name)
    rule = f"must name a schedule by at most {MOST_CHARACTERS} letters, digits, '-', '_' and '.'"
    require(plain, "schedule", rule, name)
    known = _KNOWN.setdefault(name, schedule)
    require(type(known) is type(schedule), "schedule", f"must have a name of its own: {known!r} exists already", name)
    return known


for built_in in (
    Naive(),
    DataParallel(),
    DataParallelASP(),
    GPipe(),
    OneFOneB(),
    PipeDream(),
    TwoBW(),
    VerticalSync(),
    ZBH1(),
    Interleaved(),
    ZBV(),
    VHalf(),
    DualPipeV(),
):
    register(built_in)

BUILT_IN = tuple(_KNOWN)
"""The names of our own schedules."""


def schedule_named(name: str) -> Schedule:
    """The schedule of this name: ours, a registered one, or one of an installed package.

    Raises InvalidInputError for an unknown name. All code that plays, prices, plans or runs a schedule calls this.
    """
    known = _KNOWN.get(name)
    if known is not None:
        return known
    for entry in installed():
        if entry.name == name:
            try:
                found = entry.load()
            except Exception as error:  # other people's modules may raise anything
                rule = f"must be installed as {entry.value}, which cannot be loaded ({type(error).__name__}: {error})"
                raise InvalidInputError("schedule", rule, name) from error
            made = _made(found, entry.value)
            require(made.name == name, "schedule", f"must be the name of {entry.value}, which is {made.name}", name)
            return register(made)
    raise not_one_of(schedule_names(), "schedule", name, ", or your own by --schedule package.module:Class")


def schedule_names() -> tuple[str, ...]:
    """All names, ours first."""
    return tuple(dict.fromkeys((*_KNOWN, *(entry.name for entry in installed()))))


def with_whole_backward(name: str) -> str:
    """The schedule of the same order with a whole backward, for a zero-bubble schedule; any other schedule itself."""
    return next((each for each in BUILT_IN if _KNOWN[each].zero_bubble == name), name)


def order_of(name: str) -> tuple[int, str]:
    """The rank of a schedule among equally good ones: ours in our order, then the others by name."""
    return (BUILT_IN.index(name), "") if name in BUILT_IN else (len(BUILT_IN), name)


@cache
def installed() -> tuple[EntryPoint, ...]:
    """The schedules of installed packages, looked up once, but not loaded."""
    return tuple(entry_points(group=GROUP))


def schedule_asked(text: str) -> Schedule:
    """The schedule that a user names on a command line: by name, or as `package.module:Class`, which is imported.

    The current directory is searched first, as by `python -m`. It runs that module's code: never call it with the text
    of a document. Raises InvalidInputError if it does not name a schedule.
    """
    if ":" not in text:
        return schedule_named(text)
    module, _, attribute = text.partition(":")
    plain = bool(module and attribute) and not module.startswith(".")
    require(plain, "schedule", "must name a class as package.module:Class", text)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:  # other people's modules may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise InvalidInputError("schedule", f"must name a class that can be imported ({reason})", text) from error
    return register(_made(found, text))


def _made(found: object, reference: str) -> Schedule:
    """The one instance of a class. Raises InvalidInputError for anything but a complete schedule."""
    is_schedule = isinstance(found, type) and issubclass(found, Schedule)
    require(is_schedule, "schedule", "must name a subclass of pipeplan.programs.schedule.Schedule", reference)
    whole = not getattr(found, "__abstractmethods__", ()) and all(hasattr(found, each) for each in ("name", "source"))
    require(whole, "schedule", "must name a schedule that has a name, a source and a method compute", reference)
    try:
        made: Schedule = found()  # type: ignore[operator]  # a class, as checked above
    except TypeError as error:
        raise InvalidInputError("schedule", f"must be made without arguments ({error})", reference) from error
    return made


def build(
    schedule: Schedule | str,
    pipeline: Pipeline,
    placement: Sequence[Worker] = (),
    *,
    checkpoint_every: int = 0,
    implied: bool = False,
) -> Program:
    """Generates the streams of a schedule, or of the one of this name, for a pipeline.

    `placement` lists the workers by rank (default: pipeline after pipeline, stage by stage). With `checkpoint_every` n,
    every stage writes a checkpoint after each n-th batch and after the last. With `implied` the streams of one of our
    schedules do not list their transfers, which follow from the compute: a price needs no more (`simulation.total`).
    Raises InvalidInputError for a schedule that does not exist or does not fit the pipeline, and ScheduleError where
    the streams of a schedule that is not ours break a law.
    """
    known = schedule_named(schedule) if isinstance(schedule, str) else schedule
    equal = len(set(pipeline.replicas)) == 1
    rule = f"must be the same on every stage for {known.name}"
    require(equal or known.update == "minibatch", "replicas", rule, pipeline.replicas)
    rule = f"must be 1 for {known.name}, in which a rank has one stage"
    require(pipeline.chunks == 1 or known.chunked, "chunks", rule, pipeline.chunks)
    rule = f"must be 2 for {known.name}, whose ranks hold two stages in a V"
    require(pipeline.chunks == 2 or not known.v_shaped, "chunks", rule, pipeline.chunks)
    by_block = [stage for stage in range(pipeline.depth) if pipeline.recomputes_by_block(stage)]
    rule = f"must be stage for {known.name}, which splits the backward: by block it is done as a whole"
    require(not by_block or not known.splits_backward, "recompute_unit", rule, "block")
    pipeline = replace(pipeline, v_shaped=known.v_shaped)
    workers = tuple(placement) or pipelines_in_a_row(pipeline.replicas[: pipeline.span])
    ranks = {worker: rank for rank, worker in enumerate(workers)}

    def stream(rank: int, worker: Worker) -> Stream:
        compute: Iterable[Instruction] = known.compute(pipeline, worker)
        if any(pipeline.recompute):
            compute = _recompute(compute, pipeline, worker.stage)
        if checkpoint_every:
            compute = checkpoint(compute, known, pipeline, worker.stage, checkpoint_every)
        complete = with_exchanges if implied else communicate
        instructions = tuple(complete(compute, pipeline, worker, ranks, in_turn=known.update == "replica"))
        return Stream(rank=rank, stage=worker.stage, replica=worker.replica, instructions=instructions)

    program = Program(
        schedule=known,
        pipeline=pipeline,
        streams=tuple(stream(rank, worker) for rank, worker in enumerate(workers)),
    )
    if known.name not in BUILT_IN:  # tests check ours
        from pipeplan.programs.check import check, check_claims  # and numpy, without which a query starts sooner

        check(program)
        check_claims(program)
    return program


def _recompute(instructions: Iterable[Instruction], pipeline: Pipeline, first_stage: int) -> Iterable[Instruction]:
    """The pass that runs the forward again right before each backward, on the stages that recompute as a whole."""
    stages = [pipeline.stage_of(first_stage, chunk) for chunk in range(pipeline.chunks)]
    recomputes = [pipeline.recomputes(stage) and not pipeline.recomputes_by_block(stage) for stage in stages]
    found: list[Instruction] = []
    for instruction in instructions if any(recomputes) else ():
        if isinstance(instruction, _BACKWARD) and recomputes[instruction.chunk]:
            found.append(recompute(instruction.microbatch, instruction.version, instruction.chunk))
        found.append(instruction)
    return found if any(recomputes) else instructions
