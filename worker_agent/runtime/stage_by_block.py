"""Stage by block: the blocks of a worker that recomputes them one by one, each right before its own backward.

Per-layer checkpointing (Chen et al. 2016, "Training deep nets with sublinear memory cost", section 4.1). Every block is
a stage of its own that recomputes as a whole (`StageBlocks`), and passes its outputs to the next one without a send:

    forward    block 0, 1, ..., n - 1     keeps every block's input
    backward   block n - 1, ..., 1, 0     runs the block again, then its backward, and frees it

The results equal those of the whole stage, bit for bit. A block must pass its results on by returning them. If it
stored one in a module for another block, that block would find the result of another microbatch when it runs again.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pipeplan.errors import RunFailedError
from worker_agent.engine.backward import Added
from worker_agent.engine.notice import Layouts, layouts_of
from worker_agent.models.values import carries_gradient
from worker_agent.runtime.module_state import MinibatchStatistics
from worker_agent.runtime.own_weights import OwnWeights
from worker_agent.runtime.stage import Criterion, StageBlocks, required
from worker_agent.runtime.stage_memory import ByBlockMemory, Tensors


class StageByBlock:
    """Blocks [first_block, first_block + len(blocks)) of a model, the last ones with the criterion, as `StageBlocks`.

    Its backward is never split. If several blocks use a weight, their gradients of a microbatch are summed first: the
    sum is rounded as in one backward through all blocks. (Under autocast that rounds it to 16 bits.)
    """

    runs_forward_in_backward = True
    defers = False

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        first_block: int,
        criterion: Criterion | None,
        seed: int,
        device: torch.device,
        minibatch_statistics: bool = False,
        autocast: torch.dtype | None = None,
        block_names: Sequence[str] = (),
        own_weights: OwnWeights | None = None,
    ) -> None:
        self.criterion = criterion
        self.statistics = MinibatchStatistics(blocks) if minibatch_statistics else None
        names = block_names or [type(block).__name__ for block in blocks]
        self._parts = tuple(
            StageBlocks(
                (block,),
                first_block=first_block + place,
                criterion=criterion if place == len(blocks) - 1 else None,
                recompute=True,
                seed=seed,
                device=device,
                autocast=autocast,
                block_names=(name,),
                own_weights=own_weights,
            )
            for place, (block, name) in enumerate(zip(blocks, names, strict=True))
        )
        self._titles = [f"block {first_block + place} ({name})" for place, name in enumerate(names)]
        self._shared = _shared_places(blocks)
        self._trained: list[dict[Layouts, tuple[bool, ...]]] = [{} for _ in self._parts]
        self._changes: dict[int, list[list[int]]] = {}
        self.memory = ByBlockMemory([part.memory for part in self._parts])

    def forward(self, microbatch: int, inputs: Tensors, targets: Any = None) -> Tensors:
        """The stage's outputs, or its loss if it has the criterion. Keeps the inputs of all blocks.

        Which outputs of a block have a gradient is found once for inputs of each shape.
        """
        self._changes[microbatch] = []
        for place, part in enumerate(self._parts):
            self.memory.keep_inputs(microbatch, inputs)
            last = place == len(self._parts) - 1
            known, layouts = self._trained[place], layouts_of(inputs)
            if not last and layouts not in known:
                known[layouts] = part.trained_outputs(microbatch, inputs)
            with self.statistics.noting() if self.statistics else nullcontext():
                outputs = part.forward(microbatch, inputs, targets if last else None)
            self._changes[microbatch].append([t._version for t in inputs])
            if not last:
                pairs = zip(outputs, known[layouts], strict=True)
                inputs = tuple(t.detach().requires_grad_(trained) for t, trained in pairs)
        return outputs

    def backward(self, microbatch: int, gradients: Tensors) -> Tensors:
        """Runs every block again, from the last to the first, each with its backward; as `StageBlocks.backward`.

        Raises RunFailedError if a kept input has been changed since, or if an output depends on trained weights but did
        not in the first microbatch of its shape.
        """
        changes = self._changes.pop(microbatch)
        inputs = [t for t in self._parts[0].kept[microbatch].inputs if carries_gradient(t)]
        found: Sequence[Tensor | None] = gradients
        asked = [True] * len(gradients)
        with self._gathering_apart():
            for place in reversed(range(len(self._parts))):
                part = self._parts[place]
                if gradients:  # else the next stage has sent none, and no block runs again
                    self._run_again(place, microbatch, changes[place], asked)
                    self.memory.note_backward(microbatch, place)
                    asked = [t.requires_grad for t in part.kept[microbatch].inputs if carries_gradient(t)]
                found = part.backward_where_reached(microbatch, found if gradients else ())
        self.memory.release(microbatch)
        return required(inputs, found)

    def recompute_forward(self, microbatch: int) -> NoReturn:
        """Raises RunFailedError: the backward itself runs the blocks again."""
        raise RunFailedError(f"a recomputation of microbatch {microbatch} on a stage that recomputes by block")

    def waiting(self, microbatches: Iterable[int]) -> Counter[nn.Parameter]:
        """Raises RunFailedError: no backward has left anything out."""
        raise RunFailedError(
            f"a split backward of microbatches {list(microbatches)} on a stage that recomputes by block"
        )

    def backward_weight(self, microbatches: Sequence[int], added: Added = lambda _: None) -> NoReturn:
        """Raises RunFailedError: no backward has left anything out."""
        raise RunFailedError(
            f"a split backward of microbatches {list(microbatches)} on a stage that recomputes by block"
        )

    @property
    def autocasts(self) -> bool:
        return any(part.autocasts for part in self._parts)

    def weights_changed(self) -> None:
        """An update has changed weights: cast copies of them are stale."""
        for part in self._parts:
            part.weights_changed()

    def end_minibatch(self) -> None:
        """Advances running statistics, if they are those of minibatches."""
        if self.statistics:
            self.statistics.end_minibatch()

    def kept_storages(self, microbatch: int) -> frozenset[int]:
        """The addresses of the memory that the microbatch still needs after its backward: none."""
        del microbatch
        return frozenset()

    def _run_again(self, place: int, microbatch: int, changes: Sequence[int], asked: Sequence[bool]) -> None:
        """One block's forward, with its graph; `asked` marks outputs with a gradient from the next block."""
        part, title = self._parts[place], self._titles[place]
        kept = part.kept[microbatch]
        if list(changes) != [t._version for t in kept.inputs]:
            raise RunFailedError(
                f"an input of {title} was changed in place after its forward: recomputation needs what it was; clone "
                "it before it is changed"
            )
        if part.changes_inputs:  # an earlier block's input may be in the same memory
            kept.inputs = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in kept.inputs)
        part.recompute_forward(microbatch)
        if any(root is not None and not wanted for root, wanted in zip(kept.roots, asked, strict=True)):
            raise RunFailedError(
                f"an output of {title} depends on what is trained, and did not in the first microbatch of its shape: "
                "recomputation by block cannot follow that"
            )

    @contextmanager
    def _gathering_apart(self) -> Iterator[None]:
        """While it is active, the weights that several blocks use gather the gradients of this backward alone."""
        weights = [weight for places, name in self._shared if (weight := places[name]) is not None]
        before = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        yield
        for weight, gathered in zip(weights, before, strict=True):
            if gathered is not None and weight.grad is not None:
                gathered.add_(weight.grad)
            weight.grad = weight.grad if gathered is None else gathered


def _shared_places(blocks: Sequence[nn.Module]) -> list[tuple[dict[str, nn.Parameter | None], str]]:
    """A place of each trained parameter that several of the blocks hold. It has the leaf of the version in use."""
    holders: Counter[nn.Parameter] = Counter(p for block in blocks for p in set(block.parameters()) if p.requires_grad)
    places = {
        parameter: (module._parameters, name)
        for block in blocks
        for module in block.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    return [places[parameter] for parameter, count in holders.items() if count > 1]
