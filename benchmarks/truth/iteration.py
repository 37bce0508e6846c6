"""Iteration: how long an engine takes for a row, from the seconds of its blocks and of what devices exchange."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from benchmarks.truth.constants import (
    ENGINES,
    GPUS,
    Constants,
    EngineConstants,
    GpuConstants,
    cluster_of,
    sheet_of,
)
from benchmarks.truth.counted import Counted, CountedKind, Passage, RowKey, key_of
from benchmarks.truth.rows import SHARDINGS, Row
from pipeplan.arrays import FloatArray, IntArray
from pipeplan.costs.groups import DeviceGroupLinks, links_among
from pipeplan.costs.ledger import Ledger, ledger
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.forms import Collective
from worker_agent.profiler.kernels import Kernels

PRODUCTS_AGAIN = 0.5
"""Of the matrix products, so many are run again by torchtitan's selective checkpointing: every second one is kept."""


def engine_of(row: Row) -> str:
    """What ran the row."""
    if row.sharding != "none":
        return "fsdp"
    return next((engine for start, engine in ENGINES.items() if row.source.startswith(start)), "megatron")


UPDATE_BYTES = 30
"""Of a parameter: its gradient is read, master weight and both moments read and written, the weight written."""

PIPELINE_EXPOSED = 0.5
"""Of messages between stages with sharded weights: those of the forward are hidden, as torch's schedules send them."""


def ledger_of(row: Row, replicas: int) -> Ledger:
    """What the row's engine keeps and exchanges of a parameter."""
    return _ledger(engine_of(row), SHARDINGS[row.sharding], replicas)


@lru_cache(maxsize=1024)
def _ledger(engine: str, sharding: str, replicas: int) -> Ledger:
    return ledger(engine, sharding, dtype="float16", optimizer="adam", replicas=replicas)


@dataclass(frozen=True, slots=True)
class PassageSeconds:
    """A passage's matrix products, attention, and other operations; how many it launches, and its exchanges."""

    products_s: float
    attention_s: float
    others_s: float
    operations: int
    collectives: tuple[Collective, ...]

    @property
    def computing_s(self) -> float:
        """All of its operations."""
        return self.products_s + self.attention_s + self.others_s


@dataclass(frozen=True, slots=True)
class KindSeconds:
    """A kind's passages. `attention` is what selective recomputation runs again, where attention keeps its scores."""

    parameters: int
    output_bytes: int
    forward: PassageSeconds
    backward: PassageSeconds
    attention: PassageSeconds | None


@dataclass(frozen=True, eq=False)
class PassageTable:
    """The passages of many kinds as one row of operations, which a datasheet times at once."""

    passages: tuple[Passage, ...]
    float8: bool

    @cached_property
    def _kernels(self) -> Kernels:
        each = [passage.float8 if self.float8 else passage.kernels for passage in self.passages]
        return Kernels.of([op for kernels in each for op in kernels.operations])

    @cached_property
    def _places(self) -> IntArray:
        """Three for each passage: products, attention, others."""
        places = [
            3 * number + (1 if "attention" in op.name else 2 if op.flops == 0 else 0)
            for number, passage in enumerate(self.passages)
            for op in (passage.float8 if self.float8 else passage.kernels).operations
        ]
        return np.array(places, dtype=np.int64)

    def seconds(self, gpu: str, constants: Constants, *, compiled: float) -> dict[Passage, PassageSeconds]:
        """Of every passage; a compiler leaves the share `compiled` of what operations without products take."""
        sheet = sheet_of(gpu, constants.gpus[GPUS[gpu].constants])
        each = np.bincount(self._places, self._kernels.seconds(sheet), 3 * len(self.passages)).reshape(-1, 3)
        return {
            passage: PassageSeconds(
                float(products_s),
                float(attention_s),
                float(others_s) * compiled,
                len(passage.operations),
                passage.collectives,
            )
            for passage, (products_s, attention_s, others_s) in zip(self.passages, each, strict=True)
        }


