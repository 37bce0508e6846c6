"""Degrees: a configuration of the whole space, without its stages, and all configurations that a problem allows."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, product
from operator import mul

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.documents.degrees import ANY_OFFLOAD, OFFLOADS, offloads_activations, offloads_optimizer
from pipeplan.documents.engines import TrainingEngine, cannot_graph, cannot_offload, cannot_overlap_a2a
from pipeplan.documents.forms import SELECTIVE_UNITS, Form, ModelForm
from pipeplan.documents.plan import Plan
from pipeplan.planners.problem import PlanningProblem

RECOMPUTES = ("none", *SELECTIVE_UNITS, "block")
"""The units of recomputation, the smallest first: nothing, a part of every block (selective), every block (full)."""

SHARED_GRADIENTS = {"gradients", "weights"}
"""Shardings that are equivalent in a pipeline: all weights of its stages are whole until a batch ends."""

MOST_CHUNKS = 16

SCHEDULES = ("data-parallel", "1f1b", "1f1b-interleaved")
"""The schedules of one rank, of several ranks, and of several stages a rank."""

OFFLOAD_SHARES = (0.25, 0.5, 0.75, 1.0)
"""The shares of the layers whose activations may be on the host."""

OFFLOADED = {"none": "nothing", "activations": "activations", "optimizer": "optimizer", "both": "both of them"}
"""The names of what is on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The common part of configurations of one form, microbatch size, recomputation and sharding."""

    form: Form
    microbatch_size: int
    recompute: str
    sharding: str
    offload: str = "none"
    replicate: int = 1
    graphs: bool = False
    a2a_overlap: bool = False
    offload_share: float = 1.0

    def offloads_less(self) -> Iterator["Recipe"]:
        """The same recipe with less on the host."""
        yield from (replace(self, offload=each, offload_share=1.0) for each in OFFLOADS[: OFFLOADS.index(self.offload)])
        shares = OFFLOAD_SHARES if offloads_activations(self.offload) else ()
        yield from (replace(self, offload_share=share) for share in shares if share < self.offload_share)

    def runs_on(self, engine: TrainingEngine, *, pipelined: bool) -> bool:
        """Whether an engine supports this sharding and offloading, in one stage or in several."""
        known = engine.pipelined_shardings if pipelined else engine.shardings
        rule = cannot_offload(
            engine, self.offload, sharding=self.sharding, recompute=self.recompute, pipelined=pipelined
        )
        graph = cannot_graph(engine, recompute=self.recompute, offload=self.offload) if self.graphs else None
        form, again = self.form, self.recompute
        apart = cannot_overlap_a2a(engine, form, recompute=again, pipelined=pipelined, interleaved=True)
        able = rule is None and graph is None and (apart is None or not self.a2a_overlap)
        able = able and (self.offload_share == 1 or engine.offloads_layers)
        return self.sharding in known and able


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """A configuration: a recipe, `pipeline` ranks with `chunks` stages each, `data` replicas."""

    recipe: Recipe
    pipeline: int
    chunks: int
    data: int
    microbatches: int

    @property
    def schedule(self) -> str:
        """Its name."""
        return SCHEDULES[(self.pipeline > 1) + (self.chunks > 1)]

    @property
    def named(self) -> str:
        """The configuration in a few words."""
        form, recipe = self.recipe.form, self.recipe
        context = f", context {form.context}" * (form.context > 1) + f", expert {form.expert}" * (form.expert > 1)
        again = {unit: f"every {unit} recomputed" for unit in RECOMPUTES} | {"none": "nothing recomputed"}
        return (
            f"tensor {form.tensor}{context}, pipeline {self.pipeline} x {self.chunks}, data {self.data}, "
            f"microbatches of {recipe.microbatch_size}, {again[recipe.recompute]}, sharding {recipe.sharding}"
            f"{f' in each of {recipe.replicate} groups' if recipe.replicate > 1 else ''}"
            f"{', graphs' if recipe.graphs else ''}{', all-to-all overlapped' if recipe.a2a_overlap else ''}"
            f"{f', {OFFLOADED[recipe.offload]} on the host' if recipe.offload != 'none' else ''}"
            f"{f' of {recipe.offload_share:.0%} of the layers' if recipe.offload_share < 1 else ''}"
        )

    @property
    def depth(self) -> int:
        """The number of stages."""
        return self.pipeline * self.chunks

    @property
    def width(self) -> int:
        """The number of replicas."""
        return self.data

    @property
    def microbatch_size(self) -> int:
        """Samples of a microbatch."""
        return self.recipe.microbatch_size

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return self.data * self.microbatches * self.microbatch_size

    @property
    def devices(self) -> int:
        """The number of devices used."""
        return self.recipe.form.devices * self.pipeline * self.data

    @classmethod
    def of(cls, plan: Plan) -> "Degrees":
        """The degrees of a plan."""
        first = plan.stages[0]
        recipe = Recipe(
            form=plan.form,
            microbatch_size=plan.microbatch_size,
            recompute=first.recompute_unit if first.recompute else "none",
            sharding=plan.sharding,
            offload=plan.offload,
            replicate=plan.replicate,
            graphs=bool(plan.graphs),
            a2a_overlap=plan.a2a_overlap,
            offload_share=plan.offload_share,
        )
        return cls(
            recipe=recipe,
            pipeline=plan.depth // plan.chunks,
            chunks=plan.chunks,
            data=plan.width or 1,
            microbatches=plan.microbatches,
        )

    @property
    def idle_steps(self) -> float:
        """A rank's idle time in a batch, in steps of all its stages (Narayanan et al. 2021, section 2.2)."""
        return (self.pipeline - 1) / self.chunks


