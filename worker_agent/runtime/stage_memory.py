"""Stage memory: counts the bytes that a stage's microbatches hold. It observes, and changes nothing that is computed.

What a graph keeps is inspected once for inputs of each layout; later microbatches of that layout keep as much. Of some
tensors torch does not tell the memory (`models.values.parts_of`), and some forwards let nobody look at what they save:
then the bytes are None, unknown.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from worker_agent.engine.backward import Computed, Deferred
from worker_agent.engine.casts import Casts
from worker_agent.engine.graphs import calls_bytes, graph_bytes, refuses_hooks
from worker_agent.engine.notice import Layouts, layouts_of
from worker_agent.models.spec import UserCodeError
from worker_agent.models.values import carries_gradient, kind_of, parts_of
from worker_agent.runtime.module_state import Before, MinibatchStatistics

Tensors = tuple[Tensor, ...]

_Kept = tuple[int | None, int]
"""The bytes of the tensors that a microbatch keeps, and of its graph (`engine.graphs`)."""

_log = logging.getLogger(__name__)

UNKNOWN = "the bytes that this rank holds are unknown"


def total_known(sizes: Iterable[int | None]) -> int | None:
    """The sum; None if one is unknown."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


def most_known(sizes: Iterable[int | None]) -> int | None:
    """The largest; None if one is unknown."""
    known: list[int] = []
    for size in sizes:
        if size is None:
            return None
        known.append(size)
    return max(known)


def untrained_bytes(stages: Iterable[Iterable[nn.Module]]) -> list[int | None]:
    """By stage of a rank, the bytes of its blocks' frozen parameters and buffers, of all stages each once."""
    seen: set[int] = set()
    sizes: list[int | None] = []
    for blocks in stages:
        tensors = (t for block in blocks for t in (*block.parameters(), *block.buffers()))
        own = {id(t): t for t in tensors if not (isinstance(t, nn.Parameter) and t.requires_grad) and id(t) not in seen}
        seen |= own.keys()
        parts = [(tensor, parts_of(tensor)) for tensor in own.values()]
        sizes.append(total_known(None if of is None else sum(part.nbytes for part in of) for _, of in parts))
        for kind in {kind_of(tensor) for tensor, of in parts if of is None}:
            _log.warning("%s: a weight or buffer is %s", UNKNOWN, kind)
    return sizes


