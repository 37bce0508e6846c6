"""Tables: the seconds and bytes of all stages [start, stop) on one kind of place, in the better mode of each.

The closed forms are those of `costs`, over the sums of `planners.chain`. A table is infinite where no stage may be.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.costs.collectives import EXCHANGES
from pipeplan.costs.memory import Copies, copies, keeps_master_weights
from pipeplan.documents.plan import RECOMPUTE_UNITS, Stage
from pipeplan.planners.chain import ProfileChain
from pipeplan.planners.exact.budget import BUDGET
from pipeplan.planners.measured import measured
from pipeplan.planners.messages import messages_of
from pipeplan.planners.problem import PlanningProblem, recompute_units
from pipeplan.planners.stage_sum import item_sums
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.registry import schedule_named

BUFFERS = ("input_buffers", "output_buffers", "kept_outputs")
"""The copies that messages in transit need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """All but the stages and their devices.

    `width` is None where every stage has its own number of replicas, as in PipeDream; `workers` counts them all, and a
    `depth` of 0 stands for any number of stages.
    """

    schedule: str
    depth: int
    width: int | None
    workers: int
    microbatch_size: int
    microbatches: int

    @property
    def laws(self) -> Schedule:
        """The schedule's laws."""
        return schedule_named(self.schedule)

    @property
    def slots(self) -> float:
        """A microbatch's time in steps of the slowest stage: a flush adds filling and draining."""
        return (self.microbatches + self.depth - 1) / self.microbatches if self.laws.flushes else 1.0

    @property
    def samples(self) -> int:
        """Samples that a step of the slowest stage completes, on all pipelines together."""
        return self.microbatch_size * (self.width or 1)

    def sample_s(self, step_s: float) -> float:
        """Seconds a sample, from the slowest stage's seconds a microbatch."""
        return step_s * self.slots / self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """A stage's place: its type of device, its replicas, and the bandwidths among them and across its boundaries.

    Of equally wide stages `stage` counts from 0. Of PipeDream's, `workers` counts those of this stage and of all after
    it. `neighbours` has the replicas of the stages beside it: 0 where there is none, or messages do not count.
    """

    type: int
    replicas: int
    own: float
    before: float
    after: float
    stage: int = 0
    workers: int = 0
    neighbours: tuple[int, int] = (0, 0)


