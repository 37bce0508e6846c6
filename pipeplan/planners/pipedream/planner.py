"""PipeDream's planner (2018, section 3.2): stages of unequal replicas on all machines, whose slowest is the fastest.

On several levels of network it is the planner of SOSP 2019, section 3.1: inside a server first, whose result is the
unit of the level around it. `partition` searches; `space` has the recurrence. Beyond the papers, a stage must fit its
device. It holds ceil(machines from this stage on / its replicas) minibatches and as many weight versions (2018, section
3.3). Gradients are exchanged by an all-reduce; the papers' parameter server is `--synchronisation parameter-server`.
Latencies are not in the closed form; the simulation has them. `--semantics release` follows the authors' published
program (`release`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm

from pipeplan.costs.memory import minibatches_in_flight
from pipeplan.documents.certificate import Certificate
from pipeplan.documents.plan import Alternative, Answer, ClosedForm, Infeasible, Stage, Worker
from pipeplan.errors import LARGEST_COUNT, InvalidInputError, require
from pipeplan.planners.complete import Decision, complete
from pipeplan.planners.messages import with_messages
from pipeplan.planners.pipedream.budget import BUDGET
from pipeplan.planners.pipedream.certificate import certificate
from pipeplan.planners.pipedream.partition import nearest, partition
from pipeplan.planners.pipedream.parts import Partition, PartitionSearch, data_parallel
from pipeplan.planners.pipedream.refine import refine
from pipeplan.planners.pipedream.release import ReleasedProgram, released_boundaries, released_cuts
from pipeplan.planners.pipedream.states import CutStates, States, cut_states
from pipeplan.planners.pipedream.terms import (
    gradient_copies,
    network,
    released,
    search,
    stage,
    synchronisation,
    synchronised,
)
from pipeplan.planners.problem import PlanningProblem, measured_at, refuse_unused, require_schedule
from pipeplan.planners.reasons import memory_reason, shortfall, slower
from pipeplan.programs.schedule import UPDATES_LATE
from pipeplan.schedules.registry import schedule_named

NAME = "pipedream"
SCHEDULES = (NAME, "pipedream-vertical-sync")

USED = (
    "microbatch_size",
    "schedule",
    "synchronisation",
    "straight",
    "fewer_machines",
    "semantics",
    "compression_ratio",
    "cuts",
)
"""The options that this planner reads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CutModel:
    """A problem's model with its cuts: the states, and the profile's blocks between them."""

    problem: PlanningProblem
    microbatch_size: int
    cuts: CutStates

    @property
    def states(self) -> States:
        """The states, one for each cut."""
        return self.cuts.states

    def stages(self, found: Partition) -> tuple[Stage, ...]:
        """The stages as a plan has them."""
        before = self.cuts.blocks_before
        stages = [
            stage(self.problem, self.states, share, count, (int(before[share.start]), int(before[share.stop])))
            for share, count in zip(found.shares, minibatches_in_flight(found.replicas), strict=True)
        ]
        laws = schedule_named(self.problem.options.schedule or NAME)
        return with_messages(self.problem, stages, laws, self.microbatch_size, self.order(found))

    def order(self, found: Partition) -> tuple[int, ...] | None:
        """An order of a graph's blocks in which each stage is contiguous; None for a chain."""
        if self.problem.profile.edges is None:
            return None
        return self.cuts.order_of([0, *(share.stop for share in found.shares)])


def pipedream(problem: PlanningProblem) -> Answer:
    """The best partition onto all devices, or the bytes that the nearest miss lacks.

    A batch of the plan lies between two points at which every stage has updated: it is the smallest number of
    minibatches that all stages' replicas share evenly (or the largest countable one).
    `configurations_considered` counts the stages that the partition is chosen from: pairs of cuts times numbers of
    replicas.
    """
    _check(problem)
    model = cut_model(problem)
    wanted = search(problem, model.states)
    if model.cuts.complete or released(problem):
        found = _released(model, wanted) if released(problem) else partition(wanted)
        if found is None:
            return _nearest_miss(model, wanted)
        proven = certificate(problem, found)
    else:  # a graph with more cuts than were listed
        refined = refine(problem, model.microbatch_size, model.cuts)
        if refined is None:
            return _nearest_miss(model, wanted)
        found, proven = refined.found, refined.certificate
        model = replace(model, cuts=refined.cuts)
        wanted = search(problem, model.states)
    alternatives = tuple(_alternatives(model, wanted, found))
    return complete(problem, replace(decided(model, wanted, found, proven), alternatives=alternatives))


