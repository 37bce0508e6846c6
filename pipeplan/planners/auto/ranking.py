"""Ranking: proposals, played as instruction streams, the best first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from pipeplan.costs.memory import rank_bytes
from pipeplan.documents.engines import OUR_RUNTIME
from pipeplan.documents.plan import Alternative, Plan, Simulated
from pipeplan.planners.auto.proposals import Proposal
from pipeplan.planners.complete import SIMULATED_INSTRUCTIONS, length, play
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.reasons import shortfall
from pipeplan.programs.schedule import UPDATES_LATE
from pipeplan.schedules.registry import schedule_named, with_whole_backward
from pipeplan.simulation.predict import TIES_APART, keeps_ties_apart, updates_late

CLOSE = 0.002
"""The search ends when no remaining bound is faster by more than this share."""

PLAYED_INSTRUCTIONS = 600_000
"""Upper bound on the instructions of all proposals together: two or three seconds."""

FRONT_INSTRUCTIONS = 100_000
"""Upper bound on the instructions of plans that are slower than the answer, and hold less."""

CLIMB_INSTRUCTIONS = 400_000
"""Upper bound on the instructions of plans that a climb plays."""

RESERVED_INSTRUCTIONS = 250_000
"""The part of `PLAYED_INSTRUCTIONS` that is reserved for the climb."""

STEADY_INSTRUCTIONS, NEAR = 300_000, 0.9
"""Upper bound on the instructions that prolong plays until they are steady, and the share of the best rate that these
plans reach: others stay slower in longer plays. Further instructions only make plays of the best steady.
"""

LONGEST_PLAY = 60_000
"""Upper bound on the instructions of one proposal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A proposal, played unless that takes too long. `over` says why it cannot be the answer: what it exceeds, a device
    or the batch, or why no run executes it.
    """

    proposal: Proposal
    samples_per_s: float
    played: bool
    over: str | None = None

    @property
    def plan(self) -> Plan:
        """The proposed plan."""
        return self.proposal.plan

    @property
    def kind(self) -> object:
        """The plan's configuration, without its stages and their placement."""
        plan = self.plan
        return (
            *(plan.schedule, plan.depth, plan.width, plan.chunks, plan.microbatch_size, plan.microbatches),
            *(plan.recompute, plan.recomputes_by_block, plan.split_backward, plan.split_backward_half_way),
            *(plan.form, plan.sharding, plan.replicate, plan.offload, plan.offload_share),
            *(plan.graphs, plan.a2a_overlap),
        )

    @property
    def memory_bytes(self) -> int:
        """The bytes of its fullest stage."""
        return max(rank_bytes(self.plan))

    @property
    def named(self) -> str:
        """The plan in a few words."""
        width = self.plan.width or "mixed"
        return f"{self.plan.schedule}, {self.plan.depth} stages x {width}, microbatches of {self.plan.microbatch_size}"

    def preference(self) -> tuple[bool, float, int, int, int]:
        """A key that sorts the best first, and last those not played, by their closed form's rate."""
        return not self.played, -self.samples_per_s, self.plan.workers, self.plan.depth, self.proposal.order

    def alternative(self, reason: str) -> Alternative:
        """The plan as one of the answer's alternatives."""
        plan, fits = self.plan, self.over is None
        return Alternative(
            schedule=plan.schedule,
            depth=plan.depth,
            width=plan.width,
            microbatch_size=plan.microbatch_size,
            microbatches=plan.microbatches,
            recompute=plan.recompute,
            throughput_samples_per_s=self.samples_per_s if fits and self.played else None,
            memory_bytes=self.memory_bytes,
            reason=reason,
            closed_form_samples_per_s=plan.closed_form.throughput_samples_per_s if fits and not self.played else None,
            form=plan.form,
            sharding=plan.sharding,
            offload=plan.offload,
            replicate=plan.replicate,
            graphs=bool(plan.graphs),
            a2a_overlap=plan.a2a_overlap,
            offload_share=plan.offload_share,
            chunks=plan.chunks if plan.engine != OUR_RUNTIME else 1,
        )


