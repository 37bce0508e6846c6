"""Ranking: proposals, played as instruction streams, the best first."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pipeplan.documents.plan import Alternative, Plan
from pipeplan.planners.auto.proposals import Proposal
from pipeplan.planners.complete import length, play
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.reasons import shortfall
from pipeplan.schedules.registry import schedule_named

PLAYED_INSTRUCTIONS = 600_000
"""Of all proposals together: about a second and a half."""

LONGEST_PLAY = 60_000
"""Of one proposal."""

SPLIT_PROPOSALS = 3
"""How many of the best proposals with a flush are also played with a split backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A proposal, played unless that takes too long. `over` says what it exceeds, a device or the batch."""

    proposal: Proposal
    samples_per_s: float
    played: bool
    over: str | None = None

    @property
    def plan(self) -> Plan:
        """What is proposed."""
        return self.proposal.plan

    @property
    def memory_bytes(self) -> int:
        """What its worst stage holds."""
        return max(stage.memory_bytes for stage in self.plan.stages)

    @property
    def named(self) -> str:
        """The plan in a few words."""
        width = self.plan.width or "mixed"
        return f"{self.plan.schedule}, {self.plan.depth} stages x {width}, microbatches of {self.plan.microbatch_size}"

    def preference(self) -> tuple[float, int, int, int]:
        """A key that sorts the best first."""
        return -self.samples_per_s, self.plan.workers, self.plan.depth, self.proposal.order

    def alternative(self, reason: str) -> Alternative:
        """The plan as one of the answer's alternatives."""
        plan = self.plan
        return Alternative(
            schedule=plan.schedule,
            depth=plan.depth,
            width=plan.width,
            microbatch_size=plan.microbatch_size,
            microbatches=plan.microbatches,
            recompute=plan.recompute,
            throughput_samples_per_s=self.samples_per_s if self.over is None else None,
            memory_bytes=self.memory_bytes,
            reason=reason,
        )


