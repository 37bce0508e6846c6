"""Shapes: the space of 2BW's search as arrays, and the part of it that the batch rules out.

A row is a schedule, a width and a microbatch size. They determine how many microbatches a batch has; the depths that
can run are then a range.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.arrays import IntArray
from pipeplan.planners.measured import MeasuredBlocks
from pipeplan.planners.problem import Options, PlanningProblem, recompute_units
from pipeplan.planners.two_bw.terms import PipelineShape
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.registry import schedule_named

TWO_BW = "pipedream-2bw"

UNLESS_ASKED = ("data-parallel", "naive", TWO_BW)
"""The schedules that are searched by default: the appendix's executions."""

SYNCHRONOUS = ("data-parallel", "naive", "1f1b")
"""The same where no gradient may be late: the pipeline is flushed (2BW 2021, section 3.2)."""


def unless_asked(options: Options) -> tuple[str, ...]:
    """The schedules that are searched where the options name none."""
    return SYNCHRONOUS if options.synchronous else UNLESS_ASKED


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """A schedule with or without recomputation (None: where it is needed), and the range of its depths."""

    schedule: str
    recompute: bool | None
    shallowest: int
    deepest: int

    @property
    def laws(self) -> Schedule:
        """The schedule's laws."""
        return schedule_named(self.schedule)

    @property
    def ways(self) -> int:
        """The number of the appendix's executions that it stands for: with and without recomputation."""
        return 2 if self.recompute is None else 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShapeRows:
    """Arrays with an entry a row; `size` is the index of the microbatch size, `deepest` is included."""

    execution: Execution
    width: IntArray
    size: IntArray
    microbatches: IntArray
    shallowest: IntArray
    deepest: IntArray

    def __len__(self) -> int:
        return len(self.width)

    @property
    def depths(self) -> IntArray:
        """The number of depths of each row."""
        return np.asarray(np.maximum(self.deepest - self.shallowest + 1, 0))

    def some(self, chosen: IntArray) -> "ShapeRows":
        """These rows, in this order."""
        return ShapeRows(
            execution=self.execution,
            width=self.width[chosen],
            size=self.size[chosen],
            microbatches=self.microbatches[chosen],
            shallowest=self.shallowest[chosen],
            deepest=self.deepest[chosen],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ShapeSpace:
    """Algorithm 1's loops: w from 1 to N, d from 1 to N / w, and every b and recomputation inside."""

    problem: PlanningProblem
    measured: MeasuredBlocks

    @cached_property
    def profiled_sizes(self) -> tuple[int, ...]:
        """The microbatch sizes that were measured."""
        return self.problem.profile.microbatch_sizes

    @cached_property
    def executions(self) -> tuple[Execution, ...]:
        """The appendix's three, or the requested schedule."""
        options = self.problem.options
        deepest = min(self.problem.cluster.devices, self.measured.blocks)
        if options.schedule is None:
            names = unless_asked(options)
            ranges = [(name, *((1, 1) if schedule_named(name).single_stage else (2, deepest))) for name in names]
        else:
            ranges = [(options.schedule, 1, 1 if schedule_named(options.schedule).single_stage else deepest)]
        if options.stages is not None:
            ranges = [
                (name, options.stages, options.stages) for name, low, high in ranges if low <= options.stages <= high
            ]
        executions = []
        for name, low, high in ranges:
            recompute = options.recompute
            laws = schedule_named(name)
            if recompute is None and laws.recomputes:
                recompute = True
            elif recompute is None and not laws.pipelined and "block" not in recompute_units(self.problem, laws):
                recompute = False  # one microbatch is in flight: to recompute the whole stage saves nothing
            executions.append(Execution(schedule=name, recompute=recompute, shallowest=low, deepest=high))
        return tuple(executions)

    @cached_property
    def rows(self) -> tuple[ShapeRows, ...]:
        """The rows that the batch allows, an execution each."""
        width, size = self._pairs
        microbatches = self.problem.batch_size // (width * np.asarray(self.measured.sizes)[size])
        every = []
        for execution in self.executions:
            deepest = np.minimum(self.problem.cluster.devices // width, execution.deepest)
            if execution.laws.microbatch_a_stage:
                deepest = np.minimum(deepest, microbatches)
            rows = ShapeRows(
                execution=execution,
                width=width,
                size=size,
                microbatches=microbatches,
                shallowest=np.full_like(width, execution.shallowest),
                deepest=deepest,
            )
            every.append(rows.some(np.flatnonzero(rows.depths)))
        return tuple(every)

    @cached_property
    def _pairs(self) -> tuple[IntArray, IntArray]:
        """The widths and microbatch sizes of which a batch has a whole number of microbatches, and at least one."""
        batch_size = self.problem.batch_size
        widths = self._widths
        if not self.problem.options.safe_batch:
            widths = widths[batch_size % widths == 0]
        sizes = np.asarray(self.measured.sizes)
        most = batch_size // widths
        fine = sizes <= most[:, None] if self.problem.options.safe_batch else most[:, None] % sizes == 0
        width, size = np.nonzero(fine)
        return widths[width], size

    @cached_property
    def _widths(self) -> IntArray:
        return np.arange(1, self.problem.cluster.devices + 1)

    @cached_property
    def considered(self) -> int:
        """The number of configurations (schedule, w, d, b, with recomputation or without)."""
        deepest = self.problem.cluster.devices // self._widths
        pairs = [int(self._reaching(deepest, execution).sum()) * execution.ways for execution in self.executions]
        return len(self.measured.sizes) * sum(pairs)

    @cached_property
    def runnable(self) -> int:
        """The number of them that the batch allows."""
        return sum(int(rows.depths.sum()) * rows.execution.ways for rows in self.rows)

    @cached_property
    def too_shallow(self) -> int:
        """The number of those with whole microbatches, but fewer than 2BW has stages."""
        width, _ = self._pairs
        deepest = self.problem.cluster.devices // width
        whole = sum(int(self._reaching(deepest, e).sum()) * e.ways for e in self.executions)
        return whole - self.runnable

    def _reaching(self, deepest: IntArray, execution: Execution) -> IntArray:
        """The number of an execution's depths that devices for depths up to `deepest` allow."""
        return np.asarray(np.maximum(np.minimum(deepest, execution.deepest) - execution.shallowest + 1, 0))

    def shape(self, execution: Execution, width: int, size: int, microbatches: int, depth: int) -> PipelineShape:
        """A configuration by its place in the arrays."""
        return PipelineShape(
            schedule=execution.schedule,
            width=width,
            depth=depth,
            microbatch_size=self.measured.sizes[size],
            microbatches=microbatches,
            recompute=execution.recompute,
        )

    def ruled_out(self, count: int) -> Iterator[tuple[PipelineShape, str]]:
        """Some configurations that the batch rules out, with the reason: the widths that would use the most devices."""
        batch_size, sizes, safe = self.problem.batch_size, self.measured.sizes, self.problem.options.safe_batch
        for execution, rows in zip(self.executions, self.rows, strict=True):
            deepest = np.minimum(self.problem.cluster.devices // self._widths, execution.deepest)
            reached = np.zeros(len(deepest), dtype=np.int64)
            np.maximum.at(reached, rows.width - 1, rows.deepest)
            out = np.flatnonzero((deepest >= execution.shallowest) & (reached < deepest))
            largest = out[np.argsort(-deepest[out] * self._widths[out], kind="stable")[:count]]

            for width, depth in zip((largest + 1).tolist(), deepest[largest].tolist(), strict=True):
                samples = [width * size for size in sizes]
                whole = [
                    place
                    for place, least in enumerate(samples)
                    if (least <= batch_size if safe else batch_size % least == 0)
                ]
                size = whole[0] if whole else 0
                microbatches = batch_size // samples[size]
                reason = f"m={microbatches} < depth {depth}"
                if not whole:
                    divisible = "at least" if safe else "divisible by"
                    reason = f"batch: {batch_size} is not {divisible} w*b={samples[size]}"
                yield self.shape(execution, width, size, microbatches, depth), reason
