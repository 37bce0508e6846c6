"""Space: an engine's configurations of a model on a cluster, each with an upper bound on its rate.

A configuration has a recipe (form, microbatch size, recomputation, sharding), numbers of ranks, stages and replicas,
and a number of neighbouring replicas of a stage. Its bounds and its likely rate come from sums over blocks, for all
pipelines of a recipe at once; stages are made only for configurations that may win.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush, merge
from itertools import islice
from math import inf

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.costs.groups import grouped, links_among
from pipeplan.documents.degrees import ANY_OFFLOAD, OFFLOADS, offloads_optimizer
from pipeplan.documents.engines import TrainingEngine
from pipeplan.documents.forms import ModelForm
from pipeplan.documents.plan import Alternative, Plan
from pipeplan.planners.problem import CutGraph, PlanningProblem
from pipeplan.planners.reasons import unpriced
from pipeplan.planners.spaces import EverySplit, Splits
from pipeplan.planners.whole.degrees import Degrees, Recipe, Shapes, even_bytes, least_bytes, recipes, shapes, steps_to
from pipeplan.planners.whole.exchanged import hops_before_s, least_with_exchange_s, placed_batch, sending_s
from pipeplan.planners.whole.made import PlanMaker
from pipeplan.planners.whole.placements import lies_well, placements
from pipeplan.planners.whole.split import Splitter
from pipeplan.planners.whole.terms import RecipeTerms, ReplicaTerms

MOST_OFFLOADED = 40
"""Upper bound on the configurations searched if all of them offload without a request: up to half a second."""

NEARLY_FULL = 0.8
"""Unless a plan offloads, its devices are nearly full from this share on."""

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
        maker = self.space.maker(self.degrees)
        batch_s = maker.likely_s(stops, inside=self.inside)
        return min(self.likely, self.degrees.batch_size / batch_s if batch_s > 0 else inf)

    def most_of(self, stops: tuple[int, ...]) -> float:
        """Samples a second that no play with these stages exceeds."""
        return self.space.most_of(self.degrees, stops, inside=self.inside)

    def most_of_any(self) -> float:
        """Upper bound on samples a second with any stages."""
        return min(self.most, self.space.most_of_any(self.degrees))

    def splits_above(self, rate: float, split: tuple[int, ...]) -> Splits:
        """The splits that may play faster."""
        return EverySplit(split, self.most_of, rate)

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Bounded:
    """The pipelines of a recipe with two rates: an upper bound, and the estimate for equal stages."""

    shapes: Shapes
    most: FloatArray
    likely: FloatArray
    held_bytes: FloatArray

    def some(self, chosen: IntArray) -> "_Bounded":
        """The pipelines at these places."""
        most, likely, held_bytes = (each[chosen] for each in (self.most, self.likely, self.held_bytes))
        return _Bounded(shapes=self.shapes.some(chosen), most=most, likely=likely, held_bytes=held_bytes)


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
        return sum(map(len, (*self._shapes, *self._fewer)))

    def configurations(self, needed: Callable[[], float] | None = None) -> Iterator[PlacedDegrees]:
        """All configurations that memory does not rule out, the highest bound first. They are made as they are needed.

        Those that offload or hold whole states without need are left out: the same stages take no longer without.
        `offloaded_only` limits their number (`MOST_OFFLOADED`).
        """
        every = self._with_fewer(self._by_placement(self._unbeaten(self._bounded), "most"))
        useful = (each for each in every if not self._offloads_in_vain(each.degrees))
        yield from (islice(useful, MOST_OFFLOADED) if self.offloaded_only else useful)

    def with_stages(self, every: Iterable[PlacedDegrees]) -> Iterator[PlacedDegrees]:
        """Those that fit, in the order of the estimates for their first splits."""

        def split(placed: PlacedDegrees) -> PlacedDegrees | None:
            stops = placed.split()
            return None if stops is None else replace(placed, likely=placed.likely_of(stops))

        return best_first(every, "likely", split)

    def likely(self, *, beaten: bool = False) -> Iterator[PlacedDegrees]:
        """The same, the fastest with equal stages first; `beaten`: with those that hold whole states without need."""
        every = self._bounded_likely
        yield from self._by_placement(every if beaten else self._unbeaten(every), "likely")

    def within_memory(self) -> Iterator[Shapes]:
        """The pipelines of `likely`, recipe by recipe."""
        yield from (each.shapes.some(np.flatnonzero(each.most > 0.0)) for each in self._bounded_likely)

    def near(self, degrees: Degrees, steps: int = 1) -> Iterator[PlacedDegrees]:
        """The configurations that are `steps` steps away (`steps_to`), on all placements, in the order of `likely`."""
        every = self._unbeaten(self._bounded_likely)
        near = [each.some(np.flatnonzero(steps_to(each.shapes, degrees) == steps)) for each in every]
        yield from self._by_placement(near, "likely")

    def _unbeaten(self, every: Sequence[_Bounded]) -> list[_Bounded]:
        """The undominated ones (`Shapes.unbeaten`)."""
        if self.problem.options.sharding is not None:
            return list(every)
        return [each.some(each.shapes.unbeaten(self.engine)) for each in every]

    def _with_fewer(self, ready: Iterator[PlacedDegrees]) -> Iterator[PlacedDegrees]:
        """These, and those with fewer replicas than the devices allow, which can be faster if exchanges are slow.

        The latter are bounded only when no remaining bound exceeds all of theirs.
        """
        for placed in ready:
            if placed.most < self._most_of_fewer:
                fewer = self._by_placement(self._unbeaten(self._bounded_fewer), "most")
                yield from merge([placed], ready, fewer, key=lambda each: -each.most)
                return
            yield placed
        yield from self._by_placement(self._unbeaten(self._bounded_fewer), "most")

    def holding_least(self) -> Iterator[Degrees]:
        """All configurations, whether they fit or not, in the order of the bytes that they hold on average."""
        every = [*self._bounded, *self._bounded_fewer]
        each = [(float(held), at, place) for at, one in enumerate(every) for place, held in enumerate(one.held_bytes)]
        yield from (every[at].shapes.degrees(place) for _, at, place in sorted(each))

    def _in_order(self, every: Sequence[_Bounded], rate: str) -> Iterator[PlacedDegrees]:
        """The configurations by a rate, the highest first."""
        rates = np.concatenate([np.zeros(0), *(getattr(each, rate) for each in every)])
        firsts = np.cumsum([0, *(len(each.shapes) for each in every)])
        for index in np.argsort(-rates, kind="stable").tolist():
            part = int(np.searchsorted(firsts, index, side="right")) - 1
            bounded, place = every[part], index - int(firsts[part])
            if bounded.most[place] <= 0.0:
                continue
            most, likely = float(bounded.most[place]), float(bounded.likely[place])
            degrees = bounded.shapes.degrees(place)
            for inside in self._placements(degrees):
                yield PlacedDegrees(space=self, degrees=degrees, inside=inside, most=most, likely=likely)

    def _by_placement(self, every: Sequence[_Bounded], rate: str) -> Iterator[PlacedDegrees]:
        """The same, with rates lowered by their placements' bounds on transfers, which may change the order."""

        def lowered(placed: PlacedDegrees) -> PlacedDegrees:
            degrees = placed.degrees
            at = self.terms(degrees.recipe).at(degrees.data, pipelined=degrees.pipeline > 1)
            batch = placed_batch(at, degrees, self.problem.cluster, inside=placed.inside)
            most = min(placed.most, self._rate(degrees, batch.least_s))
            return replace(placed, most=most, likely=min(placed.likely, self._rate(degrees, batch.likely_s)))

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

    def most_of(self, degrees: Degrees, stops: tuple[int, ...], *, inside: int) -> float:
        """Samples a second that no play with these stages exceeds."""
        made = self.maker(degrees)
        reached_s = hops_before_s(made.terms, degrees, self.problem.cluster, inside=inside)
        return self._rate(degrees, made.splitter.times.of(stops, reached_s))

    def most_of_any(self, degrees: Degrees) -> float:
        """Upper bound on samples a second with any stages; infinite if it is not known."""
        return self._rate(degrees, self.maker(degrees).splitter.least_s)

    def _rate(self, degrees: Degrees, batch_s: float) -> float:
        return degrees.batch_size / (batch_s * (1 - _ROUNDING)) if batch_s > 0 else inf

    @cached_property
    def _bounded(self) -> list[_Bounded]:
        return [self._rates(each) for each in self._shapes]

    @cached_property
    def _bounded_likely(self) -> list[_Bounded]:
        """`_bounded`, and `_bounded_fewer` if one of the latter may be as fast."""
        first = next(self._by_placement(self._bounded, "likely"), None)
        some_fewer = first is None or self._most_of_fewer > first.likely
        return [*self._bounded, *self._bounded_fewer] if some_fewer else self._bounded

    @cached_property
    def _bounded_fewer(self) -> list[_Bounded]:
        return [self._rates(each) for each in self._fewer]

    @cached_property
    def _shapes(self) -> list[Shapes]:
        """Every recipe's pipelines with the maximum number of replicas."""
        return list(self._listed(most_replicas=True))

    @cached_property
    def _fewer(self) -> list[Shapes]:
        """Every recipe's pipelines with fewer replicas."""
        return list(self._listed(most_replicas=False))

    def _listed(self, *, most_replicas: bool) -> Iterator[Shapes]:
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
                blocks = len(self.forms[0].blocks)
                kept[key] = shapes(self.problem, self.engine, recipe, blocks, most_replicas=most_replicas)
            found = kept[key].of(recipe)
            yield found.some(self._nearly_full(found)) if self.offloaded_only else found

    def _nearly_full(self, found: Shapes) -> IntArray:
        """The places of pipelines that, with even stages, nearly fill a device unless they offload."""
        without = replace(found.recipe, offload=OFFLOADS[0], offload_share=1.0)
        terms, blocks = self.terms(without), len(self.forms[0].blocks)
        held = np.zeros(len(found))
        for data, pipelined in np.unique(np.stack([found.data, found.pipeline > 1]), axis=1).T.tolist():
            at = terms.at(data, pipelined=bool(pipelined))
            chosen = (found.data == data) & ((found.pipeline > 1) == pipelined)
            even = even_bytes(found, blocks, float(at.states.fixed_bytes[-1]), float(at.kept_bytes[-1]))
            held[chosen] = (even + at.transient_bytes.max())[chosen]
        return np.flatnonzero(held > NEARLY_FULL * self.problem.cluster.device.usable_bytes)

    @cached_property
    def _most_of_fewer(self) -> float:
        """Upper bound on samples a second of `_fewer`."""
        return max((self._most_computed(each) for each in self._fewer if len(each)), default=0.0)

    def _most_computed(self, found: Shapes) -> float:
        """Upper bound on the rate of a recipe's pipelines: only compute, and the most replicas share states."""
        terms, limit = self.terms(found.recipe), self.problem.cluster.device.usable_bytes
        step_s = float((terms.forward_s + terms.backward_s + terms.again_s).sum())
        fits = np.zeros(len(found), dtype=bool)
        for pipelined in (False, True):
            at = terms.at(int(found.data.max()), pipelined=pipelined)
            held = least_bytes(found, float(at.states.fixed_bytes[-1]), float(at.kept_bytes[-1]))
            fits |= ((found.pipeline > 1) == pipelined) & (held <= limit)
        ranks = float((found.pipeline * found.data * fits).max())
        return ranks * found.recipe.microbatch_size / (step_s * (1 - _ROUNDING)) if step_s > 0 else inf

    def _rates(self, found: Shapes) -> _Bounded:
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
            way_s = float(at.forward_s[-1] + at.backward_s[-1])
            m, p = some.microbatches, some.pipeline
            fill_s = np.where(some.chunks > 1, 0.0, way_s / (1 - (1 - 1 / m) ** p))
            exchanged_s = least_with_exchange_s(at, some, self.problem.cluster)
            sent_s = np.where(p > 1, some.chunks * m * terms.least_send_s, 0.0)
            rounds_s = np.where(some.chunks > 1, 0.0, m * (way_s + (p - 1) * terms.hop_s) / np.minimum(p, m))
            least_s = np.max([m * rank_s, exchanged_s, fill_s, sent_s, rounds_s], axis=0)
            batch_s = self._likely_s(at, some, rank_s)
            samples = self.problem.batch_size * np.ones(len(some))
            held[chosen] = least_bytes(some, float(at.states.fixed_bytes[-1]), float(at.kept_bytes[-1]))
            by_host = least_bytes(some, float(at.states.host_bytes[-1]), float(at.left_bytes[-1]))
            fits = (held[chosen] <= self.problem.cluster.device.usable_bytes) & (by_host <= room_on_host)
            most[chosen] = np.where(fits, samples / (least_s * (1 - _ROUNDING)), 0.0)
            likely[chosen] = np.where(fits, samples / batch_s, 0.0)
        return _Bounded(shapes=found, most=most, likely=likely, held_bytes=held)

    def _likely_s(self, at: ReplicaTerms, some: Shapes, rank_s: FloatArray) -> FloatArray:
        """A batch's seconds with equal stages, where the slower of computing and sending sets the pace.

        An average exchange and update follow. The placement is the better of neighbouring replicas and pipelines in a
        row.
        """
        m, p, v, form = some.microbatches, some.pipeline, some.chunks, some.recipe.form
        machines, sent_bytes = grouped(self.problem.cluster, form.devices), form.devices * at.terms.sent_bytes
        exchanged = float(at.states.exchanged_bytes[-1]) / form.context
        depths, depth_of = np.unique(p, return_inverse=True)
        found = []
        for in_a_row in (False, True):
            sent_s, exchanged_s = [], []
            for ranks in depths.tolist():
                sent_s.append(sending_s(machines, sent_bytes, ranks, at.data, in_a_row=in_a_row))
                links = links_among(self.problem.cluster, at.data, form.devices * (ranks if in_a_row else 1))
                exchanged_s.append(links.seconds("all-reduce", exchanged / ranks))
            step_s = np.maximum(rank_s, v * np.asarray(sent_s)[depth_of])
            found.append((m + (p - 1) / v) * step_s + np.asarray(exchanged_s)[depth_of])
        return np.asarray(np.minimum(*found) + float(at.states.update_s[-1]) / p)
