"""Check: the laws that a program must keep before anything runs it."""

from pipeplan.documents.plan import Worker
from pipeplan.errors import ScheduleError
from pipeplan.programs.footprint import footprints
from pipeplan.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Checkpoint,
    Forward,
    Instruction,
    Recompute,
    ReduceGradients,
    ReduceNorm,
    ReduceTied,
    StartReduce,
    Update,
    microbatches_of,
)
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.program import Program, Stream
from pipeplan.programs.text import format_instruction

_WORK: dict[type[Instruction], tuple[str, ...]] = {
    Forward: ("forward",),
    Backward: ("backward", "backward of the weights"),
    BackwardInput: ("backward",),
    BackwardWeight: ("backward of the weights",),
}
"""The parts of a microbatch's work that each instruction does. Every stage does each part once."""


def check(program: Program) -> None:
    """Raises ScheduleError, naming rank and instruction, unless the program keeps these laws:

    - every worker computes exactly its own microbatches, each forward once and each backward once, in that order;
    - between two stages of one rank, where nothing is sent, the rank's order follows the microbatch's path;
    - a microbatch's forward, recomputation and backward name one weight version; it exists when it is used, and is
      the newest one for a schedule with a flush, at most `versions_behind` older for one without;
    - with vertical sync a microbatch runs on every stage on the version that it has on the input stage;
    - updates make versions one by one, from the first batch's to the last's; with a flush, an update comes only after
      every microbatch of its batch has completed; exchanges of gradients are for the version that comes next;
    - where stages meet, a rank has the gradients of all of its stages, and has updated none of them;
    - an update is made of exactly the gradients that its version stands for (`Schedule.update`), and all of them were
      computed on one weight version, with a flush the one before the update;
    - an exchange that is begun ahead is begun once, after the one before, next to the backward that completes the
      worker's own gradients, and is over before the update.

    The simulator, which plays the same streams, shows that sends and receives pair up without deadlock.
    """
    for stream in (part for whole in program.streams for part in program.stage_streams(whole)):
        _check_microbatches(program.pipeline, stream)
        updates = program.schedule.updates_a_batch(program.pipeline, stream.stage)
        batches = program.pipeline.batch_range()
        first, last = batches.start * updates, batches.stop * updates
        newest = _check_versions(program, stream, first)
        if newest != last:
            raise ScheduleError(f"rank {stream.rank} ends on version {newest}, but its batches make version {last}")
        _check_exchanges(stream, first)
        _check_updates(program, stream)
    for whole in program.streams:
        _check_way(program.pipeline, whole)
        _check_meetings(program.pipeline, whole)
    if not program.schedule.vertical_sync:
        return

    # Versions are compared by the minibatches that they hold: one a replica and update.
    replicas = program.pipeline.replicas
    at_the_input = {
        i.microbatch: i.version * replicas[0]
        for stream in program.streams
        if stream.stage == 0
        for i in stream.instructions
        if isinstance(i, Forward)
    }
    for stream in program.streams:
        own = replicas[stream.stage]
        for i in stream.instructions:
            if isinstance(i, Forward) and i.version != at_the_input[i.microbatch] // own:
                law = f"the input stage's version of this microbatch holds {at_the_input[i.microbatch]} minibatches"
                raise _broken(stream, i, f"{law}, this one {i.version * own}")


