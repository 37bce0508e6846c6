"""Climb: a local search by play, over the stages of the configurations that may be faster than the fastest play.

The closed form's stages need not play fastest. No play reaches its bound, and the shares of their bounds that plays of
a configuration reach predict what its other stages reach. The likely fastest stages come first, and the neighbours of
the fastest plays. The steps are numbered in the code.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import islice
from math import inf
from statistics import median
from typing import NamedTuple

from pipeplan.documents.plan import Plan
from pipeplan.planners.auto.proposals import Proposal
from pipeplan.planners.auto.ranking import Ranked, Ranking
from pipeplan.planners.bound import most_samples_per_s
from pipeplan.planners.spaces import Configuration, moved_by_a_block

FEW_SPLITS = 300
"""Up to this number, all stages of a configuration that may be faster are tried."""

SOME_OF_EACH = 24
"""The number of stages, those with the highest bounds, from which a configuration with more of them climbs."""

NEIGHBOURS = 24
"""Of a neighbourhood, the number of stages with the highest bounds that become plans."""

FASTEST, WITHIN = 8, 0.9
"""The number of fastest plays whose neighbours are tried, and the share of the fastest play that others must reach."""

BOUND_WITHIN = 0.97
"""The neighbours of stages are tried without a play of them if their bound is this share of the fastest play."""

PLANNED_BLOCKS, PLANS = 40_000, 300
"""Upper bound on the plans made of stages, by their blocks, and in any case: a few seconds, without their plays. Bounds
count as well, in proportion to their time.
"""

PLAN_INSTRUCTIONS, BOUND_INSTRUCTIONS = 2000, 100
"""The number of instructions played in the time that a plan, and that a bound of stages, takes to make."""

COUNTED, COUNTED_BLOCKS = 100, 3000
"""Upper bounds on the configurations whose faster stages are counted, and on the sum of their blocks if that is more: a
fifth of a second.
"""


class SplitConfiguration(NamedTuple):
    """A configuration of a planner's space, with the stops of its stages; none where its cuts cannot be moved."""

    planner: str
    configuration: Configuration
    stops: tuple[int, ...]

    @property
    def key(self) -> object:
        """Equal for the same stages of the same configuration."""
        return id(self.configuration), self.stops


@dataclass(frozen=True, slots=True)
class _Stages:
    """Stages that have no plan yet; only plans of the same `way` are made, if it is given."""

    split: SplitConfiguration
    way: object = None


@dataclass(slots=True)
class _Turns:
    """The waiting items of a schedule, the likely fastest first, and the instructions that it has spent."""

    waiting: list[tuple[float, int, float, _Stages | Proposal]] = field(default_factory=list)
    spent: int = 0


