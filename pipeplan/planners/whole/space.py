"""Space: an engine's configurations of a model on a cluster, each with an upper bound on its rate.

A configuration has a recipe (form, microbatch size, recomputation, sharding), numbers of ranks, stages and replicas,
and a number of neighbouring replicas of a stage. Its bounds and its likely rate come from sums over blocks, for all
pipelines of a recipe at once; stages are made only for configurations that may win.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import islice
from math import inf

import numpy as np

from pipeplan.costs.groups import grouped
from pipeplan.documents.degrees import ANY_OFFLOAD, OFFLOADS, offloads_optimizer
from pipeplan.documents.engines import TrainingEngine
from pipeplan.documents.forms import ModelForm
from pipeplan.documents.plan import Alternative, Plan
from pipeplan.planners.problem import CutGraph, PlanningProblem
from pipeplan.planners.reasons import unpriced
from pipeplan.planners.spaces import EverySplit, Splits
from pipeplan.planners.whole.budget import BUDGET
from pipeplan.planners.whole.degrees import Degrees, Recipe, Shapes, least_bytes, recipes, shapes, steps_to
from pipeplan.planners.whole.exchanged import hops_before_s, mean_rank_s, placed_batch_s
from pipeplan.planners.whole.made import PlanMaker
from pipeplan.planners.whole.placements import lies_well, placements
from pipeplan.planners.whole.split import Splitter
from pipeplan.planners.whole.terms import RecipeTerms

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedDegrees:
    """A configuration on its placement, with `inside` neighbouring replicas (`placements`).

    `most` is the upper bound on its plays' samples a second.
    """

    space: "WholeSpace"
    degrees: Degrees
    inside: int
    most: float
    likely: float

    @property
    def schedule(self) -> str:
        """The name of its schedule."""
        return self.degrees.schedule

    def split(self) -> tuple[int, ...] | None:
        """Its stages' stops; None if none fit."""
        return next(iter(self.splits()), None)

    def splits(self) -> list[tuple[int, ...]]:
        """Some splits, the shortest batch first, by its bound as if every transfer between ranks shared a link."""
        return self.space.maker(self.degrees).splits(inside=self.inside)

    def likely_of(self, stops: tuple[int, ...]) -> float:
        """An estimate of the samples a second with these stages."""
        batch_s = self.space.maker(self.degrees).likely_s(stops, inside=self.inside)
        return min(self.likely, _rate(self.degrees, batch_s))

    def most_of(self, stops: tuple[int, ...]) -> float:
        """Samples a second that no play with these stages exceeds."""
        maker = self.space.maker(self.degrees)
        reached_s = hops_before_s(maker.terms, self.degrees, self.space.problem.cluster, inside=self.inside)
        return _rate(self.degrees, maker.splitter.times.of(stops, reached_s))

    def most_of_any(self) -> float:
        """Upper bound on samples a second with any stages."""
        return min(self.most, self.space.most_of_any(self.degrees))

    def splits_above(self, rate: float, split: tuple[int, ...]) -> Splits:
        """The splits that may play faster."""
        even = self.most_even()
        return EverySplit(split, self.most_of, rate, some=() if even is None else (even,))

    def most_even(self) -> tuple[int, ...] | None:
        """The split of the least bottleneck; None where none fits."""
        return self.space.maker(self.degrees).splitter.most_even

    def plan(self, stops: tuple[int, ...]) -> Plan | None:
        """Its plan with these stages, not played; None if they do not fit."""
        return self.space.maker(self.degrees).plan(stops, inside=self.inside)

    def alternative(self, reason: str) -> Alternative:
        """Its entry among a plan's alternatives, without a price."""
        recipe = self.degrees.recipe
        return unpriced(
            self.degrees,
            reason,
            recompute=recipe.recompute != "none",
            form=recipe.form,
            sharding=recipe.sharding,
            offload=recipe.offload,
            replicate=recipe.replicate,
            graphs=recipe.graphs,
            a2a_overlap=recipe.a2a_overlap,
            offload_share=recipe.offload_share,
            chunks=self.degrees.chunks,
        )