def check_claims(program: Program) -> None:
    """Raises ScheduleError where a schedule claims less than its streams hold: planners would count too little memory.

    `program` must have equal replicas and one stage a rank, as the closed forms that use these claims assume.
    """
    schedule, pipeline = program.schedule, program.pipeline
    if len(set(pipeline.replicas)) > 1 or pipeline.chunks > 1:
        return
    depth, microbatches = pipeline.depth, pipeline.microbatches
    for stream in program.streams:
        held = list(footprints(stream.instructions, recompute=False))
        most, versions = max(each.in_flight for each in held), max(each.versions for each in held)
        claimed = schedule.in_flight(depth=depth, stage=stream.stage, microbatches=microbatches)
        beside = schedule.gathers_beside(held=claimed, microbatches=microbatches)
        gathers = any(each.gradients and each.in_flight == claimed for each in held)
        claims = {
            "in_flight": (claimed, most <= claimed, most),
            "weight_versions": (schedule.weight_versions(most), versions <= schedule.weight_versions(most), versions),
            "gathers_beside": (beside, beside or not gathers, "gradients beside as many microbatches"),
            "fills": (True, not schedule.fills or most >= min(depth - stream.stage, microbatches), most),
            "keeps_batch": (True, not schedule.keeps_batch or most == microbatches, most),
        }
        for name, (claim, is_kept, found) in claims.items():
            if not is_kept:
                law = f"{name} is claimed to be {claim} on stage {stream.stage}, and its stream holds {found}"
                raise ScheduleError(f"schedule {schedule.name}: {law}")


def _check_microbatches(pipeline: Pipeline, stream: Stream) -> None:
    expected = {
        k
        for batch in pipeline.batch_range()
        for k in range(
            batch * pipeline.batch_microbatches + 1 + stream.replica,
            (batch + 1) * pipeline.batch_microbatches + 1,
            pipeline.replicas[stream.stage],
        )
    }
    done: dict[str, set[int]] = {"forward": set(), "backward": set(), "backward of the weights": set()}
    for instruction in stream.instructions:
        for kind in _WORK.get(type(instruction), ()):
            for k in microbatches_of(instruction):
                if k in done[kind] or k not in expected:
                    raise _broken(stream, instruction, f"{kind} of a microbatch that is not its own, or a second time")
                if kind != "forward" and k not in done["forward"]:
                    raise _broken(stream, instruction, "backward before forward")
                done[kind].add(k)
    for kind, numbers in done.items():
        if numbers != expected:
            raise ScheduleError(f"rank {stream.rank} never computes the {kind} of {sorted(expected - numbers)[:4]}")


def _check_way(pipeline: Pipeline, stream: Stream) -> None:
    """A microbatch's work on neighbouring stages of one rank: forward on the earlier first, backward on the later."""
    stages = [pipeline.stage_of(stream.stage, chunk) for chunk in range(pipeline.chunks)]
    done: dict[str, set[tuple[int, int]]] = {"forward": set(), "backward": set()}
    for instruction in stream.instructions:
        match instruction:
            case Forward(microbatch=k):
                way, step = "forward", -1
            case Backward(microbatch=k) | BackwardInput(microbatch=k):
                way, step = "backward", 1
            case _:
                continue
        stage = stages[instruction.chunk]
        if stage + step in stages and (k, stage + step) not in done[way]:
            raise _broken(stream, instruction, f"{way} before that of stage {stage + step} on the same rank")
        done[way].add((k, stage))


def _check_meetings(pipeline: Pipeline, stream: Stream) -> None:
    """A rank meets the others once for all of its stages: after their last gradient, before their first update."""
    updated: set[int] = set()
    met = False
    for instruction in stream.instructions:
        match instruction:
            case ReduceTied() | ReduceNorm():
                if updated:
                    raise _broken(stream, instruction, f"chunk {min(updated)} of this rank has its update already")
                met = True
            case Update(chunk=chunk):
                updated.add(chunk)
                if len(updated) == pipeline.chunks:
                    updated, met = set(), False
            case StartReduce() | ReduceGradients() | Backward() | BackwardInput() | BackwardWeight() if met:
                raise _broken(stream, instruction, "its rank has met the other stages for the next update already")
            case _:
                pass


