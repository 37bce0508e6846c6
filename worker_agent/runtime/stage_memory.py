"""Stage memory: counts the bytes that a stage's microbatches hold. It observes, and changes nothing that is computed.

What a graph keeps is inspected once for inputs of each layout; later microbatches of that layout keep as much.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from worker_agent.engine.backward import Computed, Deferred
from worker_agent.engine.casts import Casts
from worker_agent.engine.graphs import calls_bytes, graph_bytes
from worker_agent.engine.notice import Layouts, layouts_of
from worker_agent.models.values import carries_gradient
from worker_agent.runtime.module_state import MinibatchStatistics

Tensors = tuple[Tensor, ...]


class StageMemory:
    """The bytes of each microbatch on a stage: of a graph and the storages that it keeps, or of kept inputs.

    The stage calls it at every forward, backward and p2. Weights, buffers and `statistics` are not counted; the
    weights' copies that autocast makes (`casts`) are counted once for all microbatches.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        device: torch.device,
        casts: Casts | None,
        statistics: MinibatchStatistics | None,
    ) -> None:
        self._blocks = blocks
        self._device = device
        self._casts = casts
        self._statistics = statistics
        self._by_layouts: dict[Layouts, int] = {}
        self._deferred_by_layouts: dict[Layouts, int] = {}
        self._kept_bytes: dict[int, int] = {}
        self._deferred_bytes: dict[int, int] = {}

    def keep_inputs(self, microbatch: int, inputs: Tensors) -> None:
        """The microbatch keeps its inputs alone."""
        self._kept_bytes[microbatch] = sum(t.nbytes for t in inputs)

    def keep_graph(self, microbatch: int, inputs: Tensors, forward: Callable[[], Tensors]) -> Tensors:
        """Runs a forward that makes a graph, and returns its outputs. The microbatch keeps the graph.

        It keeps its inputs alone where no output can have a gradient.
        """
        layouts = layouts_of(inputs)
        if layouts in self._by_layouts:
            outputs = forward()
        else:
            outputs, self._by_layouts[layouts] = self._inspected(inputs, forward)
        if any(carries_gradient(t) for t in outputs):
            self._kept_bytes[microbatch] = self._by_layouts[layouts]
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
            self._deferred_by_layouts[layouts] = tensors_bytes + calls_bytes(len(deferred), self._device)
        self._deferred_bytes[microbatch] = self._deferred_by_layouts[layouts]

    def release(self, microbatch: int) -> None:
        """The backward of the microbatch takes what it kept."""
        del self._kept_bytes[microbatch]

    def release_deferred(self, microbatches: Iterable[int]) -> None:
        """The microbatches' p2 is done."""
        for microbatch in microbatches:
            del self._deferred_bytes[microbatch]

    def kept_bytes(self, microbatch: int) -> int:
        """The bytes that a microbatch keeps between its forward and its backward."""
        return self._kept_bytes[microbatch]

    def held_bytes(self) -> int:
        """The bytes that all microbatches hold: graphs, kept inputs, p2's inputs, and autocast's copies."""
        return sum(self._kept_bytes.values()) + sum(self._deferred_bytes.values()) + self.cast_bytes

    @property
    def cast_bytes(self) -> int:
        """The bytes of the weights' copies that autocast has made and that all microbatches share."""
        return self._casts.bytes if self._casts else 0

    def _owned_storages(self) -> set[int]:
        lent = self._statistics.lent.values() if self._statistics else ()
        owned = [t for block in self._blocks for t in (*block.parameters(), *block.buffers())]
        owned += [t for buffers in lent for t in buffers.values() if t is not None]
        return {t.untyped_storage().data_ptr() for t in owned}

    def _inspected(self, inputs: Tensors, forward: Callable[[], Tensors]) -> tuple[Tensors, int]:
        """The outputs of a forward, and the bytes of its graph and of the storages that it keeps.

        Weights and copies of them are not among these.
        """
        owned = self._owned_storages()
        saved: dict[int, int] = {}
        copies: dict[int, int] = {}

        counted = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal counted
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in owned:
                counted += 1
                shared = self._casts is not None and self._casts.holds(tensor)
                (copies if shared else saved)[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()

        for tensor in inputs:
            pack(tensor)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = forward()
        if self._casts:
            self._casts.found_bytes = max(self._casts.found_bytes, sum(copies.values()))
        own_bytes = graph_bytes(outputs, saved=counted - len(inputs), device=self._device)
        return outputs, sum(saved.values()) + own_bytes


class ByBlockMemory:
    """The bytes of each microbatch on a stage that recomputes block by block: every block's inputs, and a block's graph
    while its backward runs. `parts` count those of each block alone.
    """

    def __init__(self, parts: Sequence[StageMemory]) -> None:
        self._parts = tuple(parts)
        self._inputs: dict[int, dict[int, int]] = {}
        self._until_block_bytes: dict[int, list[int]] = {}
        self._most_bytes = 0

    def keep_inputs(self, microbatch: int, inputs: Tensors) -> None:
        """The microbatch keeps the inputs of the next block. A tensor that a block only passes on is kept once."""
        kept = self._inputs.setdefault(microbatch, {})
        kept |= {t.data_ptr(): t.nbytes for t in inputs}
        self._until_block_bytes.setdefault(microbatch, []).append(sum(kept.values()))

    def note_backward(self, microbatch: int, block: int) -> None:
        """The backward of a block is about to run: its graph is there, and the inputs of the blocks before it."""
        own_bytes = self._parts[block].kept_bytes(microbatch)
        own_bytes += self._until_block_bytes[microbatch][block - 1] if block else 0
        others_bytes = sum(sums[-1] for k, sums in self._until_block_bytes.items() if k != microbatch)
        self._most_bytes = max(self._most_bytes, others_bytes + own_bytes)

    def release(self, microbatch: int) -> None:
        """The backward of the microbatch is done."""
        del self._inputs[microbatch], self._until_block_bytes[microbatch]

    def held_bytes(self) -> int:
        """The bytes that all microbatches hold, and autocast's copies: now, or in the backward just ended.

        A backward frees what it makes, so its maximum counts, once.
        """
        most_bytes, self._most_bytes = self._most_bytes, 0
        now_bytes = sum(sums[-1] for sums in self._until_block_bytes.values())
        return max(most_bytes, now_bytes) + sum(part.cast_bytes for part in self._parts)