@dataclass(eq=False)
class MicrobatchMemory:
    """The bytes of each microbatch on a stage: of a graph and the storages that it keeps, or of kept inputs.

    The stage calls it at every forward, backward and p2. Weights, buffers and `statistics` are not counted; the
    weights' copies that autocast makes (`casts`) are counted once for all microbatches.
    """

    blocks: Sequence[nn.Module]
    device: torch.device
    casts: Casts | None
    statistics: MinibatchStatistics | None

    def __post_init__(self) -> None:
        self._by_layouts: dict[Layouts, _Kept] = {}
        self._deferred_by_layouts: dict[Layouts, int] = {}
        self._kept: dict[int, _Kept] = {}
        self._deferred_bytes: dict[int, int] = {}
        self._warned: set[str] = set()

    def keep_inputs(self, microbatch: int, inputs: Tensors) -> None:
        """The microbatch keeps its inputs alone."""
        self._kept[microbatch] = sum(t.nbytes for t in inputs), 0

    def keep_graph(self, microbatch: int, inputs: Tensors, forward: Callable[[], Tensors]) -> Tensors:
        """Runs a forward that makes a graph, and returns its outputs. The microbatch keeps the graph.

        It keeps its inputs alone where no output can have a gradient.
        """
        layouts = layouts_of(inputs)
        if layouts in self._by_layouts:
            outputs = forward()
        else:
            before = Before(self.blocks, inputs, self.statistics)
            try:
                outputs, self._by_layouts[layouts] = self._inspected(inputs, forward)
            except UserCodeError as error:
                if error.__cause__ is None or not refuses_hooks(error.__cause__):
                    raise
                self._warn("a block lets nobody look at what its graph saves")
                before.restore()
                outputs, self._by_layouts[layouts] = forward(), (None, 0)
        if any(carries_gradient(t) for t in outputs):
            self._kept[microbatch] = self._by_layouts[layouts]
        else:
            self.keep_inputs(microbatch, inputs)
        return outputs

    def keep_deferred(self, microbatch: int, inputs: Tensors, deferred: Sequence[Deferred | Computed]) -> None:
        """The microbatch's backward has left these calls for p2."""
        layouts = layouts_of(inputs)
        if layouts not in self._deferred_by_layouts:
            storages = {address: size for call in deferred for address, size in call.storages().items()}
            owned = self._owned_storages()
            tensors_bytes = sum(size for address, size in storages.items() if address not in owned)
            self._deferred_by_layouts[layouts] = tensors_bytes + calls_bytes(len(deferred), self.device)
        self._deferred_bytes[microbatch] = self._deferred_by_layouts[layouts]

    def release(self, microbatch: int) -> None:
        del self._kept[microbatch]

    def release_deferred(self, microbatches: Iterable[int]) -> None:
        """The microbatches' p2 is done."""
        for microbatch in microbatches:
            del self._deferred_bytes[microbatch]

    def kept_bytes(self, microbatch: int) -> int | None:
        """The bytes that a microbatch keeps between its forward and its backward."""
        return total_known(self._kept[microbatch])

    def tensors_bytes(self, microbatch: int) -> int | None:
        """The same without the graph itself: the bytes of the tensors that it keeps, or of the inputs."""
        return self._kept[microbatch][0]

    def held_bytes(self) -> int | None:
        """The bytes that all microbatches hold: graphs, kept inputs, p2's inputs, and autocast's copies."""
        return total_known(
            (*map(total_known, self._kept.values()), sum(self._deferred_bytes.values()), self.cast_bytes)
        )

    @property
    def cast_bytes(self) -> int:
        """The bytes of the weights' copies that autocast has made and that all microbatches share."""
        return self.casts.bytes if self.casts else 0

    def _owned_storages(self) -> set[int]:
        lent = self.statistics.lent.values() if self.statistics else ()
        owned = [t for block in self.blocks for t in (*block.parameters(), *block.buffers())]
        owned += [t for buffers in lent for t in buffers.values() if t is not None]
        return {address for tensor in owned for address in _storages(parts_of(tensor) or ())}

    def _inspected(self, inputs: Tensors, forward: Callable[[], Tensors]) -> tuple[Tensors, _Kept]:
        """The outputs of a forward, and what it keeps without weights and copies of them."""
        owned = self._owned_storages()
        saved: dict[int, int] = {}
        copies: dict[int, int] = {}
        counted, unknown = 0, False

        def pack(tensor: Tensor) -> Tensor:
            nonlocal counted, unknown
            parts = parts_of(tensor)
            if parts is None:
                unknown = True
                self._warn(f"a graph keeps a tensor of {tensor.layout} and class {type(tensor).__name__}")
            own = [part for part in parts or () if not owned.issuperset(_storages((part,)))]
            counted += bool(own)
            for part in own:
                shared = self.casts is not None and self.casts.weight_of(part) is not None
                (copies if shared else saved).update(_storages((part,)))
            return tensor.detach()

        for tensor in inputs:
            pack(tensor)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = forward()
        if self.casts:
            self.casts.found_bytes = max(self.casts.found_bytes, sum(copies.values()))
        own_bytes = graph_bytes(outputs, saved=counted - len(inputs), device=self.device)
        return outputs, (None if unknown else sum(saved.values()), own_bytes)

    def _warn(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            _log.warning("%s: %s", UNKNOWN, why)


def _storages(parts: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of dense tensors' storages by address; fake tensors have none."""
    storages = [part.untyped_storage() for part in parts]
    return {each.data_ptr(): each.nbytes() for each in storages if each.device.type != "meta"}


class ByBlockMemory:
    """The bytes of each microbatch on a stage that recomputes block by block: every block's inputs, and a block's graph
    while its backward runs. `parts` count those of each block alone.
    """

    def __init__(self, parts: Sequence[MicrobatchMemory]) -> None:
        self._parts = tuple(parts)
        self._inputs: dict[int, dict[int, int]] = {}
        self._until_block_bytes: dict[int, list[int]] = {}
        self._most_bytes: int | None = 0

    def keep_inputs(self, microbatch: int, inputs: Tensors) -> None:
        """The microbatch keeps the inputs of the next block. A tensor that a block only passes on is kept once."""
        kept = self._inputs.setdefault(microbatch, {})
        kept |= {t.data_ptr(): t.nbytes for t in inputs}
        self._until_block_bytes.setdefault(microbatch, []).append(sum(kept.values()))

    def note_backward(self, microbatch: int, block: int) -> None:
        """The backward of a block is about to run: its graph is there, and the inputs of the blocks before it."""
        before_bytes = self._until_block_bytes[microbatch][block - 1] if block else 0
        others_bytes = sum(sums[-1] for k, sums in self._until_block_bytes.items() if k != microbatch)
        now_bytes = total_known((self._parts[block].kept_bytes(microbatch), before_bytes, others_bytes))
        self._most_bytes = most_known((self._most_bytes, now_bytes))

    def release(self, microbatch: int) -> None:
        del self._inputs[microbatch], self._until_block_bytes[microbatch]

    def held_bytes(self) -> int | None:
        """The bytes that all microbatches hold, and autocast's copies: now, or in the backward just ended.

        A backward frees what it makes, so its maximum counts, once.
        """
        most_bytes, self._most_bytes = self._most_bytes, 0
        now_bytes = sum(sums[-1] for sums in self._until_block_bytes.values())
        cast_bytes = sum(part.cast_bytes for part in self._parts)
        return total_known((most_known((most_bytes, now_bytes)), cast_bytes))