class TableCache:
    """Tables by a key, computed when they are missing. They are dropped when they take too many bytes."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, FloatArray] = {}

    def __call__(self, key: Hashable, compute: Callable[[], FloatArray]) -> FloatArray:
        """The table of a key."""
        found = self._tables.get(key)
        if found is None:
            found = compute()
            if len(self._tables) * found.nbytes >= BUDGET.cached_bytes:
                self._tables.clear()
            self._tables[key] = found
        return found


def between(until: FloatArray, before: FloatArray | None = None) -> FloatArray:
    """[start, stop] -> the sum at the stop, less that at the start."""
    return np.asarray(until - (until if before is None else before)[:, None])


@dataclass(frozen=True, kw_only=True, eq=False)
class TypeTables:
    """The bytes of stages on a type of device."""

    chain: ProfileChain
    _without_buffers: TableCache = field(default_factory=TableCache)

    def memory_bytes(self, counts: Copies) -> FloatArray:
        """What a worker holds."""
        rest = replace(counts, **dict.fromkeys(BUFFERS, 0))
        without = self._without_buffers(rest, self.chain.stage_sum(rest).table)
        return np.asarray(without + item_sums(self.chain.quantities, counts)["buffers"].table())


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTables:
    """The tables of one problem at one microbatch size."""

    problem: PlanningProblem
    microbatch_size: int
    _seconds: TableCache = field(default_factory=TableCache)

    @cached_property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.problem.profile.blocks)

    @cached_property
    def of_types(self) -> tuple[TypeTables, ...]:
        """The tables on every type of device."""
        names = [device.name for device in self.problem.cluster.types]
        sources = [measured(self.problem.profile_on(name)).at((self.microbatch_size,)) for name in names]
        factor = self.problem.options.recompute_factor
        return tuple(TypeTables(chain=ProfileChain(row=0, source=each, recompute_factor=factor)) for each in sources)

    @property
    def modes(self) -> tuple[bool, ...]:
        """Without and with recomputation, as far as a stage may choose."""
        requested = self.problem.options.recompute
        return (False, True) if requested is None else (requested,)

    @cached_property
    def blocks_s(self) -> FloatArray:
        """[block]: the least compute, on the fastest type of device and in the faster mode."""
        every = [np.diff(of.chain.ends_s(None, recompute=mode)) for of in self.of_types for mode in self.modes]
        return np.asarray(np.minimum.reduce(every))

    @cached_property
    def no_stage(self) -> FloatArray:
        """Infinite where no stage may be: it has no block, or the forced and the forbidden cuts exclude it; else 0."""
        excluded = np.tri(self.blocks + 1, dtype=bool)
        for cut in self.problem.options.forbidden_cuts:
            excluded[cut, :] = excluded[:, cut] = True
        for cut in self.problem.options.forced_cuts:
            excluded[:cut, cut + 1 :] = True
        return np.where(excluded, np.inf, 0.0)

    def time_s(self, shape: StageShape, kind: StageKind) -> FloatArray:
        """A stage's seconds a microbatch in the faster mode that fits."""
        device_bytes = self._device_bytes(kind)
        modes = (
            np.where(self._memory_bytes(shape, kind, mode) <= device_bytes, self._mode_s(shape, kind, mode), np.inf)
            for mode in self.modes
        )
        return np.asarray(np.minimum.reduce(list(modes)) + self.no_stage)

    def excess_bytes(self, shape: StageShape, kind: StageKind) -> FloatArray:
        """The bytes by which a stage exceeds its device in the smaller mode, negative where it fits."""
        smallest = np.minimum.reduce([self._memory_bytes(shape, kind, mode) for mode in self.modes])
        return np.asarray(smallest - self._device_bytes(kind) + self.no_stage)

    def stage(self, shape: StageShape, kind: StageKind, start: int, stop: int) -> Stage:
        """The stage in the faster mode that fits, or (if none does) the smallest; without recomputation in a tie.

        The unit of recomputation is the first that fits.
        """
        types, stages = self.problem.cluster.types, list[Stage]()
        for recompute in self.modes:
            time_s = float(self._mode_s(shape, kind, recompute)[start, stop])
            for unit, counts in self._counts(shape, kind, recompute):
                memory = self.of_types[kind.type].chain.stage_memory(counts, start, stop)
                stage = Stage(
                    start=start,
                    stop=stop,
                    replicas=kind.replicas,
                    recompute=recompute,
                    recompute_unit=unit,
                    time_s=time_s,
                    memory_bytes=memory.total,
                    memory=memory,
                    device=types[kind.type].name if len(types) > 1 else None,
                )
                stages.append(stage)
        fitting = [stage for stage in stages if stage.memory_bytes <= self._device_bytes(kind)]
        if fitting:
            return min(fitting, key=lambda stage: (stage.time_s, stage.recompute))
        return min(stages, key=lambda stage: (stage.memory_bytes, stage.recompute))

    def _device_bytes(self, kind: StageKind) -> int:
        return self.problem.cluster.types[kind.type].usable_bytes

    def _mode_s(self, shape: StageShape, kind: StageKind, recompute: bool) -> FloatArray:
        """A stage's seconds in one mode, which its place in the pipeline decides by its links alone."""

        def computed() -> FloatArray:
            chain = self.of_types[kind.type].chain
            compute_s = between(chain.ends_s(None, recompute=recompute))
            before_s = (chain.boundary_bytes / kind.before)[:, None]
            after_s = chain.boundary_bytes / kind.after
            share = EXCHANGES[self.problem.options.synchronisation or "all-reduce"](np.asarray(float(kind.replicas)))
            exchange_s = float(share) / kind.own * between(chain.weight_bytes)
            if shape.width is None:  # PipeDream (2018), section 3.2: the slowest of the stage and its two boundaries
                stage_s = np.maximum(compute_s, exchange_s) / kind.replicas
                return np.asarray(np.maximum(stage_s, np.maximum(before_s, after_s)))
            # PipeDream-2BW (2021), appendix A.1.1: the exchange of a batch overlaps with its microbatches
            return np.asarray(np.maximum(compute_s + before_s + after_s, exchange_s / shape.microbatches))

        links = replace(kind, stage=0, workers=0, neighbours=(0, 0))
        return self._seconds((links, shape.microbatches, recompute), computed)

    def _memory_bytes(self, shape: StageShape, kind: StageKind, recompute: bool) -> FloatArray:
        """By the unit of recomputation that holds least."""
        of_type = self.of_types[kind.type]
        by_unit = [of_type.memory_bytes(counts) for _, counts in self._counts(shape, kind, recompute)]
        return np.asarray(np.minimum.reduce(by_unit))

    def _counts(self, shape: StageShape, kind: StageKind, recompute: bool) -> Iterator[tuple[str, Copies]]:
        """The copies that a worker holds, by each unit of recomputation; one stands for none.

        A PipeDream stage holds the weights and activations of the first stage of a pipeline as deep as its microbatches
        in flight, and the messages that its neighbours' replicas decide.
        """
        options, profile = self.problem.options, self.problem.profile
        for unit in recompute_units(self.problem, shape.laws) if recompute else RECOMPUTE_UNITS[:1]:
            counts = copies(
                options.memory,
                shape.laws,
                options.optimizer_or_default,
                recompute=recompute,
                depth=-(-kind.workers // kind.replicas) if shape.width is None else shape.depth,
                stage=kind.stage,
                microbatches=shape.microbatches,
                dtype=profile.dtype,
                master_weights=keeps_master_weights(profile.dtype, options.master_weights),
                replicas=kind.replicas,
                unit=unit,
                autocast=profile.autocast,
            )
            if shape.width is None:
                (before, after), downstream = kind.neighbours, kind.workers - kind.replicas
                moved = messages_of(
                    shape.laws, before, kind.replicas, after, downstream, recompute=recompute, unit=unit
                )
                buffers = {name: getattr(moved, name) for name in BUFFERS}
                counts = replace(counts, **buffers)
            yield unit, counts
