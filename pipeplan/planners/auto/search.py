"""Search: plays what could still be fastest, the highest bound first.

A best-first search: one queue holds configurations, their splits and their plans, ordered by upper bounds on their
rates (`space`, `bound`). Of ranks with several stages, whole families come first, then their members, whose stages are
nearly even (`chunks`). The highest remaining bound shows how far the answer may be from the best. The steps are
numbered in `PlayedSearch._search`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush, merge
from itertools import chain, islice

from pipeplan.costs.memory import rank_bytes
from pipeplan.documents.certificate import PROVEN_GAP, Certificate
from pipeplan.documents.plan import Alternative, Plan
from pipeplan.planners.auto.climb import Climb, SplitConfiguration
from pipeplan.planners.auto.proposals import Proposal, Proposer, pareto_front
from pipeplan.planners.auto.ranking import Ranked, Ranking
from pipeplan.planners.bound import most_samples_per_s
from pipeplan.planners.spaces import Configuration, Space

METHOD = "best bound first"
"""The search's name in a certificate."""

MOST_SPLITS = 600
"""Upper bound on the configurations split into stages: some three seconds. Short models have more (`SPLIT_BLOCKS`)."""

SPLIT_BLOCKS = 50
"""A model with fewer blocks is split in less time: with half as many, twice as many configurations are."""

MOST_IN_VAIN = 60
"""Upper bound on the configurations split if no plan can be played: all are too long, or none fits."""

MOST_FURTHER = 2
"""Upper bound on the times that the fastest plans lead to further spaces."""

LEADING = 2
"""The number of fastest plans that may lead there."""

SHOWN_UNPLAYED = 12
"""The number of configurations shown that were not played."""

ROUNDING = PROVEN_GAP
"""Rates that differ by no more are equal: bounds are slightly above the exact values."""


@dataclass(frozen=True, slots=True)
class _Next:
    """A space's remaining configuration with the highest bound, and the others."""

    planner: str
    configuration: Configuration
    others: Iterator[Configuration]