@dataclass(frozen=True, eq=False)
class Predictor:
    """Predicts rows from what was counted."""

    counted: Counted
    rows: tuple[Row, ...]

    @cached_property
    def _tables(self) -> dict[tuple[str, bool, bool], PassageTable]:
        """By GPU, whether products have 8 bits, whether a compiler fuses."""
        wanted: dict[tuple[str, bool, bool], dict[Passage, None]] = {}
        for row in self.rows:
            passages = wanted.setdefault(_variant(row), {})
            for size in row.microbatches:
                for kind in self.counted[key_of(row), size]:
                    several = (kind.forward, kind.backward, kind.attention)
                    passages.update((each, None) for each in several if each is not None)
        return {variant: PassageTable(tuple(passages), variant[1]) for variant, passages in wanted.items()}

    def predict(self, constants: Constants) -> list[float]:
        """Seconds of an iteration of every row."""
        return [min(found.values()) for found in self.choices(constants)]

    def choices(self, constants: Constants) -> list[dict[tuple[int, int], float]]:
        """For every row, seconds by microbatch size and virtual stages."""
        compiled = constants.engines["fsdp"].compiled or 1.0
        seconds = {
            variant: table.seconds(variant[0], constants, compiled=compiled if variant[2] else 1.0)
            for variant, table in self._tables.items()
        }
        return [
            {
                (size, chunks): self._configured(row, size, chunks, constants, seconds[_variant(row)]).iteration_s
                for size in row.microbatches
                for chunks in row.chunks
            }
            for row in self.rows
        ]

    def _configured(
        self, row: Row, size: int, chunks: int, constants: Constants, seconds: dict[Passage, PassageSeconds]
    ) -> "Configured":
        kinds = tuple(_timed(kind, seconds) for kind in self.counted[_key(row), size])
        return Configured(row, size, chunks, constants, kinds)


_keys: dict[Row, RowKey] = {}


def _key(row: Row) -> RowKey:
    if row not in _keys:
        _keys[row] = key_of(row)
    return _keys[row]


def _variant(row: Row) -> tuple[str, bool, bool]:
    return row.gpu, "fp8" in row.precision, "compile" in row.precision


def _timed(kind: CountedKind, seconds: dict[Passage, PassageSeconds]) -> KindSeconds:
    return KindSeconds(
        kind.parameters,
        kind.counts.output_bytes,
        seconds[kind.forward],
        seconds[kind.backward],
        None if kind.attention is None else seconds[kind.attention],
    )


