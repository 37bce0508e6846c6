"""Memory: what runs show of activations, and of what a process holds beside tensors."""

from collections.abc import Sequence

from planner_service.core.calibrate.observed import Observed, simulated, term
from planner_service.core.calibrate.samples import MeasuredRun
from planner_service.core.cost.calibration import Term


def activation_factor(seen: Sequence[Observed]) -> Term | None:
    """What a microbatch keeps, measured over profile: from the peaks beyond what is there whatever is in flight."""
    factors = []
    for o in seen:
        predicted = simulated(o.run, o.costs).timeline
        for ours, theirs in zip(predicted.lanes, o.run.timeline.lanes, strict=True):
            costs = o.costs[ours.stage]
            in_flight = ours.peak_memory_bytes - min(ours.memory_bytes, default=0)
            if costs.activation_bytes > 0 and in_flight > 0 and not o.plan.stages[ours.stage].recompute:
                factors.append(1 + (theirs.peak_memory_bytes - ours.peak_memory_bytes) / in_flight)
    return term([factor for factor in factors if factor > 0])


def context_bytes(seen: Sequence[Observed]) -> Term | None:
    """What a process held beside tensors: on a GPU beside its allocator, on the host beside those that are counted."""
    return term([held_bytes for o in seen for held_bytes in _beside_tensors(o.run)])


def allocator_reserve(seen: Sequence[Observed]) -> Term | None:
    """The share of what the allocator of a GPU took at most that was no tensor which the runtime counts."""
    return term(
        [
            max(1 - lane.peak_memory_bytes / memory.reserved_bytes, 0.0)
            for o in seen
            for memory, lane in zip(o.run.device_memory, o.run.timeline.lanes, strict=False)
            if memory.reserved_bytes and lane.peak_memory_bytes
        ]
    )


def _beside_tensors(run: MeasuredRun) -> list[float]:
    if run.device_memory:
        return [float(memory.context_bytes) for memory in run.device_memory]
    pairs = zip(run.peak_resident_bytes, run.timeline.lanes, strict=False)
    return [float(max(resident_bytes - lane.peak_memory_bytes, 0)) for resident_bytes, lane in pairs]