def _rate(degrees: Degrees, batch_s: float) -> float:
    return degrees.batch_size / (batch_s * (1 - _ROUNDING)) if batch_s > 0 else inf


def best_first(
    every: Iterable[PlacedDegrees], rate: str, lowered: Callable[[PlacedDegrees], PlacedDegrees | None]
) -> Iterator[PlacedDegrees]:
    """The configurations by a rate, the highest first. Each is lowered, or left out, when it comes first."""
    waiting: list[tuple[float, int, PlacedDegrees]] = []
    for number, placed in enumerate(every):
        while waiting and -waiting[0][0] >= getattr(placed, rate):
            yield heappop(waiting)[2]
        exact = lowered(placed)
        if exact is not None:
            heappush(waiting, (-getattr(exact, rate), number, exact))
    while waiting:
        yield heappop(waiting)[2]


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeSpace:
    """The configurations of a problem for an engine."""

    problem: PlanningProblem
    engine: TrainingEngine
    forms: tuple[ModelForm, ...]
    offloaded_only: bool = False
    planner: str = "auto"
    beyond: float = 0.0
    graph: CutGraph | None = None
    _terms: dict[Recipe, RecipeTerms] = field(default_factory=dict)
    _makers: dict[Degrees, PlanMaker] = field(default_factory=dict)
    _inside: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def considered(self) -> int:
        """The number of configurations, without placements."""
        return sum(map(len, self._shapes))

    def configurations(self) -> Iterator[PlacedDegrees]:
        """All configurations that memory does not rule out, the highest bound first. They are made as they are needed.

        Those that offload or hold whole states without need are left out: the same stages take no longer without.
        `offloaded_only` limits their number.
        """
        every = self._by_placement(self._unbeaten(self._bounded), "most")
        useful = (each for each in every if not self._offloads_in_vain(each.degrees))
        yield from (islice(useful, BUDGET.offloading) if self.offloaded_only else useful)

    def with_stages(self, every: Iterable[PlacedDegrees]) -> Iterator[PlacedDegrees]:
        """Those that fit, in the order of the estimates for their first splits."""

        def split(placed: PlacedDegrees) -> PlacedDegrees | None:
            stops = placed.split()
            return None if stops is None else replace(placed, likely=placed.likely_of(stops))

        return best_first(every, "likely", split)

    def likely(self, *, beaten: bool = False) -> Iterator[PlacedDegrees]:
        """The same, the fastest with equal stages first; `beaten`: with those that hold whole states without need."""
        every = self._bounded
        yield from self._by_placement(every if beaten else self._unbeaten(every), "likely")

    def within_memory(self) -> Iterator[Shapes]:
        """The pipelines of `likely`, recipe by recipe."""
        yield from (each.some(np.flatnonzero(each.most > 0.0)) for each in self._bounded)

    def near(self, degrees: Degrees, steps: int = 1) -> Iterator[PlacedDegrees]:
        """The configurations that are `steps` steps away (`steps_to`), on all placements, in the order of `likely`."""
        every = self._unbeaten(self._bounded)
        near = [each.some(np.flatnonzero(steps_to(each, degrees) == steps)) for each in every]
        yield from self._by_placement(near, "likely")

    def _unbeaten(self, every: Sequence[Shapes]) -> list[Shapes]:
        """The undominated ones (`Shapes.unbeaten`)."""
        if self.problem.options.sharding is not None:
            return list(every)
        return [each.some(each.unbeaten(self.engine)) for each in every]

    def holding_least(self) -> Iterator[Degrees]:
        """All configurations, whether they fit or not, in the order of the bytes that they hold on average."""
        every = self._bounded
        each = [(float(held), at, place) for at, one in enumerate(every) for place, held in enumerate(one.held_bytes)]
        yield from (every[at].degrees(place) for _, at, place in sorted(each))

    def _in_order(self, every: Sequence[Shapes], rate: str) -> Iterator[PlacedDegrees]:
        """The configurations by a rate, the highest first."""
        rates = np.concatenate([np.zeros(0), *(getattr(each, rate) for each in every)])
        firsts = np.cumsum([0, *map(len, every)])
        for index in np.argsort(-rates, kind="stable").tolist():
            part = int(np.searchsorted(firsts, index, side="right")) - 1
            bounded, place = every[part], index - int(firsts[part])
            if bounded.most[place] <= 0.0:
                continue
            most, likely = float(bounded.most[place]), float(bounded.likely[place])
            degrees = bounded.degrees(place)
            for inside in self._placements(degrees):
                yield PlacedDegrees(space=self, degrees=degrees, inside=inside, most=most, likely=likely)

    def _by_placement(self, every: Sequence[Shapes], rate: str) -> Iterator[PlacedDegrees]:
        """The same, with rates lowered by their placements' bounds on transfers, which may change the order."""

        def lowered(placed: PlacedDegrees) -> PlacedDegrees:
            degrees = placed.degrees
            at = self.terms(degrees.recipe).at(degrees.data, pipelined=degrees.pipeline > 1)
            least_s, likely_s = placed_batch_s(at, degrees, self.problem.cluster, inside=placed.inside)
            most = min(placed.most, _rate(degrees, least_s))
            return replace(placed, most=most, likely=min(placed.likely, _rate(degrees, likely_s)))

        return best_first(self._in_order(every, rate), rate, lowered)

    def _offloads_in_vain(self, degrees: Degrees) -> bool:
        """Whether the same stages fit, and take no longer, with less on the host; or do not fit with it."""
        recipe, asked = degrees.recipe, self.problem.options
        if recipe.offload == OFFLOADS[0] or asked.offload != ANY_OFFLOAD:
            return False
        stops = next(iter(self.maker(degrees).splitter.several), None)
        if stops is None and recipe.offload_share < 1:
            return True  # a larger share may fit
        alone = degrees.data * recipe.form.context == 1 and "none" in self.engine.shardings
        for other in recipe.offloads_less():
            if alone and not offloads_optimizer(other.offload):
                other = replace(other, sharding="none")
            runs = other.runs_on(self.engine, pipelined=degrees.pipeline > 1)
            if not runs or asked.sharding not in (None, other.sharding):
                continue
            without = self.maker(replace(degrees, recipe=other))
            own = self.maker(degrees).terms
            if without.terms.no_slower(own) and stops and without.splitter.fits(stops):
                return True
        return False

    def _placements(self, degrees: Degrees) -> tuple[int, ...]:
        """The placements that differ. In a pipeline, replicas exchange everything once a batch."""
        form = degrees.recipe.form
        key = form.devices, form.replicas_together, degrees.pipeline, degrees.data
        if key not in self._inside:
            groups = grouped(self.problem.cluster, form.devices)
            self._inside[key] = placements(groups, degrees.pipeline, degrees.data, together=form.replicas_together)
        return self._inside[key]

    def maker(self, degrees: Degrees) -> PlanMaker:
        """The maker of a configuration's plans."""
        if degrees in self._makers:
            return self._makers[degrees]
        terms = self.terms(degrees.recipe).at(degrees.data, pipelined=degrees.pipeline > 1)
        limit = self.problem.cluster.device.usable_bytes
        on_host = self.room_on_host(degrees.recipe)
        splitter = Splitter(terms=terms, degrees=degrees, device_bytes=limit, host_bytes=on_host)
        made = PlanMaker(problem=self.problem, engine=self.engine, terms=terms, degrees=degrees, splitter=splitter)
        self._makers[degrees] = made
        return made

    def room_on_host(self, recipe: Recipe) -> float:
        """The bytes that a device may have on its host; infinite if it offloads nothing."""
        host = self.problem.cluster.host
        return inf if host is None or recipe.offload == "none" else host.memory_bytes

    def terms(self, recipe: Recipe) -> RecipeTerms:
        """The terms of a recipe's blocks."""
        if recipe not in self._terms:
            model = next(each for each in self.forms if each.form == recipe.form)
            terms = RecipeTerms(problem=self.problem, engine=self.engine, model=model, recipe=recipe)
            self._terms[recipe] = terms
        return self._terms[recipe]

    def most_of_any(self, degrees: Degrees) -> float:
        """Upper bound on samples a second with any stages; infinite if it is not known."""
        return _rate(degrees, self.maker(degrees).splitter.least_s)

    @cached_property
    def _bounded(self) -> list[Shapes]:
        return [self._rated(each) for each in self._shapes]

    @cached_property
    def _shapes(self) -> list[Shapes]:
        """Every recipe's pipelines."""
        found = list[Shapes]()
        kept: dict[object, Shapes] = {}
        whole_groups = {each.form.devices for each in self.forms if lies_well(self.problem.cluster, each.form)}
        for recipe in recipes(self.problem, self.engine, self.forms):
            if recipe.form.devices not in whole_groups or (self.offloaded_only and recipe.offload == OFFLOADS[0]):
                continue
            ways = tuple(recipe.runs_on(self.engine, pipelined=pipelined) for pipelined in (False, True))
            devices, together = recipe.form.devices, recipe.form.replicas_together
            alone = recipe.sharding == "none" or offloads_optimizer(recipe.offload)
            key = recipe.microbatch_size, devices, recipe.form.context > 1, together, recipe.replicate, ways, alone
            if key not in kept:
                kept[key] = shapes(self.problem, self.engine, recipe, len(self.forms[0].blocks))
            found.append(replace(kept[key], recipe=recipe))
        return found

    def _rated(self, found: Shapes) -> Shapes:
        """Bounds from the whole model, and the rates of equal stages; 0 for pipelines that cannot fit."""
        terms = self.terms(found.recipe)
        room_on_host = self.room_on_host(found.recipe)
        most, likely, held = np.zeros(len(found)), np.zeros(len(found)), np.zeros(len(found))
        kinds = np.unique(np.stack([found.data, found.pipeline > 1]), axis=1).T.tolist()
        for data, pipelined in kinds:
            chosen = np.flatnonzero((found.data == data) & ((found.pipeline > 1) == pipelined))
            some = found.some(chosen)
            at = terms.at(data, pipelined=bool(pipelined))
            rank_s = np.asarray([at.slowest_rank_s(ranks) for ranks in some.pipeline.tolist()])
            update_s = float(at.states.update_s[-1])
            way_s = float(at.forward_s[-1] + at.backward_s[-1])
            m, p = some.microbatches, some.pipeline
            fill_s = np.where(some.chunks > 1, 0.0, way_s / (1 - (1 - 1 / m) ** p))
            exchanged_s = mean_rank_s(at, some, self.problem.cluster)
            sent_s = np.where(p > 1, some.chunks * m * terms.least_send_s, 0.0)
            rounds_s = np.where(some.chunks > 1, 0.0, m * (way_s + (p - 1) * terms.hop_s) / np.minimum(p, m))
            least_s = np.max([m * rank_s, exchanged_s, fill_s, sent_s, rounds_s], axis=0)
            batch_s = np.maximum((m + (p - 1) / some.chunks) * rank_s + update_s / p, least_s)
            samples = self.problem.batch_size * np.ones(len(some))
            held[chosen] = least_bytes(some, float(at.states.fixed_bytes[-1]), float(at.kept_bytes[-1]))
            by_host = least_bytes(some, float(at.states.host_bytes[-1]), float(at.left_bytes[-1]))
            fits = (held[chosen] <= self.problem.cluster.device.usable_bytes) & (by_host <= room_on_host)
            most[chosen] = np.where(fits, samples / (least_s * (1 - _ROUNDING)), 0.0)
            likely[chosen] = np.where(fits, samples / batch_s, 0.0)
        return replace(found, most=most, likely=likely, held_bytes=held)