@dataclass(frozen=True)
class Configured:
    """A row with a microbatch size and virtual stages; the kinds are embedding, layer and head."""

    row: Row
    microbatch_size: int
    chunks: int
    constants: Constants
    kinds: tuple[KindSeconds, ...]

    @cached_property
    def _engine(self) -> EngineConstants:
        return self.constants.engines[engine_of(self.row)]

    @property
    def _gpu(self) -> GpuConstants:
        return self.constants.gpus[GPUS[self.row.gpu].constants]

    @cached_property
    def _cluster(self) -> Cluster:
        row = self.row
        return cluster_of(row.gpu, self._gpu, row.source, row.gpus, row.nodes_of)

    def _links(self, count: int, stride: int) -> DeviceGroupLinks:
        return links_among(self._cluster, count, stride)

    @property
    def microbatches(self) -> int:
        """Of a batch, on one replica."""
        return self.row.batch // self.row.data_parallel // self.microbatch_size

    @property
    def iteration_s(self) -> float:
        """Microbatches through the pipeline, what replicas exchange, and the update."""
        return self.pipeline_s + self.exchange_s + self.update_s

    @cached_property
    def stages_s(self) -> list[float]:
        """What a microbatch takes on each rank: layers in equal parts, embedding and head on the first and the last.

        A layer that does not go into equal parts is on all ranks a fraction of itself.
        """
        p, per_rank = self.row.pipeline_parallel, self.row.layers / self.row.pipeline_parallel
        embedding_s, layer_s, head_s = (self._block_s(kind, is_layer=kind is self.kinds[1]) for kind in self.kinds)
        found = [per_rank * layer_s] * p
        found[0] += embedding_s
        found[-1] += head_s
        return found

    @property
    def pipeline_s(self) -> float:
        """1F1B with a flush: the slowest rank for every microbatch, the others once (Narayanan et al. 2021, 2.2).

        With virtual stages a rank begins and ends a chunk's share of a microbatch earlier. A message between stages
        shows when the pipeline fills and drains, and the share `exposed` of it for every chunk of a microbatch.
        """
        slowest_s, p, v = max(self.stages_s), self.row.pipeline_parallel, self.chunks
        filling_s = (sum(self.stages_s) - slowest_s) / v
        if p == 1:
            return self.microbatches * slowest_s
        sharded = self.row.sharding != "none"
        shown = PIPELINE_EXPOSED if sharded else self._engine.exposed
        return filling_s + self.microbatches * slowest_s + 2 * self._message_s * (p - 1 + v * self.microbatches * shown)

    @property
    def _message_s(self) -> float:
        """From a rank of the pipeline to the next."""
        row = self.row
        stride = row.tensor_parallel * row.context_parallel * row.data_parallel
        slowest = self._cluster.link((0, stride))
        return self.kinds[1].output_bytes / slowest.bandwidth_bytes_per_s + slowest.latency_s

    def _block_s(self, kind: KindSeconds, *, is_layer: bool) -> float:
        """A microbatch's forward and backward in a block, with what is run again and what the form exchanges.

        The host launches operations while the device computes: the slower of the two decides. The devices of a form
        wait for what they exchange.
        """
        forward, backward = kind.forward, kind.backward
        exchanged_s = self._exchanged_s(forward), self._exchanged_s(backward)
        again_s, again_exchanged_s, launched = 0.0, 0.0, 0
        if is_layer and self.row.recompute == "full":
            again_s, again_exchanged_s, launched = forward.computing_s, exchanged_s[0], forward.operations
        elif is_layer and self.row.recompute == "selective" and kind.attention is not None:
            again_s, launched = kind.attention.computing_s, kind.attention.operations
        elif is_layer and self.row.recompute == "selective":
            again_s, launched = PRODUCTS_AGAIN * forward.products_s + forward.others_s, forward.operations
        forward_s, backward_s = forward.computing_s, backward.computing_s + again_s
        if self.row.sharding != "none":
            exchanging_s = exchanged_s[0], exchanged_s[1] + again_exchanged_s
            return self._sharded_s(kind, forward_s + exchanging_s[0], backward_s + exchanging_s[1])
        host_s = self._engine.host_s or 0.0
        gap_s, operations = self._engine.gap_s or 0.0, (forward.operations, backward.operations + launched)
        working_s = max(forward_s + operations[0] * gap_s, operations[0] * host_s)
        working_s += max(backward_s + operations[1] * gap_s, operations[1] * host_s)
        return working_s + sum(exchanged_s) + again_exchanged_s

    def _sharded_s(self, kind: KindSeconds, forward_s: float, backward_s: float) -> float:
        """With weights gathered while the block before computes, and gradients reduced while the next one does.

        What takes longer decides; the exchange slows the compute beside it (Zhao et al. 2023, section 3.3). In a
        pipeline weights stay whole for all microbatches (torchtitan 2024, section 2.1).
        """
        if self.row.pipeline_parallel > 1:
            return forward_s + backward_s
        links, size = self._links(self._replicas, self.row.tensor_parallel), self._ledger.gathered * kind.parameters
        gather_s, scatter_s = links.seconds("all-gather", size), links.seconds("reduce-scatter", size)
        again_s = gather_s if SHARDINGS[self.row.sharding] == "weights" else 0.0
        beside = self._engine.exposed
        return max(forward_s + beside * gather_s, gather_s) + max(
            backward_s + beside * (again_s + scatter_s), again_s + scatter_s
        )

    def _exchanged_s(self, passage: PassageSeconds) -> float:
        row = self.row
        links = {
            "tensor": (row.tensor_parallel, 1),
            "context": (row.context_parallel, row.tensor_parallel),
        }
        return sum(
            each.count * self._links(*links[each.axis]).seconds(each.kind, each.size_bytes)
            for each in passage.collectives
        )

    @property
    def _replicas(self) -> int:
        """Devices that share a parameter's states, or hold the same: those of a sequence are replicas of weights."""
        return self.row.data_parallel * self.row.context_parallel

    @cached_property
    def _ledger(self) -> Ledger:
        return ledger_of(self.row, self._replicas)

    @cached_property
    def parameters(self) -> float:
        """Of the rank that has most."""
        embedding, layer, head = (kind.parameters for kind in self.kinds)
        if self.row.pipeline_parallel == 1:
            return embedding + self.row.layers * layer + head
        return self.row.layers / self.row.pipeline_parallel * layer + max(embedding, head)

    @property
    def exchange_s(self) -> float:
        """Gradients after the backward, in one piece; those of a tied embedding between the ends of the pipeline too.

        Sharded weights were exchanged beside the compute; in a pipeline once a batch.
        """
        row, held = self.row, self._ledger
        links = self._links(self._replicas, row.tensor_parallel)
        if row.sharding != "none":
            size = held.gathered * self.parameters
            kinds = ("all-gather", "reduce-scatter") if row.pipeline_parallel > 1 else ()
            return sum(links.seconds(kind, size) for kind in kinds)
        found = links.seconds("all-reduce", held.exchanged * self.parameters)
        if row.pipeline_parallel > 1:
            stride = row.gpus // row.pipeline_parallel * (row.pipeline_parallel - 1)
            found += self._links(2, stride).seconds("all-reduce", held.exchanged * self.kinds[0].parameters)
        return found

    @property
    def update_s(self) -> float:
        """The optimizer's traffic in memory."""
        sheet = sheet_of(self.row.gpu, self._gpu)
        return self.parameters * self._ledger.updated * UPDATE_BYTES / sheet.reached_bytes_per_s


def errors(predicted: Sequence[float], rows: Sequence[Row]) -> FloatArray:
    """Relative: above 0 where more was predicted than measured."""
    return np.asarray(np.asarray(predicted) / np.asarray([row.seconds for row in rows]) - 1)