def _check_versions(program: Program, stream: Stream, newest: int) -> int:
    """Follows the versions from the newest one before the stream; returns the newest one after it."""
    behind = program.schedule.versions_behind(program.pipeline, stream.stage)
    existing = set(range(max(newest - behind, 0), newest + 1))
    used: dict[int, int] = {}
    open_microbatches: set[int] = set()
    for instruction in stream.instructions:
        match instruction:
            case Forward() | Recompute() | Backward() | BackwardInput() | BackwardWeight():
                version = instruction.version
                if version not in existing or version < newest - behind:
                    law = f"the newest version is {newest}, at most {behind} older is allowed"
                    raise _broken(stream, instruction, law)
                others = [used[k] for k in microbatches_of(instruction) if used.setdefault(k, version) != version]
                if others:
                    raise _broken(stream, instruction, f"the forward ran on version {others[0]}")
            case ReduceGradients() | ReduceTied() | ReduceNorm() | Update() if instruction.version != newest + 1:
                raise _broken(stream, instruction, f"the newest version is {newest}")
            case Update(version=version):
                if program.schedule.flushes and open_microbatches:
                    raise _broken(stream, instruction, f"microbatches {sorted(open_microbatches)[:4]} are in flight")
                existing.add(version)
                newest = version
            case Checkpoint(version=version) if version != newest:
                raise _broken(stream, instruction, f"the newest version is {newest}")
            case _:
                pass
        if isinstance(instruction, Forward | Backward | BackwardWeight):  # begins or completes a microbatch
            open_microbatches ^= set(microbatches_of(instruction))
    return newest


def _check_updates(program: Program, stream: Stream) -> None:
    """Gradients gather from update to update; those of one update are of one version, or some would be lost.

    Where an exchange is begun ahead, the backward next to it completes its gradients: later ones are the next update's.
    """
    gathered: dict[int, int] = {}
    completed: dict[int, dict[int, int]] = {}
    begun: int | None = None
    for instruction in stream.instructions:
        match instruction:
            case StartReduce(version=version, source=source) if source in (None, stream.rank):
                begun = version
            case Backward() | BackwardWeight():
                gathered.update(dict.fromkeys(microbatches_of(instruction), instruction.version))
                if begun is not None:
                    completed[begun], gathered, begun = gathered, {}, None
            case Update(version=version):
                expected = _gradients_of(program, stream, version)
                if expected is None:
                    continue
                if version not in completed:
                    completed[version], gathered = gathered, {}
                made_of = completed.pop(version)
                if set(made_of) != expected:
                    wrong = sorted(set(made_of) ^ expected)[:4]
                    law = f"it must be made of all gradients of its own microbatches and of no others: see {wrong}"
                    raise _broken(stream, instruction, law)
                versions = set(made_of.values())
                if len(versions) > 1 or (program.schedule.flushes and versions != {version - 1}):
                    law = f"version {version - 1}" if program.schedule.flushes else "one weight version"
                    raise _broken(stream, instruction, f"its gradients must be of {law}, and are of {sorted(versions)}")
            case _:
                pass


def _gradients_of(program: Program, stream: Stream, version: int) -> set[int] | None:
    """The worker's microbatches that a version is made of; None where the version is another replica's."""
    pipeline, replicas = program.pipeline, program.pipeline.replicas[stream.stage]
    match program.schedule.update:
        case "batch":
            batch = version - 1
        case "minibatch":
            return {(version - 1) * replicas + stream.replica + 1}
        case "replica":
            batch, turn = divmod(version - 1, replicas)
            if turn != stream.replica:
                return None
    return set(pipeline.microbatches_of(Worker(stage=stream.stage, replica=stream.replica), batch))


def _check_exchanges(stream: Stream, newest: int) -> None:
    begun, waits = newest, set[int]()
    for index, instruction in enumerate(stream.instructions):
        match instruction:
            case StartReduce(version=version, source=source):
                if version != begun + 1:
                    raise _broken(stream, instruction, f"the exchange before it was for version {begun}")
                begun = version
                waits.add(version)
                following = stream.instructions[index + 1 : index + 2]
                if source in (None, stream.rank) and not isinstance((*following, None)[0], Backward | BackwardWeight):
                    raise _broken(stream, instruction, "no backward follows that completes the gradients")
            case ReduceGradients(version=version):
                begun = max(begun, version)
                waits.discard(version)
            case Update(version=version) if version in waits:
                raise _broken(stream, instruction, "its gradients are still exchanged")
            case _:
                pass


def _broken(stream: Stream, instruction: Instruction, law: str) -> ScheduleError:
    return ScheduleError(f"rank {stream.rank} at {format_instruction(instruction)}: {law}")