@dataclass(slots=True, kw_only=True)
class PlayedSearch:
    """The search, and its results; `ranking` holds everything that was played.

    `further` are the spaces that a fast plan leads to, which are searched after the others. `moved` are the plans one
    move away from a plan that no configuration describes.
    """

    spaces: Sequence[Space]
    ranking: Ranking
    further: Callable[[Plan], Sequence[Space]] = lambda plan: ()
    moved: Callable[[Plan], Iterator[Plan]] = lambda plan: iter(())
    configurations: int = 0
    splits: int = 0
    without_split: int = 0
    left: float = 0.0
    most_of_others: float = 0.0
    unplayed: list[Configuration] = field(default_factory=list)
    _waiting: list[tuple[float, int, "_Next | SplitConfiguration | Proposal"]] = field(default_factory=list)
    _pushed: int = 0
    _splits: dict[object, SplitConfiguration] = field(default_factory=dict)
    _tried: list[SplitConfiguration] = field(default_factory=list)

    def run(self, answers: Sequence[Proposal]) -> None:
        """Searches to the end, or to a limit. The first of the planners' answers that has a play is played first."""
        longest = self.ranking.longest_answer
        any(self.ranking.add(each, longest=longest) for each in answers)  # until one has a play
        for answer in answers:
            for plan in self.ranking.variants(answer.plan):
                self._push(most_samples_per_s(plan), replace(answer, plan=plan))
        unsplit = self._search(self.spaces)
        for _ in range(MOST_FURTHER):
            deep = (each for each in self.ranking.fitting if each.played and each.plan.depth > 1 == each.plan.chunks)
            fastest = sorted(deep, key=Ranked.preference)[:LEADING]  # the first of them that leads to other spaces
            spaces = next(filter(None, (self.further(each.plan) for each in fastest)), ())
            if not spaces:
                break
            unsplit += self._search(spaces)
        self._play_front()

        # Some configurations that were not split, the highest bounds first.
        heads = [*unsplit, *(item for _, _, item in self._waiting if isinstance(item, _Next))]
        rests = (chain([head.configuration], head.others) for head in heads)
        self.unplayed = list(islice(merge(*rests, key=lambda each: -each.most), SHOWN_UNPLAYED))

    def _search(self, spaces: Sequence[Space]) -> list[_Next]:
        """Searches the spaces; returns what it had no time to split, each the first of its space."""
        for space in spaces:
            self.configurations += space.considered
            self._push_next(space.planner, space.configurations())
        unsplit: list[_Next] = []
        shorter = max(SPLIT_BLOCKS // len(self.ranking.problem.profile.blocks), 1)
        while self._waiting:
            most, first = -self._waiting[0][0], self._waiting[0][2]
            over = self.ranking.left <= self.ranking.reserved and not isinstance(first, SplitConfiguration)
            # 1. The search ends when no remaining bound exceeds the fastest play that fits by more than `CLOSE`, or at
            #    a limit.
            if most <= self.ranking.enough or over:
                break
            item = heappop(self._waiting)[2]
            known = True
            if isinstance(item, Proposal):
                known = self.ranking.add(item)  # 4. A plan is played.
            elif isinstance(item, SplitConfiguration):
                self._make(item, most)  # 3. A split becomes plans, with a flush also with a split backward.
            else:
                known = self.splits < (MOST_SPLITS * shorter if self.ranking.best_rate > 0 else MOST_IN_VAIN)
                if known:
                    self._split(item)  # 2. A configuration is split by its closed form; the split's bound is lower.
                    self._push_next(item.planner, item.others)
                else:
                    unsplit.append(item)
            if not known:  # plans that are too long, or beyond the limit: only their bound is known
                self.left = max(self.left, most)
        beyond = (space.beyond for space in spaces)
        self.left = max([self.left, *beyond, *(-most for most, _, _ in self._waiting)])
        # 5. The closed form's split need not play fastest: the search climbs to others (`climb`).
        climb = Climb(
            ranking=self.ranking,
            tried=self._tried,
            split_of=self._splits,
            propose=self._proposals,
            moved=self.moved,
        )
        climb.run()
        self.most_of_others = max(self.most_of_others, climb.most)
        return unsplit

    def alternatives(self) -> Iterator[Alternative]:
        """Some configurations that were not played, with their upper bounds."""
        for configuration in self.unplayed:
            yield configuration.alternative(f"not played: at most {configuration.most:.4g} samples/s")

    def certificate(self, best: Ranked) -> Certificate:
        """The certificate of the answer's rate."""
        rate = best.samples_per_s
        reached = self.left if self.left > rate * (1 + ROUNDING) else rate
        claim = (
            f"There are {self.configurations} configurations (schedule, width, depth and microbatch size), each with "
            f"its placements. {self.splits} were split into stages, {self.without_split} of them in vain: none fits. "
            f"{self.ranking.plays} plans were played. By a bound on their streams the other plans, and those of what "
            f"was not split, play at most {reached:.6g} samples/s; this plan plays {rate:.6g}."
        )
        of_all = max(reached, self.most_of_others)
        few = of_all > reached * (1 + ROUNDING)
        if few:
            claim += (
                " Of the stages that the split configurations can have few were compared: whatever they are, none "
                f"plays more than {of_all:.6g} samples/s."
            )
        proven = Certificate(
            method=METHOD,
            quantity="seconds a sample, played",
            value=1 / rate,
            bound=1 / reached,
            claim=claim,
            bound_of_all=1 / of_all if few else None,
        )
        graph = next((space.graph for space in self.spaces if space.graph is not None), None)
        return proven if graph is None else graph.among_places(proven)

    def _play_front(self) -> None:
        """Plays some plans more, for the front of throughput against memory: those that hold less, by their bounds."""
        for most, _, item in list(self._waiting) if self.ranking.for_front else ():
            if isinstance(item, SplitConfiguration):
                self._make(item, -most)
        plans = [(-most, item) for most, _, item in self._waiting if isinstance(item, Proposal)]
        held = [each for each in plans if not each[1].plan.split_backward]
        front = pareto_front(
            held,
            throughput_samples_per_s=lambda each: each[0],
            memory_bytes=lambda each: max(rank_bytes(each[1].plan)),
        )
        least = max(self.ranking.left - self.ranking.for_front, 0)
        for most, proposal in front:
            if self.ranking.left <= least:
                break
            if not self.ranking.beats(most, max(rank_bytes(proposal.plan))):
                self.ranking.add(proposal)

    def _push(self, most: float, item: "_Next | SplitConfiguration | Proposal") -> None:
        self._pushed += 1
        heappush(self._waiting, (-most, self._pushed, item))

    def _push_next(self, planner: str, others: Iterator[Configuration]) -> None:
        """Queues the first of a space's other configurations."""
        for configuration in others:
            self._push(configuration.most, _Next(planner, configuration, others))
            break

    def _split(self, item: "_Next") -> None:
        """Splits a configuration into stages, and queues the split."""
        self.splits += 1
        stops = item.configuration.split()
        most = 0.0 if stops is None else item.configuration.most_of(stops)
        self.without_split += stops is None
        if stops:
            self._tried.append(SplitConfiguration(item.planner, item.configuration, stops))
        if most <= self.ranking.enough:
            self.left = max(self.left, most)
        elif stops is not None:
            self._push(most, SplitConfiguration(item.planner, item.configuration, stops))

    def _make(self, split: SplitConfiguration, most: float) -> None:
        """Makes the plans of a split, and queues them; `most` bounds them all."""
        for proposal in self._proposals(*split):
            self._push(min(most_samples_per_s(proposal.plan), most), proposal)

    def _proposals(self, planner: str, configuration: Configuration, stops: tuple[int, ...]) -> Iterator[Proposal]:
        """A configuration with these stages, and with a split backward."""
        fused = configuration.plan(stops)
        for plan in () if fused is None else self.ranking.variants(fused):
            proposal = Proposal(plan=plan, proposer=Proposer(planner), order=self._pushed)
            self._splits.setdefault(proposal.configuration, SplitConfiguration(planner, configuration, stops))
            yield proposal
