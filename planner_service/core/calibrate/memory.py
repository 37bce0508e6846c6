"""Memory: what runs show of activations, and of what a process holds beside tensors."""

from collections.abc import Sequence

from planner_service.core.calibrate.observed import Observed, simulated, term
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
    """What a process held at its peak beside the tensors that the runtime counts."""
    return term(
        [
            float(max(resident_bytes - lane.peak_memory_bytes, 0))
            for o in seen
            for resident_bytes, lane in zip(o.run.peak_resident_bytes, o.run.timeline.lanes, strict=False)
        ]
    )
