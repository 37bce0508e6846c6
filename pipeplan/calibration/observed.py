"""Observed: a run with the prediction of the profile and the cluster. All terms are computed from this pair."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeplan.calibration.samples import (
    MeasuredRun,
    Sample,
    StageSamples,
    TransferSamples,
    exchange_samples,
    sample,
    stage_samples,
    transfer_samples,
)
from pipeplan.costs.estimate import backward_follows_forward, estimate
from pipeplan.documents.calibration import Calibration, Term
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Profile
from pipeplan.documents.stage_costs import StageCosts
from pipeplan.programs.timeline import Timeline
from pipeplan.schedules.registry import schedule_named
from pipeplan.simulation.play import simulate
from pipeplan.simulation.predict import program_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A run, its stages' costs by the profile, and the observations."""

    run: MeasuredRun
    costs: tuple[StageCosts, ...]
    measured: tuple[Measurement, ...]
    stages: StageSamples
    exchanges: Mapping[int, Sample]
    transfers: TransferSamples

    @property
    def plan(self) -> Plan:
        """The plan that was run."""
        return self.run.plan

    def blocks_of(self, stage: int) -> tuple[int, ...]:
        """The profile's blocks that a stage holds."""
        places = range(self.plan.stages[stage].start, self.plan.stages[stage].stop)
        return tuple(places) if self.plan.order is None else tuple(self.plan.order[place] for place in places)

    def seen(self, kind: str) -> Iterable[tuple[int, Sample]]:
        """By stage, the observations of this kind of instruction."""
        return [(stage, found) for (stage, its), found in self.stages.items() if its == kind]

    def is_hot(self, stage: int) -> bool:
        """Whether the stage's backwards come right after their forwards."""
        recompute, last = self.plan.stages[stage].recompute, stage == self.plan.depth - 1
        return backward_follows_forward(schedule_named(self.plan.schedule), recompute=recompute, last=last)


def observe(profile: Profile, cluster: Cluster, run: MeasuredRun) -> Observed:
    """The observations of a run."""
    return Observed(
        run=run,
        costs=costs_of(run.plan, profile, cluster),
        measured=profile.at(run.plan.microbatch_size),
        stages=stage_samples(run),
        exchanges=exchange_samples(run),
        transfers=transfer_samples(run),
    )


def costs_of(plan: Plan, profile: Profile, cluster: Cluster) -> tuple[StageCosts, ...]:
    """A plan's costs with another profile or cluster than its own."""
    return estimate(
        profile,
        cluster,
        plan.stages,
        plan.placement,
        microbatch_size=plan.microbatch_size,
        optimizer=plan.optimizer,
        schedule=schedule_named(plan.schedule),
        master_weights=plan.master_weights,
        order=plan.order,
    )


def played(plan: Plan, costs: Sequence[StageCosts], *, batches: int) -> Timeline:
    """The plan's streams, independent of costs."""
    return simulate(program_of(plan, batches=batches), costs)


def simulated(run: MeasuredRun, costs: tuple[StageCosts, ...]) -> MeasuredRun:
    """The run as it would have gone with these costs."""
    return MeasuredRun(plan=run.plan, timeline=played(run.plan, costs, batches=run.timeline.batches))


def term(values: Sequence[float]) -> Term | None:
    """The median of the observations; None without any."""
    if not values:
        return None
    found = sample(values)
    return Term(value=max(found.value, 0.0), spread=found.spread, observations=found.count)


def overhead_s(found: Calibration, profile: Profile) -> float:
    """The time of an instruction besides its work, as far as it is known."""
    return found.instruction_s.value if found.instruction_s else profile.overheads.instruction_s


def receive_s(found: Calibration, profile: Profile, own: StageCosts) -> float:
    """The rank's own seconds for a receive from the next stage, as far as they are known; `own` are its costs by the
    profile.
    """
    factor = 1.0
    if found.message_s_per_byte is not None:
        factor = found.message_s_per_byte.value / profile.overheads.message_s_per_byte
    return overhead_s(found, profile) + factor * own.activation_message_s
