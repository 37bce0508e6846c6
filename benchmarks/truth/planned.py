"""Planned: a row as the plan that the planner would make of its form, degrees and stages, and what its play gives.

A row's seconds are those of the played streams, its bytes those of the ranks that are played. Layers go into stages in
equal numbers, the embedding to the first and the head to the last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from benchmarks.truth.constants import GPUS, Constants, EngineConstants, cluster_of, sheet_of
from benchmarks.truth.counted import Counted, CountedKind, Pass, family_of, key_of
from benchmarks.truth.programs import MeasuredProgram
from benchmarks.truth.rows import SHARDINGS, Row
from benchmarks.truth.timed import KindSeconds, PassSeconds, Timer
from benchmarks.truth.traced import pass_s, sending
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.engines import ENGINES, EngineTimes, TrainingEngine
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

    @cached_property
    def _timer(self) -> Timer:
        return Timer(self.counted, self.rows)

    def plays(
        self, constants: Constants, choices: Sequence[Sequence[Choice]] | None = None
    ) -> Iterator[dict[Choice, PlayedRow]]:
        """For every row, its plays with these constants, by choice; by default all that the row may have had."""
        timed = self._timer.timed(constants)
        for number, row in enumerate(self.rows):
            asked = choices_of(row) if choices is None else choices[number]
            found = {}
            for choice in asked:
                kinds = self._timer.kinds(row, choice[0])
                plan = plan_of(row, choice, constants, kinds, self._timer.of_row(row, choice[0], timed))
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


def cluster_of_row(row: Row, constants: Constants) -> Cluster:
    """The servers that ran a row."""
    gpu, program = constants.gpus[GPUS[row.gpu].constants], row.program
    if program.trace is not None:
        gpu = replace(gpu, link_efficiency=program.trace.link_efficiency)
    return cluster_of(row.gpu, gpu, program.network_bytes_per_s, row.gpus, row.nodes_of)


def plan_of(
    row: Row, choice: Choice, constants: Constants, counted: Sequence[CountedKind], seconds: Sequence[KindSeconds]
) -> Plan:
    """The row's plan. Its device holds whatever it holds: whether that fits is for the reader to say."""
    size, chunks = choice
    gpu, dtype = constants.gpus[GPUS[row.gpu].constants], family_of(row).dtype
    program, cluster = row.program, cluster_of_row(row, constants)
    depth = row.pipeline_parallel * chunks
    stops = [1 + row.layers * (stage + 1) // depth for stage in range(depth - 1)]
    kinds = tuple(map(_Kind(row, size, constants.engines[program.constants]).of, NAMES, counted, seconds))
    blocks = (kinds[0], *[kinds[1]] * row.layers, kinds[2])
    if program.trace is not None:
        blocks = sending(kinds, stops, row.layers, program.trace)
    kinds = tuple(dict.fromkeys(blocks))
    model = ModelForm(form=key_of(row).form, kinds=kinds, blocks=tuple(map(kinds.index, blocks)))
    engine = engine_with(program, constants)
    profile = Profile(
        model=Model(name=row.model),
        device=cluster.device,
        dtype=dtype,
        blocks=tuple(_name_alone(f"{number}", size) for number in range(row.layers + 2)),
        overheads=Overheads(update_s_per_byte=update_s_per_byte(OPTIMIZER, dtype, sheet_of(row.gpu, gpu))),
        estimated=True,
        forms=(model,),
    )
    options = Options(optimizer=OPTIMIZER, engine=engine.name)
    problem = PlanningProblem(profile=profile, cluster=cluster, batch_size=row.batch, options=options)
    sharding, recompute = SHARDINGS[row.sharding], RECOMPUTES[program.recompute or row.recompute]
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


def engine_with(program: MeasuredProgram, constants: Constants) -> TrainingEngine:
    """The program's engine with the constants' times; those of a trace are in its passes."""
    times = EngineTimes() if program.trace is not None else constants.engines[program.constants].times
    return replace(ENGINES[program.engine], times=times)


def _name_alone(name: str, size: int) -> Block:
    """A block of which all that counts is in the form."""
    nothing = Measurement(
        microbatch_size=size, forward_s=0.0, backward_s=0.0, input_bytes=0, output_bytes=0, activation_bytes=0
    )
    return Block(name=name, weight_bytes=0, measurements=(nothing,))


@dataclass(frozen=True, slots=True)
class _Kind:
    """Makes the kinds of a row's blocks at a microbatch size."""

    row: Row
    size: int
    engine: EngineConstants

    def of(self, name: str, counted: CountedKind, seconds: KindSeconds) -> BlockKind:
        counts = counted.counts
        fused_loss = name == "head" and family_of(self.row).fused_loss
        measured = FormMeasurement(
            microbatch_size=self.size,
            forward_s=self._pass_s(counted.forward, seconds.forward),
            backward_s=self._pass_s(counted.backward, seconds.backward),
            input_bytes=counts.input_bytes,
            output_bytes=counts.output_bytes,
            activation_bytes=counts.activation_bytes,
            workspace_bytes=0 if fused_loss else counts.workspace_bytes,
            forward_collectives=counted.forward.collectives,
            backward_collectives=counted.backward.collectives,
            forward_operations=len(counted.forward.operations),
            backward_operations=len(counted.backward.operations),
            selective=self._selective(counted, seconds) if name == "layer" else None,
        )
        return BlockKind(
            name=name,
            parameters=counted.parameters,
            tied_parameters=counted.tied_parameters,
            measurements=(measured,),
        )

    def _pass_s(self, one_pass: Pass, seconds: PassSeconds) -> float:
        trace, devices = self.row.program.trace, self.row.tensor_parallel
        if trace is None:
            return seconds.computing_s
        return pass_s(one_pass, seconds.computing_s, devices, self.engine, trace)

    def _selective(self, counted: CountedKind, seconds: KindSeconds) -> Selective:
        """Attention's core again, where it keeps its scores; torchtitan's every second product and all without one."""
        forward, again = seconds.forward, seconds.attention
        if again is not None and counted.attention is not None and counted.counts.selective is not None:
            return Selective(
                recompute_s=again.computing_s,
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
