"""PipeDream-2BW's planner (2021, appendix A, algorithm 1): every width, depth, microbatch size and recomputation.

The appendix's three executions are candidates: no pipelining (data parallelism at depth 1, one stage after the other
beyond), pipelining, and pipelining with recomputation. Where we differ: widths are compared on the whole job's
w b / t, the paper's b / t being one pipeline's; the links follow from the placement, pipelines or stages in a row,
whichever is faster; and stages are the best contiguous split under the memory limit instead of equal numbers of
blocks. With `Options.schedule` only that schedule is searched; 1F1B and GPipe pay for their flush.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from planner_service.core.errors import require
from planner_service.core.plan import SCHEDULES, Alternative, Answer, Infeasible, Reason
from planner_service.core.planner.asked import (
    dividing_sizes,
    measured_at,
    refuse_unused,
    require_recompute,
    require_schedule,
    require_stages,
)
from planner_service.core.planner.candidate import (
    Candidate,
    Evaluator,
    Miss,
    decision,
    lost,
    ruled_out,
    too_large,
)
from planner_service.core.planner.complete import complete
from planner_service.core.planner.pipeline_terms import Shape
from planner_service.core.planner.problem import Problem
from planner_service.core.planner.reasons import memory_reason
from planner_service.core.planner.shapes import Shapes, shapes
from planner_service.core.planner.split import ROUNDING

NAME = "pipedream-2bw"

ALTERNATIVES = {"slower": 20, "memory": 10, "impossible": 20}
"""How many of each kind of alternative a plan keeps, the best first."""

_Class = tuple[str, int, int, bool]


def two_bw(problem: Problem) -> Answer:
    """The configuration of the highest throughput that fits.

    Ties: fewer devices, then smaller depth, then without recomputation, then smaller microbatches, then the order of
    `SCHEDULES`. `configurations_considered` counts all of (schedule, w, d, b, recomputation); what cannot beat the
    alternatives that are shown, by a bound on its compute, is not split into stages.
    """
    options = problem.options
    refuse_unused(NAME, options, ("microbatch_size", "schedule", "stages", "recompute", "recompute_factor"))
    require_schedule(options, ("pipedream-2bw", "1f1b", "gpipe", "data-parallel", "naive"), NAME)
    if options.schedule == "gpipe":
        require_recompute(options, "gpipe")
    require_stages(problem)
    for size in dividing_sizes(problem):
        measured_at(problem, size)
    every = shapes(problem)
    require(every.considered > 0, "stages", f"must be 1 for {options.schedule}", options.stages)
    search = _Search(evaluator=Evaluator(problem=problem))
    search.run(every.runnable)
    if not search.fitting:
        return _infeasible(problem, every, search)
    first, *others = search.best_of_classes()
    chosen = decision(
        NAME,
        "pipedream-2bw-a.1",
        first,
        search.evaluator.stops(first),
        considered=every.considered,
        alternatives=_alternatives(every, search, first, others),
    )
    return complete(problem, chosen)


@dataclass(slots=True, kw_only=True)
class _Search:
    """Looks at shapes in the order of what they could reach at best, until no other could be among those kept."""

    evaluator: Evaluator
    fitting: dict[_Class, Candidate] = field(default_factory=dict)
    too_large: dict[_Class, Shape] = field(default_factory=dict)

    def run(self, every: Iterable[Shape]) -> None:
        bounds = [(self._bound(shape), shape) for shape in every]
        bounds.sort(key=lambda bound: (-bound[0], *_preference(bound[1])))
        worst_kept = 0.0
        for bound, shape in bounds:
            if bound < worst_kept:
                break
            if self._look_at(shape):
                worst_kept = self._worst_kept()

    def _worst_kept(self) -> float:
        """The throughput that a class must reach to be the answer or an alternative."""
        count = ALTERNATIVES["slower"] + 1
        best = heapq.nlargest(count, (found.throughput_samples_per_s for found in self.fitting.values()))
        return best[-1] if len(best) == count else 0.0

    def best_of_classes(self) -> list[Candidate]:
        """The fastest of each class, the best first."""
        return sorted(self.fitting.values(), key=_order)

    def _bound(self, shape: Shape) -> float:
        return shape.throughput_samples_per_s(self.evaluator.least_time_s(shape)) * (1 + ROUNDING)

    def _look_at(self, shape: Shape) -> bool:
        found = self.evaluator.fastest(shape)
        if found is None:
            smallest = self.too_large.setdefault(_class(shape), shape)
            if shape.microbatch_size < smallest.microbatch_size:
                self.too_large[_class(shape)] = shape
            return False
        before = self.fitting.get(_class(shape))
        if before is None or _order(found) < _order(before):
            self.fitting[_class(shape)] = found
        return True

    def misses(self, count: int) -> list[Miss]:
        """The classes of which nothing that was looked at fits, each at its smallest microbatch, the nearest first."""
        shapes = [shape for key, shape in self.too_large.items() if key not in self.fitting]
        bounds = [(self._least_bytes(shape), shape) for shape in shapes]
        bounds.sort(key=lambda bound: (bound[0], _preference(bound[1])))
        nearest: list[Miss] = []
        for least_bytes, shape in bounds:
            if len(nearest) >= count and least_bytes > nearest[count - 1].memory_bytes * (1 + ROUNDING):
                break
            nearest.append(self.evaluator.nearest(shape))
            nearest.sort(key=lambda miss: (miss.missing_bytes, *_preference(miss.shape)))
        return nearest[:count]

    def _least_bytes(self, shape: Shape) -> float:
        return self.evaluator.terms(shape, self.evaluator.links(shape)[0]).least_bytes()


def _class(shape: Shape) -> _Class:
    return shape.schedule, shape.width, shape.depth, shape.recompute


def _preference(shape: Shape) -> tuple[int, int, bool, int, int]:
    schedule = SCHEDULES.index(shape.schedule)
    return shape.devices, shape.depth, shape.recompute, shape.microbatch_size, schedule


def _order(found: Candidate) -> tuple[float | int, ...]:
    return -found.throughput_samples_per_s, *_preference(found.shape)


def _alternatives(every: Shapes, search: _Search, first: Candidate, others: list[Candidate]) -> list[Alternative]:
    impossible = sorted(every.ruled_out, key=lambda out: (-out[0].devices, *_preference(out[0])))
    return [
        *(lost(other, search.evaluator.stops(other), first) for other in others[: ALTERNATIVES["slower"]]),
        *map(too_large, search.misses(ALTERNATIVES["memory"])),
        *(ruled_out(shape, reason) for shape, reason in impossible[: ALTERNATIVES["impossible"]]),
    ]


def _infeasible(problem: Problem, every: Shapes, search: _Search) -> Infeasible:
    """Every class with its nearest miss, the nearest first; then what the batch rules out."""
    members = Counter(map(_class, every.runnable))
    memory = [
        _memory_reason(problem, miss, members[_class(miss.shape)]) for miss in search.misses(ALTERNATIVES["slower"])
    ]
    batch = [
        Reason(rule="a batch must be whole microbatches, enough for the depth", detail=f"{_named(shape)}: {reason}")
        for shape, reason in every.ruled_out
    ]
    kept = (*memory, *batch[: ALTERNATIVES["impossible"]])
    return Infeasible(planner=NAME, reasons=kept, configurations_considered=every.considered)


def _memory_reason(problem: Problem, miss: Miss, configurations: int) -> Reason:
    return memory_reason(
        _named(miss.shape),
        stage=miss.stage,
        missing_bytes=miss.missing_bytes,
        device_bytes=problem.cluster.device.memory_bytes,
        configurations=configurations,
    )


def _named(shape: Shape) -> str:
    size = f"microbatches of {shape.microbatch_size}{', recomputing' if shape.recompute else ''}"
    return f"{shape.schedule}, width {shape.width}, depth {shape.depth}, {size}"