@dataclass(slots=True, kw_only=True)
class Ranking:
    """All proposals, those that fit and those that do not. `left` instructions may still be played; `plays` counts the
    plans that were.

    `within_batch`: no stage may update after more samples than the batch has, as PipeDream's replicas may. A proposal
    may have at most `longest` instructions, a planner's answer `longest_answer`. Of plans that are slower and hold
    less, at most `for_front` are played; of the climb, at most `for_climb`, for which `reserved` are left by what is
    played for its bound. Beyond all these, plays may be longer by `for_steady` instructions.
    """

    problem: PlanningProblem
    within_batch: bool = True
    fitting: list[Ranked] = field(default_factory=list)
    exceeding: list[Ranked] = field(default_factory=list)
    left: int = PLAYED_INSTRUCTIONS
    plays: int = 0
    longest: int = LONGEST_PLAY
    longest_answer: int = SIMULATED_INSTRUCTIONS
    for_front: int = FRONT_INSTRUCTIONS
    for_climb: int = CLIMB_INSTRUCTIONS
    for_steady: int = STEADY_INSTRUCTIONS
    reserved: int = RESERVED_INSTRUCTIONS
    _known: dict[object, Ranked] = field(default_factory=dict)

    @property
    def best(self) -> Ranked | None:
        """The fastest that was played and fits."""
        return min((each for each in self.fitting if each.played), key=Ranked.preference, default=None)

    @property
    def best_rate(self) -> float:
        """The rate of the fastest play that fits; 0 if none fits yet."""
        return max((each.samples_per_s for each in self.fitting if each.played), default=0.0)

    @property
    def enough(self) -> float:
        """The rate above which a bound is worth a play."""
        return self.best_rate * (1 + CLOSE)

    def beats(self, most: float, memory_bytes: int) -> bool:
        """Whether a play that fits reaches `most` samples a second and holds at most `memory_bytes`."""
        played = (each for each in self.fitting if each.played and each.samples_per_s >= most)
        return any(each.memory_bytes <= memory_bytes for each in played)

    def add_answers(self, proposals: Sequence[Proposal]) -> None:
        """Plays the planners' answers. One that is too long to be played ranks by its closed form, times the least
        ratio of played to closed form among the others.
        """
        played = [replace(each, plan=self._play(each.plan)) for each in proposals]
        ratios = [
            each.plan.simulated.throughput_samples_per_s / each.plan.closed_form.throughput_samples_per_s
            for each in played
            if each.plan.simulated is not None and each.plan.closed_form.throughput_samples_per_s > 0
        ]
        for each in played:
            self._keep(self._ranked(each, min(ratios, default=1.0)))
        for each in played:
            for plan in self.variants(each.plan):
                self.add(replace(each, plan=plan))

    def add(self, proposal: Proposal, *, longest: int | None = None) -> bool:
        """Plays a proposal, unless the same was tried before; returns whether it could be played.

        If no instructions are left, a proposal without a play is ignored. The number left does not shorten a play: an
        extrapolation from shorter batches may be slower.
        """
        longest = longest or self.longest
        if proposal.configuration in self._known:
            return self._known[proposal.configuration].played
        if self.left <= 0 and proposal.plan.simulated is None:
            return False
        plan, saved = proposal.plan, True
        if plan.split_backward or (schedule_named(plan.schedule).splits_backward and plan.chunks == 1):
            ranked = self._split(proposal)
            if ranked is not None and ranked.over is not None and plan.split_backward:
                saving = replace(plan, split_backward_half_way=True)
                if not plan.split_backward_half_way:
                    saved = self.add(replace(proposal, plan=saving))
        else:
            ranked = self._ranked(replace(proposal, plan=self._play(plan, longest)), 1.0)
        if ranked is not None:
            self._keep(ranked)
        return saved and ranked is not None and ranked.played

    def variants(self, fused: Plan) -> Iterator[Plan]:
        """The plan, and with a flush the same stages with a split backward.

        The split is 2BP, or its memory-saving variant if the options ask for that. If the user names neither schedule
        nor variant, 1F1B also has ZB-H1, whose stages keep no more microbatches than 1F1B's first one. Plans that
        recompute by block have no variants. If the user names ZB-H1, it replaces 1F1B's plans.
        """
        options, laws = self.problem.options, schedule_named(fused.schedule)
        alone = self._stands_for_zero_bubble(fused)
        if not alone:
            yield fused
        if options.split_backward is False or not laws.takes_two_bp or not has_split_backward(self.problem):
            return
        if fused.recomputes_by_block:
            return
        free = options.schedule is None and options.split_backward is None and not options.split_backward_half_way
        whole = replace(fused, simulated=None)
        if (free or alone) and laws.zero_bubble is not None and fused.depth > 1:
            yield replace(whole, schedule=laws.zero_bubble)
        if not alone:
            yield replace(whole, split_backward=True, split_backward_half_way=options.split_backward_half_way)

    def found(self, proposal: Proposal) -> Ranked | None:
        """The ranked proposal; None if it was not tried."""
        return self._known.get(proposal.configuration)

    def sort(self) -> None:
        """Puts the best first."""
        self.fitting.sort(key=Ranked.preference)

    def _keep(self, ranked: Ranked) -> None:
        if ranked.proposal.configuration in self._known:
            return
        self._known[ranked.proposal.configuration] = ranked
        if not self._stands_for_zero_bubble(ranked.plan):
            (self.fitting if ranked.over is None else self.exceeding).append(ranked)

    def _stands_for_zero_bubble(self, plan: Plan) -> bool:
        """Whether it is played only because a zero-bubble schedule with the same stages is requested."""
        asked = self.problem.options.schedule
        return asked is not None and schedule_named(plan.schedule).zero_bubble == asked

    def _play(self, plan: Plan, longest: int = LONGEST_PLAY) -> Plan:
        """The plan with its play, as far as it may be played."""
        if plan.simulated is not None or self.left <= 0:
            return plan
        simulated = self._played(plan, longest)
        return plan if simulated is None else replace(plan, simulated=simulated)

    def _played(self, plan: Plan, longest: int) -> Simulated | None:
        """The plan's play, steady if the plan is not far slower than the best; None if it is too long."""
        needed = self.best_rate * (NEAR if self.for_steady > 0 else 1.0)
        simulated = play(plan, instructions=longest, needed=needed)
        if simulated is not None:
            least = length(plan, instructions=longest)
            self.plays += 1
            self.left -= least
            self.for_steady -= length(plan, simulated, instructions=longest) - least
        return simulated

    def _ranked(self, proposal: Proposal, ratio: float) -> Ranked:
        """The proposal with its played throughput, or else `ratio` times the closed form's, and what it exceeds."""
        problem, plan = self.problem, proposal.plan
        simulated = plan.simulated
        rate = simulated.throughput_samples_per_s if simulated else ratio * plan.closed_form.throughput_samples_per_s

        # By how much a rank exceeds its device, in its planner's accounting (2BP holds more) or when it is played.
        device_bytes = {device.name: device.usable_bytes for device in problem.cluster.types}
        own = problem.cluster.device.usable_bytes
        most = [device_bytes.get(stage.device or "", own) for stage in plan.stages]
        held = list(rank_bytes(plan))
        if simulated is not None and problem.options.memory == "training":
            for worker, peak_bytes in zip(plan.placement, simulated.peak_memory_bytes, strict=True):
                held[worker.stage] = max(held[worker.stage], peak_bytes)
        missing = [held_bytes - limit for held_bytes, limit in zip(held, most[: len(held)], strict=True)]
        worst = max(missing)

        # PipeDream's replicas average their minibatches: an update must not have more samples than the batch.
        samples, over = max(plan.replicas) * plan.microbatch_size, None
        by_minibatch = schedule_named(plan.schedule).update == "minibatch"
        if self.within_batch and by_minibatch and samples > problem.batch_size:
            over = f"a stage of {max(plan.replicas)} replicas updates after {samples} samples, more than the batch"
        elif problem.options.synchronous and updates_late(plan):
            over = f"{plan.schedule}, {UPDATES_LATE}"
        elif keeps_ties_apart(plan):
            over = f"{plan.schedule} {TIES_APART}"
        elif worst > 0:
            over = f"does not fit when played, {shortfall(missing.index(worst), worst)}"
        return Ranked(proposal=proposal, samples_per_s=rate, played=simulated is not None, over=over)

    def _split(self, proposal: Proposal) -> Ranked | None:
        """A plan with a split backward, with the bytes that its microbatches hold until their p2; None if too long.

        These are the bytes that its play holds beyond the play of the same stages with a whole backward, which is a
        proposal itself, or less than it. If that plan does not fit, this one is not played.
        """
        split = proposal.plan
        whole = self._whole(proposal)
        fused = whole.plan
        if fused.simulated is None:
            return None
        if whole.over is not None:
            return replace(whole, proposal=proposal)
        simulated = self._played(split, LONGEST_PLAY)
        if simulated is None:
            return None
        more_bytes = [-(stage.memory.activations if stage.memory else 0) for stage in fused.stages]
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
        return self._ranked(replace(proposal, plan=replace(split, stages=stages, simulated=simulated)), 1.0)

    def _whole(self, proposal: Proposal) -> Ranked:
        """The same stages with a whole backward, ranked as any proposal."""
        split = proposal.plan
        base = with_whole_backward(split.schedule)
        whole = replace(split, schedule=base, split_backward=False, split_backward_half_way=False, simulated=None)
        asked = replace(proposal, plan=whole)
        self.add(asked)
        return self._known[asked.configuration]


def has_split_backward(problem: PlanningProblem) -> bool:
    """Whether 2BP's p2 was measured of any block."""
    return any(m.backward_weight_s for block in problem.profile.blocks for m in block.measurements)
