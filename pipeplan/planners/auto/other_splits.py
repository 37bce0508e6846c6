"""Other splits: the part of a search by play that looks beyond the splits that the closed forms choose.

1. The splits of a configuration are bounded as wholes, with their transfers, and listed by their bounds (`splits`).
2. No play reaches its bound. The shares of their bounds that plans and plays of a configuration reach predict what its
   other splits reach (`Shares`). Of a schedule, the split that is likely to be the fastest comes next.
3. Bounds of some schedules are looser than those of others, and would take all plays. So the schedule that has spent
   the fewest instructions comes next.
4. Configurations with few splits are played to the end. All others share a number of plans.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import median
from typing import TypeAlias

from pipeplan.planners.auto.proposals import Proposal
from pipeplan.planners.auto.ranking import Ranked, Ranking
from pipeplan.planners.bound import most_samples_per_s
from pipeplan.planners.spaces import Configuration

FEW_SPLITS = 300
"""Up to this number, all splits that may be faster are made into plans, which takes a second."""

SOME_OF_EACH, SOME_SPLITS = 24, 300
"""The number of splits listed for a configuration with more, and of plans made of all these: a third of a second
without their plays.
"""

PLAN_INSTRUCTIONS = 2000
"""The number of instructions played in the time that a plan takes to make: two to five milliseconds."""

COUNTED, COUNTED_BLOCKS = 100, 3000
"""Upper bounds on the configurations whose faster splits are counted, and on the sum of their blocks if that is more: a
fifth of a second.
"""

Split: TypeAlias = tuple[str, Configuration, tuple[int, ...]]
"""A space's planner, its configuration, and where the stages end."""


@dataclass(slots=True, kw_only=True)
class _Listed:
    """Splits of a configuration, each with its bound, the highest last; `few` if they are all that may be faster."""

    planner: str
    configuration: Configuration
    few: bool
    splits: list[tuple[float, tuple[int, ...]]]

    @property
    def most(self) -> float:
        """The bound of the next one."""
        return self.splits[-1][0]


@dataclass(slots=True, kw_only=True)
class Shares:
    """The shares of the bounds that a configuration reaches: its latest plan's bound over its split's, and its fastest
    play's rate over the plan's bound.
    """

    _made: dict[int, float] = field(default_factory=dict)
    _played: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))

    def likely(self, configuration: Configuration, most: float) -> float:
        """The rate that a split with the bound `most` is likely to play: `most` if its configuration has no plan."""
        return most * self._made.get(id(configuration), 1.0) * self.played(configuration)

    def played(self, configuration: Configuration) -> float:
        """A play's rate, as a share of its plan's bound. Without a play, it is the median of the schedule's
        configurations, or the minimum of all.
        """
        known = self._played[configuration.schedule]
        if id(configuration) in known:
            return known[id(configuration)]
        if known:
            return median(known.values())
        return min((share for each in self._played.values() for share in each.values()), default=1.0)

    def learn_made(self, configuration: Configuration, share: float) -> None:
        """Notes a plan's bound, as a share of its split's."""
        self._made[id(configuration)] = share

    def learn_played(self, ranked: Ranked, configuration: Configuration, stops: tuple[int, ...]) -> None:
        """Notes a play, if it fits."""
        if ranked.played and ranked.over is None:
            most = min(most_samples_per_s(ranked.plan), configuration.most)
            self._made.setdefault(id(configuration), most / configuration.most_of(stops))
            known = self._played[configuration.schedule]
            known[id(configuration)] = max(ranked.samples_per_s / most, known.get(id(configuration), 0.0))


@dataclass(slots=True)
class _Turns:
    """The waiting splits of a schedule, the likely fastest first, and the instructions that it has spent."""

    waiting: list[tuple[float, int, float, Proposal | _Listed]] = field(default_factory=list)
    spent: int = 0


