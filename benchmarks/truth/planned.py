"""Planned: a row as the plan that the planner would make of its form, degrees and stages, and what its play gives.

A row's seconds are those of the played streams, its bytes those of the ranks that are played. Layers go into stages in
equal numbers, the embedding to the first and the head to the last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from benchmarks.truth.counted import Counted, CountedKind, Pass, family_of, key_of
from benchmarks.truth.machines import GPUS, cluster_of
from benchmarks.truth.rows import SHARDINGS, Row
from pipeplan.documents.engines import ENGINES
from pipeplan.documents.forms import BlockKind, FormMeasurement, ModelForm, Selective
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Block, Model, Overheads, Profile
from pipeplan.errors import require
from pipeplan.planners.complete import play
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.whole.degrees import Degrees, Recipe
from pipeplan.planners.whole.made import PlanMaker
from pipeplan.planners.whole.split import Splitter
from pipeplan.planners.whole.terms import RecipeTerms
from worker_agent.profiler.analytic import update_s_per_byte
from worker_agent.profiler.operations import DeviceOperation

RECOMPUTES = {"none": "none", "selective": "attention", "full": "block"}
"""The data's words for those of `planners.whole`."""

PRODUCTS_AGAIN = 0.5
"""Of the matrix products, so many are run again by torchtitan's selective checkpointing: every second one is kept."""

OPTIMIZER = "adam"
NAMES = ("embedding", "layer", "head")


def usable_bytes(row: Row) -> float:
    """What a program has of the device. The allocator's reserve counts as usable: it gives it back under pressure."""
    device = GPUS[row.gpu].sheet.device()
    return device.memory_bytes - device.context_bytes


@dataclass(frozen=True, slots=True)
class PlayedRow:
    """What the play of a row gives: an iteration's seconds, and the bytes of the rank that holds most."""

    seconds: float
    held_bytes: float


LONGEST = 2_000_000
"""So many instructions are played of a row whose batches planners would not play."""

Choice = tuple[int, int]
"""A microbatch size and virtual stages."""


@dataclass(frozen=True, eq=False)
class Planned:
    """Plans and plays rows of which the blocks were counted."""

    counted: Counted
    rows: Sequence[Row]

    def plays(self) -> Iterator[dict[Choice, PlayedRow]]:
        """For every row, its plays by what it may have chosen."""
        for row in self.rows:
            found = {}
            for choice in choices_of(row):
                plan = plan_of(row, choice, self.counted[key_of(row), choice[0]])
                simulated = play(plan) or play(plan, instructions=LONGEST)
                if simulated is not None:
                    held = float(max(simulated.peak_memory_bytes))
                    found[choice] = PlayedRow(row.batch / simulated.throughput_samples_per_s, held)
            rule = f"must have a batch that plays within {LONGEST} instructions"
            require(bool(found), f"{row.source}, {row.model} on {row.gpus} GPUs", rule, row.batch)
            yield found


def choices_of(row: Row) -> list[Choice]:
    """The microbatch sizes and virtual stages that a row may have had.

    Interleaving takes whole rounds of ranks; a row whose microbatches are none is played without it.
    """
    p = row.pipeline_parallel
    whole = [
        (size, chunks)
        for size in row.microbatches
        for chunks in row.chunks
        if chunks == 1 or row.batch // row.data_parallel // size % p == 0
    ]
    return whole or [(size, 1) for size in row.microbatches]


def taken(row: Row, plays: dict[Choice, PlayedRow]) -> Choice:
    """The fastest that fits, or the fastest where nothing fits."""
    fitting = [choice for choice, each in plays.items() if each.held_bytes <= usable_bytes(row)] or list(plays)
    return min(fitting, key=lambda choice: plays[choice].seconds)