def _released(model: CutModel, wanted: PartitionSearch) -> Partition | None:
    """The partition of the authors' program, which ignores memory."""
    states, outermost = len(model.states), model.problem.cluster.levels[-1].size
    inside = model.problem.cluster.levels[:-1]
    entries = states**2 * outermost**2 / 2 + sum(states**3 * level.size**2 / 6 for level in inside)
    rule = f"must be what the released program's tables hold ({BUDGET.released_entries:g} entries) on {states} cuts"
    sizes = [level.size for level in model.problem.cluster.levels]
    require(entries <= BUDGET.released_entries, "cluster.levels", rule, sizes)
    options = model.problem.options
    tables = ReleasedProgram(
        model.states,
        network(model.problem),
        ratio=options.compression_ratio,
        straight=wanted.straight,
        fewer=wanted.fewer,
    )
    return tables.partition()


def _check(problem: PlanningProblem) -> None:
    options = problem.options
    refuse_unused(NAME, options, USED)
    require_schedule(options, SCHEDULES, NAME)
    require(not options.synchronous, "synchronous", f"must be off for the planner {NAME}, {UPDATES_LATE}", True)
    rule = f"must be planned straight, on all devices, for {SCHEDULES[1]}: there the versions that it holds are known"
    straight = options.straight and not options.fewer_machines
    require(straight or not synchronised(problem), "straight", rule, options.straight)
    types = [group.device.name for group in problem.cluster.groups]
    require(len(set(types)) <= 1, "cluster.groups", f"must be of one type for the planner {NAME}", types)
    rule = "is an option of --semantics release only"
    require(
        options.compression_ratio is None or released(problem), "compression_ratio", rule, options.compression_ratio
    )
    if released(problem):
        rule = "must be parameter-server for --semantics release, which knows no other"
        require(synchronisation(problem) == "parameter-server", "synchronisation", rule, options.synchronisation)
        rule = "cannot be asked of several levels with --semantics release: which devices of a server would idle?"
        require(not options.fewer_machines or len(problem.cluster.levels) == 1, "fewer_machines", rule, True)
    rule = "is an option for a model that is a graph"
    require(options.cuts is None or problem.profile.edges is not None, "cuts", rule, options.cuts)


def minibatch_size(problem: PlanningProblem) -> int:
    """A minibatch's size: the requested one, the only measured one, or the batch's. Raises InvalidInputError.

    PipeDream never divides a minibatch: one minibatch is one measurement.
    """
    sizes = problem.profile.microbatch_sizes
    size = problem.options.microbatch_size
    if size is None:
        size = sizes[0] if len(sizes) == 1 else problem.batch_size
        if size not in sizes:
            rule = f"must be given (--microbatch-size), one of {list(sizes)}: pipedream plans one minibatch"
            raise InvalidInputError("microbatch_size", rule, None)
    measured_at(problem, size)
    rule = f"must be a multiple of the minibatch ({size})"
    require(problem.batch_size % size == 0, "batch_size", rule, problem.batch_size)
    return size


def cut_model(problem: PlanningProblem) -> CutModel:
    """The problem's model with its possible cuts. Raises InvalidInputError if these are too many or too few."""
    size = minibatch_size(problem)
    blocks = len(problem.profile.blocks)
    rule = f"must be at most {BUDGET.chain_blocks} for the planner {NAME}"
    require(blocks < BUDGET.chain_blocks, "profile.blocks", rule, blocks)
    cuts = cut_states(problem.profile, size, cuts=problem.options.cuts, gradients=gradient_copies(problem))
    if released(problem):
        output_bytes = [block.output_bytes for block in problem.profile.at(size)]
        cuts = released_boundaries(problem.profile, released_cuts(problem.profile, cuts), output_bytes)
    model = CutModel(problem=problem, microbatch_size=size, cuts=cuts)
    if problem.options.straight and not problem.options.fewer_machines:
        parts, devices = len(model.states) - 1, problem.cluster.devices
        rule = f"needs a stage for each of the {devices} devices, and the model can be cut into {parts} at most"
        require(devices <= parts, "straight", rule, True)
    return model