@dataclass(slots=True, kw_only=True)
class OtherSplits:
    """Splits of the configurations that were `tried`. After `play`, `most` bounds the rate of the remaining ones.

    `split_of` is the split of each proposal, `propose` makes proposals of a split.
    """

    ranking: Ranking
    tried: Sequence[Split]
    split_of: Mapping[object, Split]
    propose: Callable[[str, Configuration, tuple[int, ...]], Iterator[Proposal]]
    most: float = 0.0
    shares: Shares = field(default_factory=Shares)
    _turns: dict[str, _Turns] = field(default_factory=lambda: defaultdict(_Turns))
    _pushed: int = 0
    _plans: int = SOME_SPLITS

    def play(self) -> bool:
        """Plays those that are likely to be faster than the best: schedules take turns, each with its likely fastest.
        Returns whether these were all.
        """
        for ranked in self.ranking.fitting:
            self._learn(ranked)
        least, every = max(self.ranking.left - self.ranking.for_splits, 0), self._list(self.ranking.enough)
        while open_to := [each for each in self._turns.values() if each.waiting]:
            turns = min(open_to, key=lambda each: (each.spent, each.waiting[0][0]))
            likely, _, most, item = heappop(turns.waiting)
            if most <= self.ranking.enough:
                continue
            if self.ranking.left <= least:
                self.most = max([self.most, most, *(each[2] for other in open_to for each in other.waiting)])
                return False
            if isinstance(item, Proposal):
                left = self.ranking.left
                self.ranking.add(item)
                turns.spent += left - self.ranking.left
                self._learn(self.ranking.found(item))
            elif self.shares.likely(item.configuration, most) < -likely:  # less than when its turn was fixed
                self._wait(item)
            elif item.few or self._plans > 0:
                turns.spent += PLAN_INSTRUCTIONS
                self._make(item)
        return every

    def _list(self, enough: float) -> bool:
        """Lists the splits that may play more than `enough`, and returns whether these are all.

        They are all splits of the configurations that have few, as long as these are few together, and of each other
        configuration some with the highest bounds.
        """
        few, every = FEW_SPLITS, True
        counted = max(COUNTED, COUNTED_BLOCKS // len(self.ranking.problem.profile.blocks))
        bounded = ((each[1].most_of_any(), each) for each in self.tried if each[1].most > enough)
        open_to = [(self.shares.likely(each[1], most), each) for most, each in bounded if most > enough]
        for index, (planner, configuration, tried) in enumerate(by_turns(open_to)):
            splits = configuration.splits_above(enough, tried) if index < counted else None
            are_few = splits is not None and splits.count <= few
            if not are_few:
                every = False
                if configuration.most > self.most:
                    self.most = max(self.most, configuration.most_of_any())
            if splits is not None:
                few -= int(splits.count) if are_few else 0
                found = [*reversed(splits.highest(FEW_SPLITS if are_few else SOME_OF_EACH))]
                if found:
                    self._wait(_Listed(planner=planner, configuration=configuration, few=are_few, splits=found))
        for _, configuration, _ in self.tried:  # splits up to `enough` are never played
            if min(configuration.most, enough) > self.most:
                self.most = max(self.most, min(configuration.most_of_any(), enough))
        return every

    def _wait(self, listed: _Listed) -> None:
        """Fixes the turn of a configuration's next split."""
        self._push(listed.configuration, self.shares.likely(listed.configuration, listed.most), listed.most, listed)

    def _make(self, listed: _Listed) -> None:
        """Lets the plans of a configuration's next split wait for their turns."""
        configuration, (most, stops) = listed.configuration, listed.splits.pop()
        for proposal in self.propose(listed.planner, configuration, stops):
            bound = min(most_samples_per_s(proposal.plan), most)
            self.shares.learn_made(configuration, bound / most)
            self._push(configuration, bound * self.shares.played(configuration), bound, proposal)
            self._plans -= not listed.few
        if listed.splits:
            self._wait(listed)

    def _push(self, configuration: Configuration, likely: float, most: float, item: Proposal | _Listed) -> None:
        self._pushed += 1
        heappush(self._turns[configuration.schedule].waiting, (-likely, self._pushed, most, item))

    def _learn(self, ranked: Ranked | None) -> None:
        if ranked is not None:
            _, configuration, stops = self.split_of.get(ranked.proposal.configuration, ("", None, ()))
            if configuration is not None and stops:
                self.shares.learn_played(ranked, configuration, stops)


def by_turns(splits: Sequence[tuple[float, Split]]) -> list[Split]:
    """Of splits with their likely rates, the likely fastest of every schedule, then the next ones."""
    before, turns = Counter[str](), list[tuple[int, int]]()
    ordered = sorted(splits, key=lambda each: -each[0])
    for index, (_, (_, configuration, _)) in enumerate(ordered):
        turns.append((before[configuration.schedule], index))
        before[configuration.schedule] += 1
    return [ordered[index][1] for _, index in sorted(turns)]
