"""Space: everything that an engine could run of a model on a cluster, with what each configuration may reach at best.

A configuration is a recipe (form, microbatch size, recomputation, sharding), a pipeline of so many ranks and stages,
replicas, and whether replicas or pipelines are neighbours. Its bounds and its likely rate come from sums over blocks,
for all pipelines of a recipe at once; stages are made for those alone that may win.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.costs.groups import grouped, links_among
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.engines import TrainingEngine
from pipeplan.documents.forms import Form, ModelForm
from pipeplan.documents.plan import Alternative, Plan
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import CutGraph, PlanningProblem
from pipeplan.planners.reasons import unpriced
from pipeplan.planners.whole.degrees import Degrees, Recipe, Shapes, recipes, shapes
from pipeplan.planners.whole.made import PlanMaker
from pipeplan.planners.whole.split import Splitter
from pipeplan.planners.whole.terms import RecipeTerms, ReplicaTerms

MISSES = 50
"""Of so many configurations that hold little on average the stages are made, to say what nothing fits by."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedDegrees:
    """A configuration on its placement. None of its plays is above `most` samples a second."""

    space: "WholeSpace"
    degrees: Degrees
    replicas_inside: bool
    most: float
    likely: float

    def split(self) -> tuple[int, ...] | None:
        """Where its stages end; None where none fit."""
        return self.space.maker(self.degrees).splitter.stops()

    def most_of(self, stops: tuple[int, ...]) -> float:
        """Samples a second that no play with these stages exceeds."""
        return self.space.most_of(self.degrees, stops)

    def plan(self, stops: tuple[int, ...]) -> Plan | None:
        """Its plan with these stages, not played; None where they do not fit."""
        return self.space.maker(self.degrees).plan(stops, replicas_inside=self.replicas_inside)

    def alternative(self, reason: str) -> Alternative:
        """What a plan says of it, without a price."""
        recipe = self.degrees.recipe
        return unpriced(
            self.degrees,
            reason,
            recompute=recipe.recompute != "none",
            form=recipe.form,
            sharding=recipe.sharding,
            chunks=self.degrees.chunks,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Bounded:
    """The pipelines of a recipe with their rates: what no play exceeds, and what equal stages would give."""

    shapes: Shapes
    most: FloatArray
    likely: FloatArray
    held_bytes: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeSpace:
    """The configurations of a problem for an engine."""

    problem: PlanningProblem
    engine: TrainingEngine
    forms: tuple[ModelForm, ...]
    planner: str = "auto"
    beyond: float = 0.0
    graph: CutGraph | None = None
    _terms: dict[Recipe, RecipeTerms] = field(default_factory=dict)
    _makers: dict[Degrees, PlanMaker] = field(default_factory=dict)

    @cached_property
    def considered(self) -> int:
        """How many configurations there are, where placements are not counted."""
        return sum(len(each.shapes) for each in self._bounded)

    def configurations(self) -> Iterator[PlacedDegrees]:
        """All that memory does not rule out, the highest bound first. They are made as they are needed."""
        yield from self._in_order(np.concatenate([np.zeros(0), *(each.most for each in self._bounded)]))

    def likely(self) -> Iterator[PlacedDegrees]:
        """The same, those first that would be fastest with equal stages."""
        yield from self._in_order(np.concatenate([np.zeros(0), *(each.likely for each in self._bounded)]))

    def nearest_miss(self) -> tuple[Degrees, int, int]:
        """Of the configurations that hold least on average, the one whose fullest rank exceeds its device by least.

        With equal numbers of blocks a stage: the configuration, the rank, and the bytes that it misses.
        """
        each = [
            (float(held), at, place)
            for at, one in enumerate(self._bounded)
            for place, held in enumerate(one.held_bytes)
        ]
        misses = []
        for _, at, place in sorted(each)[:MISSES]:
            degrees = self._bounded[at].shapes.degrees(place)
            splitter, blocks = self.maker(degrees).splitter, len(self.forms[0].blocks)
            stops = [blocks * (stage + 1) // degrees.depth for stage in range(degrees.depth)]
            by_rank = splitter.by_rank(stops)
            fullest = by_rank.index(max(by_rank))
            misses.append((int(by_rank[fullest] - splitter.device_bytes), fullest, degrees))
        missing, rank, degrees = min(misses, key=lambda miss: miss[0])
        return degrees, rank, missing

    def _in_order(self, rates: FloatArray) -> Iterator[PlacedDegrees]:
        firsts = np.cumsum([0, *(len(each.shapes) for each in self._bounded)])
        for index in np.argsort(-rates, kind="stable").tolist():
            part = int(np.searchsorted(firsts, index, side="right")) - 1
            bounded, place = self._bounded[part], index - int(firsts[part])
            if bounded.most[place] <= 0.0:
                continue
            degrees = bounded.shapes.degrees(place)
            for inside in (True, False) if degrees.data > 1 and degrees.pipeline > 1 else (True,):
                yield PlacedDegrees(
                    space=self,
                    degrees=degrees,
                    replicas_inside=inside,
                    most=float(bounded.most[place]),
                    likely=float(bounded.likely[place]),
                )

    def maker(self, degrees: Degrees) -> PlanMaker:
        """What makes a configuration's plans."""
        if degrees in self._makers:
            return self._makers[degrees]
        terms = self.terms(degrees.recipe).at(degrees.data)
        limit = self.problem.cluster.device.usable_bytes
        splitter = Splitter(terms=terms, degrees=degrees, device_bytes=limit)
        made = PlanMaker(problem=self.problem, engine=self.engine.name, terms=terms, degrees=degrees, splitter=splitter)
        self._makers[degrees] = made
        return made

    def terms(self, recipe: Recipe) -> RecipeTerms:
        """What the blocks of a recipe take."""
        if recipe not in self._terms:
            model = next(each for each in self.forms if each.form == recipe.form)
            terms = RecipeTerms(problem=self.problem, engine=self.engine.name, model=model, recipe=recipe)
            self._terms[recipe] = terms
        return self._terms[recipe]

    def most_of(self, degrees: Degrees, stops: tuple[int, ...]) -> float:
        """Samples a second that no play with these stages exceeds, by what they compute (`planners.bound`, 1 and 3)."""
        terms, p, m = self.terms(degrees.recipe).at(degrees.data), degrees.pipeline, degrees.microbatches
        ends = np.asarray(stops)
        starts = np.append(0, ends[:-1])
        computed_s = (terms.step_s[ends] - terms.step_s[starts]).reshape(-1, p).sum(axis=0)
        way_s = terms.forward_s + terms.backward_s
        before_s = way_s[starts[:p]]
        least_s = float((m * computed_s + before_s).max())
        return degrees.batch_size / (least_s * (1 - _ROUNDING)) if least_s > 0 else inf

    @cached_property
    def _bounded(self) -> list[_Bounded]:
        found = []
        kept: dict[object, Shapes] = {}
        whole_groups = {each.form.devices for each in self.forms if lies_well(self.problem.cluster, each.form)}
        for recipe in recipes(self.problem, self.engine, self.forms):
            if recipe.form.devices not in whole_groups:
                continue
            pipelined = recipe.sharding in self.engine.pipelined_shardings
            single = recipe.sharding in self.engine.shardings
            devices, expert = recipe.form.devices, recipe.form.expert
            key = recipe.microbatch_size, devices, expert, pipelined, single, recipe.sharding == "none"
            if key not in kept:
                kept[key] = shapes(self.problem, self.engine, recipe, len(self.forms[0].blocks))
            found.append(self._rates(kept[key].of(recipe)))
        return found

    def _rates(self, found: Shapes) -> _Bounded:
        """Bounds by the whole model, and what equal stages would take; 0 for what cannot fit."""
        terms = self.terms(found.recipe)
        most, likely, held = np.zeros(len(found)), np.zeros(len(found)), np.zeros(len(found))
        for data in np.unique(found.data).tolist():
            chosen = np.flatnonzero(found.data == data)
            some = found.some(chosen)
            at = terms.at(data)
            rank_s, way_s = least_rank_s(at, some), float(at.forward_s[-1] + at.backward_s[-1])
            m, p = some.microbatches, some.pipeline
            fill_s = np.where(some.chunks > 1, 0.0, way_s / (1 - (1 - 1 / m) ** p))
            least_s = np.maximum(m * rank_s, fill_s)
            batch_s = (m + (p - 1) / some.chunks) * rank_s + self._ends_s(at, some)
            samples = self.problem.batch_size * np.ones(len(some))
            held[chosen] = least_bytes(at, some)
            fits = held[chosen] <= self.problem.cluster.device.usable_bytes
            most[chosen] = np.where(fits, samples / (least_s * (1 - _ROUNDING)), 0.0)
            likely[chosen] = np.where(fits, samples / batch_s, 0.0)
        return _Bounded(shapes=found, most=most, likely=likely, held_bytes=held)

    def _ends_s(self, at: ReplicaTerms, some: Shapes) -> FloatArray:
        """What an exchange and an update take on average, on the better placement."""
        p, form = some.pipeline, some.recipe.form
        exchanged, updated_s = float(at.exchanged_bytes[-1]), float(at.update_s[-1])
        seconds = []
        for ranks in p.tolist():
            strides = {form.devices, form.devices * ranks}
            links = [links_among(self.problem.cluster, at.data, stride) for stride in strides]
            seconds.append(min(each.seconds("all-reduce", exchanged / ranks / form.context) for each in links))
        return np.asarray(seconds) + updated_s / p


def least_rank_s(at: ReplicaTerms, some: Shapes) -> FloatArray:
    """What the slowest rank computes of a microbatch at least: its share, or of the k longest blocks its part of k."""
    longest = np.sort(np.diff(at.step_s))[::-1]
    together_s = np.append(0.0, np.cumsum(longest))
    many = np.arange(1, len(longest) + 1)
    least = {
        ranks: max(float(at.step_s[-1]) / ranks, float((together_s[many] - together_s[many - -(-many // ranks)]).max()))
        for ranks in np.unique(some.pipeline).tolist()
    }
    return np.asarray([least[ranks] for ranks in some.pipeline.tolist()])


def least_bytes(at: ReplicaTerms, some: Shapes) -> FloatArray:
    """What ranks hold on average, states and microbatches in flight: one holds as much or more."""
    p, v, m = some.pipeline, some.chunks, some.microbatches
    full = np.minimum(m, p)
    mean = (full * (full + 1) / 2 + full * (p - full)) / p
    flight = np.where(
        v > 1, np.minimum((v - 1) * p + 1, m * v) / v, mean
    )  # of several stages: the last rank's, the least
    return np.asarray(float(at.fixed_bytes[-1]) / p + flight * float(at.kept_bytes[-1]) / p)


def lies_well(cluster: Cluster, form: Form) -> bool:
    """Whether the cluster's levels hold whole groups of the form."""
    try:
        grouped(cluster, form.devices)
    except InvalidInputError:
        return False
    return True