@dataclass(frozen=True, slots=True, eq=False)
class Shapes:
    """The pipelines of a recipe, an entry each.

    In samples a second, `most` is an upper bound, 0 where nothing fits, and `likely` an estimate for equal stages;
    `held_bytes` is a rank's average.
    """

    recipe: Recipe
    pipeline: IntArray
    chunks: IntArray
    data: IntArray
    microbatches: IntArray
    most: FloatArray
    likely: FloatArray
    held_bytes: FloatArray

    def __len__(self) -> int:
        return len(self.pipeline)

    def unbeaten(self, engine: TrainingEngine) -> IntArray:
        """The places of the undominated pipelines: no other sharding is always as fast and holds no more.

        Shared states dominate whole ones, since they exchange no more, unless there is a single replica. In a pipeline,
        shared weights are shared gradients (`SHARED_GRADIENTS`).
        """
        shares = all("optimizer" in each for each in (engine.shardings, engine.pipelined_shardings))
        if shares and self.recipe.sharding == "none":
            return np.flatnonzero(self.data * self.recipe.form.context == 1)
        if self.recipe.sharding == "weights" and "gradients" in engine.pipelined_shardings:
            return np.flatnonzero(self.pipeline == 1)
        return np.arange(len(self))

    def some(self, chosen: IntArray) -> "Shapes":
        """The pipelines at these places."""
        return replace(self, **{each.name: getattr(self, each.name)[chosen] for each in fields(self)[1:]})

    def degrees(self, index: int) -> Degrees:
        """One of them."""
        return Degrees(
            recipe=self.recipe,
            pipeline=int(self.pipeline[index]),
            chunks=int(self.chunks[index]),
            data=int(self.data[index]),
            microbatches=int(self.microbatches[index]),
        )