def decided(model: CutModel, wanted: PartitionSearch, found: Partition, proven: Certificate | None = None) -> Decision:
    """The planner's decision for this partition; alternatives are listed for its answer alone."""
    stages = model.stages(found)
    replicas = found.replicas
    size = model.microbatch_size
    return Decision(
        planner=NAME,
        order=model.order(found),
        cost_model=cost_model(model.problem),
        stages=stages,
        placement=tuple(Worker(stage=index, replica=replica) for index, replica in found.placement),
        schedule=model.problem.options.schedule or NAME,
        microbatch_size=size,
        microbatches=1,
        batch_size=min(lcm(*replicas), LARGEST_COUNT // size) * size,
        closed_form=ClosedForm(
            time_per_microbatch_s=found.cost_s, throughput_samples_per_s=size / found.cost_s, bubble_fraction=0.0
        ),
        optimal_in_flight=-(-sum(replicas) // replicas[0]),
        configurations_considered=_considered(wanted),
        certificate=proven,
    )


def cost_model(problem: PlanningProblem) -> str:
    """The name of the closed form."""
    if released(problem):
        ratio = problem.options.compression_ratio
        return "pipedream-release" if ratio is None else f"pipedream-release/compression-{ratio:g}"
    paper = "2018-3.2" if len(problem.cluster.levels) == 1 else "2019-3.1"
    return f"pipedream-{paper}/{synchronisation(problem)}"


def _considered(wanted: PartitionSearch) -> int:
    before = wanted.space.before
    states = len(wanted.space)
    pairs = states * (states - 1) // 2 if before is None else int(before.sum())
    return pairs * (1 if wanted.straight else wanted.devices)


def _alternatives(model: CutModel, wanted: PartitionSearch, found: Partition) -> Iterator[Alternative]:
    """Data parallelism and a straight pipeline, unless they are the answer.

    Their rates are the paper's. So both are left out with other semantics, and with vertical sync, which is straight.
    """
    if released(model.problem) or synchronised(model.problem):
        return
    if len(found.shares) > 1:
        yield _alternative(model, data_parallel(wanted))
    if len(found.shares) < wanted.devices < len(model.states):
        straight = search(model.problem, model.states, straight=True)
        loser = partition(straight) or partition(replace(straight, memory=None))
        yield from [_alternative(model, loser)] if loser else []


def _alternative(model: CutModel, loser: Partition) -> Alternative:
    index, memory_bytes = _largest(model, loser)
    missing_bytes = memory_bytes - model.problem.cluster.device.usable_bytes
    rate = model.microbatch_size / loser.cost_s
    return Alternative(
        schedule=NAME,
        depth=len(loser.shares),
        width=loser.shares[0].replicas,
        microbatch_size=model.microbatch_size,
        microbatches=1,
        recompute=False,
        throughput_samples_per_s=None,
        memory_bytes=memory_bytes,
        reason=slower(rate) if missing_bytes <= 0 else shortfall(index, missing_bytes),
        closed_form_samples_per_s=rate if missing_bytes <= 0 else None,
    )


def _largest(model: CutModel, found: Partition) -> tuple[int, int]:
    """The fullest stage (ties prefer the first), and its bytes."""
    held_bytes = [stage.memory_bytes for stage in model.stages(found)]
    return held_bytes.index(max(held_bytes)), max(held_bytes)


def _nearest_miss(model: CutModel, wanted: PartitionSearch) -> Infeasible:
    """The partition that minimises the largest excess over a device."""
    closest = nearest(wanted)[0]
    index, memory_bytes = _largest(model, closest)
    replicas = "-".join(str(count) for count in closest.replicas)
    device_bytes = model.problem.cluster.device.usable_bytes
    reason = memory_reason(
        f"nearest is {replicas} (replicas by stage)",
        stage=index,
        missing_bytes=memory_bytes - device_bytes,
        device_bytes=device_bytes,
        configurations=_considered(wanted),
    )
    return Infeasible(planner=NAME, reasons=(reason,), configurations_considered=_considered(wanted))
