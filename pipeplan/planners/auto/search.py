"""Search: plays what could still be fastest, the highest bound first.

1. Every configuration has a rate that none of its plays exceeds (`space`). The highest comes first.
2. Where it is split into stages, its plan has a lower one (`bound`), and takes its place in the order. With a flush the
   same stages with a split backward are further plans. Of ranks with several stages whole families come first, then
   their members, whose stages are nearly even (`chunks`).
3. A plan whose turn comes is played.
4. The search ends when no rate that is left is above that of the fastest play that fits, by more than `CLOSE`; or at a
   limit. The highest rate that is left says how far the answer may be from the best.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from pipeplan.costs.memory import rank_bytes
from pipeplan.documents.plan import Alternative, Certificate
from pipeplan.planners.auto.chunks import ChunkedConfiguration, ChunkedFamily
from pipeplan.planners.auto.proposals import Proposal, Proposer, pareto_front
from pipeplan.planners.auto.ranking import Ranked, Ranking
from pipeplan.planners.auto.space import Configuration, PlayedSpace
from pipeplan.planners.bound import most_samples_per_s
from pipeplan.planners.on_chain import Chained

MOST_SPLITS = 600
"""So many configurations are split into stages: some three seconds."""

CLOSE = 0.002
"""The search ends where nothing that is left can be faster by more than this share."""

FRONT_INSTRUCTIONS = 100_000
"""So many instructions are played for plans that are slower than the answer, and hold less."""

SHOWN_UNPLAYED = 12
"""How many configurations that were not played are shown."""

_SEARCHED_BY = Proposer("pipedream-2bw")

Waiting = Configuration | ChunkedFamily | ChunkedConfiguration | Proposal
"""What waits for its turn."""

_ROUNDING = 1e-6
"""Rates that differ by no more are equal: bounds are a little above what they bound."""


@dataclass(slots=True, kw_only=True)
class PlayedSearch:
    """The search, and what it found; `ranking` holds everything that was played."""

    space: PlayedSpace
    chained: Chained
    ranking: Ranking
    configurations: int = 0
    splits: int = 0
    plays: int = 0
    without_split: int = 0
    left: float = 0.0
    unplayed: list[tuple[float, Configuration | ChunkedConfiguration]] = field(default_factory=list)
    _waiting: list[tuple[float, int, Waiting]] = field(default_factory=list)
    _pushed: int = 0

    def run(self, answers: Sequence[Proposal]) -> None:
        """Searches to the end, or to a limit. The planners' answers are plans like others."""
        for answer in answers:
            for plan in self.ranking.variants(answer.plan):
                self._push(most_samples_per_s(plan), replace(answer, plan=plan))
        for configuration in self.space.configurations():
            self.configurations += 1
            self._push(configuration.most, configuration)
        for family in self.space.chunked.families():
            self.configurations += family.members
            self._push(family.most, family)
        while self._waiting:
            most = -self._waiting[0][0]
            if most <= self.ranking.best_rate * (1 + CLOSE) or self.ranking.left <= 0:
                break
            self._take(heappop(self._waiting)[2], most)
        self.left = max([self.left, self.space.chunked.left, *(-most for most, _, _ in self._waiting)])
        self._play_front()
        for most, _, item in sorted(self._waiting, key=lambda each: each[:2]):
            if len(self.unplayed) == SHOWN_UNPLAYED:
                break
            if isinstance(item, Configuration | ChunkedConfiguration):
                self.unplayed.append((-most, item))

    def _take(self, item: Waiting, most: float) -> None:
        """Splits or plays what is next. Of what is beyond a limit, or too long, nothing is known but its bound."""
        if isinstance(item, ChunkedFamily):
            for member in self.space.chunked.members(item):
                self._push(member.most, member)
            return
        if isinstance(item, Configuration | ChunkedConfiguration):
            known = self.splits < MOST_SPLITS
            if known:
                self._split(item, most)
        else:
            self.plays += 1
            known = self.ranking.add(item)
        if not known:
            self.left = max(self.left, most)

    def alternatives(self) -> Iterator[Alternative]:
        """Some of what was not played, with the rate that it cannot exceed."""
        for most, configuration in self.unplayed:
            shape = configuration.shape
            yield Alternative(
                schedule=shape.schedule,
                depth=shape.depth,
                width=shape.width,
                microbatch_size=shape.microbatch_size,
                microbatches=shape.microbatches,
                recompute=bool(shape.recompute),
                throughput_samples_per_s=None,
                memory_bytes=None,
                reason=f"not played: at most {most:.4g} samples/s",
            )

    def certificate(self, best: Ranked) -> Certificate:
        """What was shown of the answer's rate."""
        rate = best.samples_per_s
        reached = self.left if self.left > rate * (1 + _ROUNDING) else rate
        rest = self.configurations - self.splits
        claim = (
            f"Of {self.configurations} configurations (schedule, width, depth, microbatch size and placement), "
            f"{self.splits} were split into stages, {self.without_split} of them in vain: none fits. {self.plays} "
            f"plans were played. By a bound on their streams the other plans, and {rest} configurations that were not "
            f"split, play at most {reached:.6g} samples/s; this plan plays {rate:.6g}."
        )
        return Certificate(
            method="best bound first",
            quantity="seconds a sample, played",
            value=1 / rate,
            bound=1 / reached,
            claim=claim,
        )

    def _play_front(self) -> None:
        """Plays some plans more, for the front of throughput against memory: those that hold less, by their bounds."""
        plans = [(-most, item) for most, _, item in self._waiting if isinstance(item, Proposal)]
        held = [each for each in plans if not each[1].plan.split_backward]
        front = pareto_front(
            held,
            throughput_samples_per_s=lambda each: each[0],
            memory_bytes=lambda each: max(rank_bytes(each[1].plan)),
        )
        least = max(self.ranking.left - FRONT_INSTRUCTIONS, 0)
        for _, proposal in front:
            if self.ranking.left <= least:
                break
            self.plays += 1
            self.ranking.add(proposal)

    def _push(self, most: float, item: Waiting) -> None:
        self._pushed += 1
        heappush(self._waiting, (-most, self._pushed, item))

    def _split(self, configuration: Configuration | ChunkedConfiguration, most: float) -> None:
        """Splits a configuration into stages: its plan waits for its turn, and so do those with a split backward."""
        self.splits += 1
        fused = (
            self.space.plan(configuration)
            if isinstance(configuration, Configuration)
            else self.space.chunked.plan(configuration)
        )
        if fused is None:
            self.without_split += 1
            return
        for plan in self.ranking.variants(self.chained.back(fused)):
            proposal = Proposal(plan=plan, proposer=_SEARCHED_BY, order=self._pushed)
            self._push(min(most_samples_per_s(plan), most), proposal)