def plan_of(row: Row, choice: Choice, counted: Sequence[CountedKind]) -> Plan:
    """The row's plan. Its device holds whatever it holds: whether that fits is for the reader to say."""
    size, chunks = choice
    program, sheet, dtype = row.program, GPUS[row.gpu].sheet, family_of(row).dtype
    cluster = cluster_of(row.gpu, program.network_bytes_per_s, row.gpus, row.nodes_of)
    depth = row.pipeline_parallel * chunks
    stops = [1 + row.layers * (stage + 1) // depth for stage in range(depth - 1)]
    kinds = tuple(map(_Kind(row, size).of, NAMES, counted))
    blocks = (kinds[0], *[kinds[1]] * row.layers, kinds[2])
    kinds = tuple(dict.fromkeys(blocks))
    model = ModelForm(form=key_of(row).form, kinds=kinds, blocks=tuple(map(kinds.index, blocks)))
    engine = ENGINES[program.engine]
    profile = Profile(
        model=Model(name=row.model),
        device=cluster.device,
        dtype=dtype,
        blocks=tuple(_name_alone(f"{number}", size) for number in range(row.layers + 2)),
        overheads=Overheads(update_s_per_byte=update_s_per_byte(OPTIMIZER, dtype, sheet)),
        estimated=True,
        forms=(model,),
    )
    options = Options(optimizer=OPTIMIZER, engine=engine.name)
    problem = PlanningProblem(profile=profile, cluster=cluster, batch_size=row.batch, options=options)
    sharding, recompute = SHARDINGS[row.sharding], RECOMPUTES[row.recompute]
    recipe = Recipe(form=model.form, microbatch_size=size, recompute=recompute, sharding=sharding)
    degrees = Degrees(
        recipe=recipe,
        pipeline=row.pipeline_parallel,
        chunks=chunks,
        data=row.data_parallel,
        microbatches=row.batch // row.data_parallel // size,
    )
    terms = RecipeTerms(problem=problem, engine=engine, model=model, recipe=recipe)
    here = terms.at(degrees.data, pipelined=degrees.pipeline > 1)
    splitter = Splitter(terms=here, degrees=degrees, device_bytes=inf)
    maker = PlanMaker(problem=problem, engine=engine, terms=here, degrees=degrees, splitter=splitter)
    plan = maker.plan([*stops, row.layers + 2], inside=degrees.data)
    assert plan is not None, "a device of endless memory holds every plan"
    return plan


def _name_alone(name: str, size: int) -> Block:
    """A block of which all that counts is in the form."""
    nothing = Measurement(
        microbatch_size=size, forward_s=0.0, backward_s=0.0, input_bytes=0, output_bytes=0, activation_bytes=0
    )
    return Block(name=name, weight_bytes=0, measurements=(nothing,))


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """A pass's matrix products, attention, and other operations."""

    products_s: float
    attention_s: float
    others_s: float

    @property
    def all_s(self) -> float:
        """All of its operations."""
        return self.products_s + self.attention_s + self.others_s


@lru_cache(maxsize=65536)
def pass_seconds(one_pass: Pass, gpu: str, precision: str, compiled: float) -> PassSeconds:
    """What a pass takes on a device of this GPU, in the data's words for the precision."""
    kernels = one_pass.float8 if "fp8" in precision else one_pass.kernels
    of_kind = [0.0, 0.0, 0.0]
    for op, op_s in zip(kernels.operations, kernels.seconds(GPUS[gpu].sheet).tolist(), strict=True):
        of_kind[1 if "attention" in op.name else 2 if op.flops == 0 else 0] += op_s
    return PassSeconds(of_kind[0], of_kind[1], of_kind[2] * (compiled if "compile" in precision else 1.0))


@dataclass(frozen=True, slots=True)
class _Kind:
    """Makes the kinds of a row's blocks at a microbatch size."""

    row: Row
    size: int

    def of(self, name: str, counted: CountedKind) -> BlockKind:
        """The kind of this name."""
        counts = counted.counts
        fused_loss = name == "head" and family_of(self.row).fused_loss
        measured = FormMeasurement(
            microbatch_size=self.size,
            forward_s=self._seconds(counted.forward).all_s,
            backward_s=self._seconds(counted.backward).all_s,
            input_bytes=counts.input_bytes,
            output_bytes=counts.output_bytes,
            activation_bytes=counts.activation_bytes,
            workspace_bytes=0 if fused_loss else counts.workspace_bytes,
            forward_collectives=counted.forward.collectives,
            backward_collectives=counted.backward.collectives,
            forward_operations=len(counted.forward.operations),
            backward_operations=len(counted.backward.operations),
            selective=self._selective(counted) if name == "layer" else None,
        )
        return BlockKind(
            name=name,
            parameters=counted.parameters,
            tied_parameters=counted.tied_parameters,
            measurements=(measured,),
        )

    def _seconds(self, one_pass: Pass) -> PassSeconds:
        return pass_seconds(one_pass, self.row.gpu, self.row.precision, self.row.program.compiled)

    def _selective(self, counted: CountedKind) -> Selective:
        """Attention's core again, where it keeps its scores; torchtitan's every second product and all without one."""
        forward = self._seconds(counted.forward)
        if counted.attention is not None and counted.counts.selective is not None:
            return Selective(
                recompute_s=self._seconds(counted.attention).all_s,
                activation_bytes=counted.counts.selective.activation_bytes,
                operations=len(counted.attention.operations),
            )
        kept = counted.counts.input_bytes + sum(map(_result_bytes, counted.counts.forward))
        return Selective(
            recompute_s=PRODUCTS_AGAIN * forward.products_s + forward.others_s,
            activation_bytes=int(kept),
            operations=len(counted.forward.operations),
        )


def _result_bytes(op: DeviceOperation) -> float:
    """What selective checkpointing keeps of results, in 16 bits: attention's, and those of half of all products."""
    if op.sizes is None:
        return 0.0
    if "attention" in op.name:
        return 2.0 * op.sizes.batch * op.sizes.m * op.sizes.k
    return 2.0 * op.sizes.batch * op.sizes.m * op.sizes.n * (1 - PRODUCTS_AGAIN)