@dataclass(slots=True, kw_only=True)
class Climb:
    """The climb from the configurations that were `tried`. After `run`, `most` bounds the rate of all their stages: of
    few ones by what is left of them, of others whatever their stages are.

    `split_of` is the split of each proposal, `propose` makes proposals of a split, and `moved` yields the neighbours of
    a plan that no configuration describes, the likely fastest first. Of rates, `most` is an upper bound, `enough` the
    rate above which a bound is worth a play, and `likely` what a bound promises by its share: `_made` has the shares
    of stages' bounds that their plans' bounds reach, `_played` those of plans' bounds that plays reach.
    """

    ranking: Ranking
    tried: Sequence[SplitConfiguration]
    split_of: Mapping[object, SplitConfiguration]
    propose: Callable[[str, Configuration, tuple[int, ...]], Iterator[Proposal]]
    moved: Callable[[Plan], Iterator[Plan]]
    most: float = 0.0
    _turns: dict[str, _Turns] = field(default_factory=lambda: defaultdict(_Turns))
    _pushed: int = 0
    _plans: float = 0.0
    _seen: set[object] = field(default_factory=set)
    _expanded: set[object] = field(default_factory=set)
    _made: dict[int, float] = field(default_factory=dict)
    _played: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))

    def run(self) -> None:
        """Climbs until nothing is likely to be faster, or the instructions for it are spent."""
        # 1. The climb starts from the stages with the highest bounds, and from the fastest plays.
        for ranked in self.ranking.fitting:
            self._learn(ranked)
        self._list_starts()
        over = [each for each in self.ranking.exceeding if each.played and self._split_of(each) is None]
        by_size = {each.plan.microbatch_size: each for each in reversed(over)}  # the first one of each size
        self._near.spent = sum(self._expand(ranked) for ranked in (*self._fastest, *by_size.values()))
        # 2. Bounds of some schedules are looser than those of others, and would take all plays. So the schedule that
        #    has spent the fewest instructions comes next.
        least = max(self.ranking.left - self.ranking.for_climb, 0)
        plans = max(PLANS, PLANNED_BLOCKS // len(self.ranking.problem.profile.blocks))
        while self.ranking.left > least and self._plans < plans:
            open_to = [each for each in self._turns.values() if each.waiting]
            if not open_to:
                if any(self._expand(ranked) for ranked in self._fastest):
                    continue
                break
            turns = min(open_to, key=lambda each: (each.spent, each.waiting[0][0]))
            _, _, most, item = heappop(turns.waiting)
            turns.spent += self._take(most, item, turns)
        waiting = (item for turns in self._turns.values() if turns is not self._near for item in turns.waiting)
        self.most = max([self.most, *(most for _, _, most, _ in waiting)])

    @property
    def _fastest(self) -> list[Ranked]:
        return sorted((each for each in self.ranking.fitting if each.played), key=Ranked.preference)[:FASTEST]

    def _list_starts(self) -> None:
        """Lists the stages that may play faster than the best: all of them where they are few, else some."""
        enough = self.ranking.enough
        counted = max(COUNTED, COUNTED_BLOCKS // len(self.ranking.problem.profile.blocks))
        bounded = ((each.configuration.most_of_any(), each) for each in self.tried if each.configuration.most > enough)
        open_to = [(self._likely(each.configuration, most), each) for most, each in bounded if most > enough]
        open_to.sort(key=lambda each: -each[0])
        for index, (_, tried) in enumerate(open_to):
            configuration = tried.configuration
            splits = configuration.splits_above(enough, tried.stops) if index < counted else None
            are_few = splits is not None and splits.count <= FEW_SPLITS
            if not are_few:
                self.most = max(self.most, configuration.most_of_any())
                self._push_stages(tried, configuration.most_of(tried.stops))
            if splits is not None:
                for most, stops in splits.highest(FEW_SPLITS if are_few else SOME_OF_EACH):
                    self._push_stages(tried._replace(stops=stops), most)
        for _, configuration, _ in self.tried:  # splits up to `enough` are never played
            self.most = max(self.most, min(configuration.most_of_any(), enough))

    def _take(self, most: float, item: _Stages | Proposal, turns: _Turns) -> int:
        """Makes plans of stages, plays a plan, or lists neighbours; returns the instructions that this is worth."""
        enough, left = self.ranking.enough, self.ranking.left
        if most <= enough:  # Stages that are too slow for a play may have neighbours that are not.
            if isinstance(item, _Stages) and item.way is None and most > enough * BOUND_WITHIN:
                return self._expand_stages(item.split, most)
            return 0
        if isinstance(item, _Stages):  # 3. Stages become plans, whose bounds are lower.
            self._plans += 1
            configuration = item.split.configuration
            for proposal in self.propose(*item.split):
                if item.way in (None, proposal.way):
                    bound = min(most_samples_per_s(proposal.plan), most)
                    self._made[id(configuration)] = bound / most
                    likely = inf if turns is self._near else bound * self._share(configuration)
                    self._push(turns, likely, bound, proposal)
            return PLAN_INSTRUCTIONS
        # 4. A plan is played. If it is among the fastest, its neighbours follow.
        needed = self.ranking.best_rate * WITHIN
        if not self.ranking.add(item) and turns is not self._near:  # too long: only its bound is known
            self.most = max(self.most, most)
        ranked, near = self.ranking.found(item), 0
        if ranked is not None and ranked.played:
            self._learn(ranked)
            near = self._expand(ranked) if ranked.over is None and ranked.samples_per_s > needed else 0
        return left - self.ranking.left + near

    def _expand(self, ranked: Ranked) -> int:
        """5. The neighbours of a play wait for their turns; of a plan that no configuration describes, its `moved`."""
        if ranked.proposal.configuration in self._expanded:
            return 0
        self._expanded.add(ranked.proposal.configuration)
        split = self._split_of(ranked)
        if split is not None:
            return self._expand_stages(split, ranked.samples_per_s, ranked.proposal.way)
        near = [replace(ranked.proposal, plan=plan) for plan in islice(self.moved(ranked.plan), NEIGHBOURS)]
        rate = min(ranked.samples_per_s, self.ranking.best_rate)  # a plan that exceeds the batch may be faster
        for proposal in near:
            if self.ranking.found(proposal) is None:
                self._push(self._near, rate, most_samples_per_s(proposal.plan), proposal)
        self._plans += len(near)
        return PLAN_INSTRUCTIONS * len(near)

    def _expand_stages(self, split: SplitConfiguration, rate: float, way: object = None) -> int:
        """The neighbours of stages that have the highest bounds."""
        near = [split._replace(stops=stops) for stops in moved_by_a_block(split.stops)]
        others = [other for other in near if other.key not in self._seen]
        bounded = [(split.configuration.most_of(other.stops), other.stops) for other in others]
        for most, stops in sorted(bounded, reverse=True)[:NEIGHBOURS]:
            other = split._replace(stops=stops)
            if most > (self.ranking.enough if way else rate):  # without a play, bounds rise
                self._seen.add(other.key)
                self._push(self._near, rate, most, _Stages(other, way))
        self._plans += len(others) * BOUND_INSTRUCTIONS / PLAN_INSTRUCTIONS
        return BOUND_INSTRUCTIONS * len(others)

    def _push_stages(self, split: SplitConfiguration, most: float) -> None:
        if split.key not in self._seen:
            self._seen.add(split.key)
            configuration = split.configuration
            self._push(self._turns[configuration.schedule], self._likely(configuration, most), most, _Stages(split))

    def _push(self, turns: _Turns, likely: float, most: float, item: _Stages | Proposal) -> None:
        self._pushed += 1
        heappush(turns.waiting, (-likely, self._pushed, most, item))

    @property
    def _near(self) -> _Turns:
        """The turns of neighbours, of whatever schedule."""
        return self._turns["neighbours"]

    def _split_of(self, ranked: Ranked) -> SplitConfiguration | None:
        split = self.split_of.get(ranked.proposal.configuration)
        return split if split is not None and split.stops else None

    def _learn(self, ranked: Ranked) -> None:
        """Notes a play that fits, as a share of its plan's bound."""
        split = self._split_of(ranked)
        if split is not None and ranked.played and ranked.over is None:
            configuration = split.configuration
            most = min(most_samples_per_s(ranked.plan), configuration.most)
            self._made.setdefault(id(configuration), most / configuration.most_of(split.stops))
            known = self._played[configuration.schedule]
            known[id(configuration)] = max(ranked.samples_per_s / most, known.get(id(configuration), 0.0))

    def _likely(self, configuration: Configuration, most: float) -> float:
        """The rate that stages with the bound `most` are likely to play."""
        return most * self._made.get(id(configuration), 1.0) * self._share(configuration)

    def _share(self, configuration: Configuration) -> float:
        """A play's rate, as a share of its plan's bound. Without a play, it is the median of the schedule's
        configurations, or the minimum of all.
        """
        known = self._played[configuration.schedule]
        if id(configuration) in known:
            return known[id(configuration)]
        if known:
            return median(known.values())
        return min((share for each in self._played.values() for share in each.values()), default=1.0)