@dataclass(slots=True, kw_only=True)
class Ranking:
    """All proposals, the best first: those that fit, and those that do not. `left` instructions may still be played."""

    problem: PlanningProblem
    fitting: list[Ranked] = field(default_factory=list)
    exceeding: list[Ranked] = field(default_factory=list)
    left: int = PLAYED_INSTRUCTIONS

    def play(self, proposals: Sequence[Proposal], answers: int) -> None:
        """Plays the planners' answers, the first `answers`, then the others by their closed form; and ranks all."""
        others = sorted(proposals[answers:], key=lambda each: -each.plan.throughput_samples_per_s)
        played: list[Proposal] = []
        for proposal in (*proposals[:answers], *others):
            plan = proposal.plan
            if plan.simulated is None or plan.simulated.extrapolated_from is not None:
                longest = min(LONGEST_PLAY, self.left)
                self.left -= length(plan, instructions=longest)
                simulated = play(plan, instructions=longest) or plan.simulated
                proposal = replace(proposal, plan=replace(plan, simulated=simulated))
            played.append(proposal)
        ratios = [
            each.plan.simulated.throughput_samples_per_s / each.plan.throughput_samples_per_s
            for each in played
            if each.plan.simulated is not None and each.plan.throughput_samples_per_s > 0
        ]
        ratio = min(ratios, default=1.0)
        for ranked in sorted((self._ranked(proposal, ratio) for proposal in played), key=Ranked.preference):
            (self.fitting if ranked.over is None else self.exceeding).append(ranked)

    def split(self) -> None:
        """Plays the best with a flush again, with a split backward: proposals like any other.

        That is 2BP, or its memory-saving variant where 2BP does not fit; and for 1F1B, where the user names neither
        schedule nor variant, ZB-H1, whose stages keep no more microbatches than 1F1B's first one.
        """
        options = self.problem.options
        if options.split_backward is False or not has_split_backward(self.problem):
            return
        free = options.schedule is None and options.split_backward is None and not options.split_backward_half_way
        flushing = [
            each
            for each in self.fitting
            if schedule_named(each.plan.schedule).takes_two_bp and each.plan.simulated is not None
        ]
        for ranked in flushing[:SPLIT_PROPOSALS]:
            proposal, fused = ranked.proposal, ranked.plan
            fast = replace(fused, split_backward=True)
            saving = replace(fast, split_backward_half_way=True)
            variants: list[Ranked | None] = []
            zero_bubble = schedule_named(fused.schedule).zero_bubble
            if free and zero_bubble is not None and fused.depth > 1:
                variants.append(self._split(proposal, replace(fused, schedule=zero_bubble)))
            split = self._split(proposal, saving if options.split_backward_half_way else fast)
            if split is not None and split.over is not None and not options.split_backward_half_way:
                split = self._split(proposal, saving)
            for variant in (*variants, split):  # of two that are as fast ZB-H1, which holds less, comes first
                if variant is not None:
                    (self.fitting if variant.over is None else self.exceeding).append(variant)
        self.fitting.sort(key=Ranked.preference)

    def _ranked(self, proposal: Proposal, ratio: float) -> Ranked:
        """The proposal with its played throughput, or else `ratio` times the closed form's, and what it exceeds."""
        problem, plan = self.problem, proposal.plan
        simulated = plan.simulated
        rate = simulated.throughput_samples_per_s if simulated else ratio * plan.throughput_samples_per_s

        # By how much a stage exceeds its device, in its planner's accounting (2BP holds more) or when it is played.
        device_bytes = {device.name: device.memory_bytes for device in problem.cluster.types}
        own = problem.cluster.device.memory_bytes
        most = [device_bytes.get(stage.device or "", own) for stage in plan.stages]
        held = [stage.memory_bytes for stage in plan.stages]
        if simulated is not None and problem.options.memory == "training":
            for worker, peak_bytes in zip(plan.placement, simulated.peak_memory_bytes, strict=True):
                held[worker.stage] = max(held[worker.stage], peak_bytes)
        missing = [held_bytes - limit for held_bytes, limit in zip(held, most, strict=True)]
        worst = max(missing)

        # PipeDream's replicas average their minibatches: an update of more samples than the batch was not asked for.
        samples, over = max(plan.replicas) * plan.microbatch_size, None
        if schedule_named(plan.schedule).update == "minibatch" and samples > problem.batch_size:
            over = f"a stage of {max(plan.replicas)} replicas updates after {samples} samples, more than the batch"
        elif worst > 0:
            over = f"does not fit when played, {shortfall(missing.index(worst), worst)}"
        return Ranked(proposal=proposal, samples_per_s=rate, played=simulated is not None, over=over)

    def _split(self, proposal: Proposal, split: Plan) -> Ranked | None:
        """A variant of the proposal, with what its microbatches hold until their p2; None where it is too long."""
        fused, whole = proposal.plan, replace(split, simulated=None)
        simulated = play(whole, instructions=LONGEST_PLAY)
        if simulated is None or fused.simulated is None:
            return None
        more_bytes = [0] * fused.depth
        peaks = zip(fused.placement, simulated.peak_memory_bytes, fused.simulated.peak_memory_bytes, strict=True)
        for worker, split_bytes, fused_bytes in peaks:
            more_bytes[worker.stage] = max(more_bytes[worker.stage], split_bytes - fused_bytes)
        stages = tuple(
            replace(
                stage,
                memory_bytes=stage.memory_bytes + more,
                memory=stage.memory and replace(stage.memory, activations=stage.memory.activations + more),
            )
            for stage, more in zip(fused.stages, more_bytes, strict=True)
        )
        return self._ranked(replace(proposal, plan=replace(whole, stages=stages, simulated=simulated)), 1.0)


def has_split_backward(problem: PlanningProblem) -> bool:
    """Whether 2BP's p2 was measured of any block."""
    return any(m.backward_weight_s for block in problem.profile.blocks for m in block.measurements)
