"""Calibrate: a profile, a cluster and measured runs of plans made from them -> Calibration."""

from collections.abc import Sequence
from dataclasses import replace

from pipeplan.calibration.network import exchange_factor, levels, unseen_exchange
from pipeplan.calibration.observed import costs_of, observe, played
from pipeplan.calibration.samples import MeasuredRun
from pipeplan.calibration.stages import (
    activation_factor,
    allocator_reserve,
    context_bytes,
    overheads,
    with_compute,
    with_updates,
)
from pipeplan.documents.calibration import Calibration, RunUsed, apply
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError, require
from pipeplan.programs.timeline import Timeline, throughput_samples_per_s


def calibrate(profile: Profile, cluster: Cluster, runs: Sequence[MeasuredRun]) -> Calibration:
    """The cost terms that the runs show. Pure, independent of the runs' order, linear in their instructions.

    Raises InvalidInputError for a run of another model, dtype or profile, and if there are no runs.
    """
    require(len(runs) > 0, "runs", "must be at least one", len(runs))
    for index, run in enumerate(runs):
        require_run_of(profile, run, f"runs.{index}")
    ordered = sorted(runs, key=lambda run: (content_id(run.plan), run.timeline.makespan_s))
    seen = [observe(profile, cluster, run) for run in ordered]
    instruction_s, message_s_per_byte = overheads(seen, profile)
    found = Calibration(
        model=profile.model,
        device=profile.device.name,
        dtype=profile.dtype,
        profile_id=content_id(profile),
        cluster_id=content_id(cluster),
        runs=(),
        instruction_s=instruction_s,
        message_s_per_byte=message_s_per_byte,
        activation_factor=activation_factor(seen),
        context_bytes=context_bytes(seen),
        allocator_reserve=allocator_reserve(seen),
    )
    found = replace(found, levels=levels(seen, cluster, found, profile))
    found = with_compute(found, seen, profile)
    found = with_updates(found, seen, profile)
    exchanged = exchange_factor(seen, *apply(found, profile, cluster))
    found = replace(found, exchange_factor=exchanged or unseen_exchange(found, profile, cluster))
    corrected = apply(found, profile, cluster)
    used = []
    for run in ordered:
        plan, batches = run.plan, run.timeline.batches
        used.append(
            RunUsed(
                plan_id=content_id(plan),
                schedule=plan.schedule,
                depth=plan.depth,
                workers=plan.workers,
                microbatch_size=plan.microbatch_size,
                microbatches=plan.microbatches,
                measured_samples_per_s=_samples_per_s("timeline", run.timeline),
                profile_samples_per_s=predicted_samples_per_s(plan, profile, cluster, batches=batches),
                calibrated_samples_per_s=predicted_samples_per_s(plan, *corrected, batches=batches),
            )
        )
    return replace(found, runs=tuple(used))


def require_run_of(profile: Profile, run: MeasuredRun, field: str) -> None:
    """Raises InvalidInputError unless the run's plan was made from the profile."""
    plan = run.plan
    for name, given, wanted in (
        ("model", plan.model.name, profile.model.name),
        ("dtype", plan.dtype, profile.dtype),
        ("blocks", plan.stages[-1].stop, len(profile.blocks)),
        ("profile_id", plan.profile_id, content_id(profile)),
    ):
        require(given == wanted, f"{field}.plan.{name}", f"must be the profile's, {wanted!r}", given)
    devices = sorted({stage.device for stage in plan.stages if stage.device is not None} - {profile.device.name})
    require(
        not devices, f"{field}.plan.stages", f"must all run on the profile's device, {profile.device.name}", devices
    )


def predicted_samples_per_s(plan: Plan, profile: Profile, cluster: Cluster, *, batches: int) -> float:
    """The throughput that the plan's streams give with the costs of this profile and cluster."""
    return _samples_per_s("profile", played(plan, costs_of(plan, profile, cluster), batches=batches))


def _samples_per_s(field: str, timeline: Timeline) -> float:
    try:
        return throughput_samples_per_s(timeline)
    except ZeroDivisionError:
        raise InvalidInputError(field, "must be such that a batch takes some time", timeline.makespan_s) from None