def steps_to(some: Shapes, degrees: Degrees) -> IntArray:
    """The number of steps from the degrees to each of these pipelines.

    A step is another microbatch size, recomputation, sharding or offloading, another number of stages a rank or of
    groups that share states, experts that become whole or are shared by tensor groups, or devices that move from one of
    tensor, context, expert, pipeline and data parallelism to another one. Holding whole states is not a choice for
    those that cannot share them, nor are whole weights for those of a pipeline.
    """
    ours, theirs = degrees.recipe, some.recipe
    names = ("microbatch_size", "recompute", "offload", "offload_share", "replicate", "graphs", "a2a_overlap")
    apart = sum(getattr(ours, name) != getattr(theirs, name) for name in names)
    apart += min(ours.form.tensor, theirs.form.tensor) > 1 and ours.form.expert_tensor != theirs.form.expert_tensor
    alone = (some.data * theirs.form.context == 1) | (degrees.data * ours.form.context == 1)
    pipelined = (some.pipeline > 1) | (degrees.pipeline > 1)
    alike = alone if "none" in (both := {ours.sharding, theirs.sharding}) else pipelined & (both <= SHARED_GRADIENTS)
    resharded = (ours.sharding != theirs.sharding) & ~alike
    axes = ((ours.form.tensor, theirs.form.tensor), (ours.form.context, theirs.form.context))
    moved = sum(a != b for a, b in (*axes, (ours.form.expert, theirs.form.expert)))
    moved_here = moved + (some.pipeline != degrees.pipeline) + (some.data != degrees.data).astype(np.int64)
    return np.asarray(apart + resharded + (some.chunks != degrees.chunks) + (moved_here + 1) // 2)


def least_bytes(some: Shapes, fixed_bytes: float, kept_bytes: float) -> FloatArray:
    """The average bytes of a rank, states and microbatches in flight: a lower bound on the fullest rank's."""
    p, v, m = some.pipeline, some.chunks, some.microbatches
    full = np.minimum(m, p)
    mean = (full * (full + 1) / 2 + full * (p - full)) / p
    flight = np.where(
        v > 1, np.minimum((v - 1) * p + 1, m * v) / v, mean
    )  # with several stages: the last rank's, the least
    return np.asarray((fixed_bytes + flight * kept_bytes) / p)


def recipes(problem: PlanningProblem, engine: TrainingEngine, forms: Sequence[ModelForm]) -> Iterator[Recipe]:
    """All recipes that the engine, the options and the batch allow."""
    options = problem.options
    for form in forms:
        parts = selective_units(form)
        for size in form.microbatch_sizes:
            if problem.batch_size % size or options.microbatch_size not in (None, size):
                continue
            for recompute in recompute_ways(problem, engine, parts):
                shardings = (*engine.shardings, *engine.pipelined_shardings)
                groups, graphs = replications(problem, engine), launches(problem, engine, form, size)
                for sharding, (offload, share), replicate, graph in product(
                    dict.fromkeys(shardings), offloads(problem, engine), groups, graphs
                ):
                    recipe = Recipe(
                        form=form.form,
                        microbatch_size=size,
                        recompute=recompute,
                        sharding=sharding,
                        offload=offload,
                        replicate=replicate,
                        graphs=graph,
                        a2a_overlap=options.a2a_overlap,
                        offload_share=share,
                    )
                    runs = any(recipe.runs_on(engine, pipelined=pipelined) for pipelined in (False, True))
                    if options.sharding in (None, sharding) and runs:
                        yield recipe


def offloads(problem: PlanningProblem, engine: TrainingEngine) -> Iterator[tuple[str, float]]:
    """The requested offloading to a host that the cluster describes, and the share of the layers whose activations are
    offloaded.
    """
    known = OFFLOADS if problem.cluster.host is not None else OFFLOADS[:1]
    asked, share = problem.options.offload or OFFLOADS[0], problem.options.offload_share
    shares = OFFLOAD_SHARES if engine.offloads_layers and share is None else (share or 1.0,)
    for each in known:
        if asked in (each, ANY_OFFLOAD):
            yield from ((each, part) for part in (shares if offloads_activations(each) else (1.0,)))


def replications(problem: PlanningProblem, engine: TrainingEngine) -> tuple[int, ...]:
    """The possible numbers of groups of replicas that share states: one, or one for each unit of an outer level."""
    if problem.options.replicate is not None or not engine.replicates:
        return (problem.options.replicate or 1,)
    inside = accumulate((level.size for level in problem.cluster.levels), mul)
    return tuple(dict.fromkeys((1, *(problem.cluster.devices // devices for devices in inside))))


def launches(problem: PlanningProblem, engine: TrainingEngine, form: ModelForm, size: int) -> tuple[bool, ...]:
    """Whether the host launches graphs: both choices where launching operations may take longer than executing them."""
    asked, host_s = problem.options.graphs, engine.times.host_s
    if asked is not None or not engine.graphs:
        return (bool(asked),)
    measured = [form.kinds[kind].at(size) for kind in {*form.blocks[1:-1]}]
    passes = [(m.forward_s, m.forward_operations) for m in measured]
    passes += [(m.backward_s, m.backward_operations) for m in measured]
    return (False, True) if any(operations * host_s > seconds for seconds, operations in passes) else (False,)


def selective_units(form: ModelForm) -> set[str]:
    """The parts of this form's blocks that can be recomputed."""
    return {each.unit for kind in form.kinds for m in kind.measurements for each in m.every_selective}


def recompute_ways(problem: PlanningProblem, engine: TrainingEngine, parts: Collection[str]) -> Iterator[str]:
    """The possible units of recomputation, where these parts of blocks can be recomputed."""
    options = problem.options
    for way in RECOMPUTES:
        runs = way == "none" or way in engine.recomputes
        asked = options.recompute is None or options.recompute == (way != "none")
        unit = options.recompute_unit in (None, way) or way == "none"
        if runs and asked and unit and (way in parts or way not in SELECTIVE_UNITS):
            yield way


def shapes(problem: PlanningProblem, engine: TrainingEngine, recipe: Recipe, blocks: int) -> Shapes:
    """The pipelines of a recipe: at most as many ranks as blocks, and replicas that divide the batch.

    In a pipeline, groups that share states each exchange no less than all replicas do, and hold more: there are none
    unless they are asked for.
    """
    options, form, groups = problem.options, recipe.form, problem.cluster.devices // recipe.form.devices
    samples = problem.batch_size // recipe.microbatch_size
    divisors = [n for n in range(min(groups, samples), 0, -1) if samples % n == 0]
    numbers = range(1, min(groups, blocks) + 1), divisors, range(1, max(MOST_CHUNKS, options.chunks or 1) + 1)
    p, data, v = (each.ravel() for each in np.meshgrid(*map(np.asarray, numbers), indexing="ij"))
    m, several = samples // data, p > 1
    single, pipelined = (recipe.runs_on(engine, pipelined=each) for each in (False, True))
    pipelined = pipelined and (recipe.replicate == 1 or options.replicate is not None)
    able = (p * data <= groups) & (data % (form.replicas_together * recipe.replicate) == 0)
    able &= np.where(several, pipelined, single)
    able &= (data > recipe.replicate) | (recipe.replicate == 1)
    if "none" in engine.shardings and recipe.sharding != "none" and not offloads_optimizer(recipe.offload):
        able &= data * form.context > 1  # a single replica has nothing to shard
    interleaves = engine.schedules is None or SCHEDULES[2] in engine.schedules
    able &= (v == 1) | (interleaves & several & (m % p == 0) & (p * v <= blocks))  # whole rounds of microbatches
    able &= (v > 1) | (m >= p) | (not engine.fills_pipelines)
    able &= (v > 1) | ~several | (not recipe.a2a_overlap)
    for asked, column in ((options.stages, p), (options.data, data), (options.chunks, v)):
        able &= (asked is None) | (column == asked)
    if options.schedule is not None:
        known = SCHEDULES.index(options.schedule) if options.schedule in SCHEDULES else -1
        able &= known == several.astype(np.int64) + (v > 1)
    columns = (each[able] for each in (p, v, data, m))
    return Shapes(recipe, *columns, *np.zeros((3, int(able.sum()))))
