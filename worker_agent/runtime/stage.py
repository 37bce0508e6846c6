"""Stage: the blocks of one worker, and the tensors that it keeps of each microbatch from forward to backward.

A block takes and returns one tensor or a tuple of tensors.

    forward ... backward                            keeps the graph
    forward ... recompute_forward, backward         keeps the inputs, then the graph for a moment
    forward ... backward ... backward_weight        keeps, from the split backward on, what the weights' gradients need
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipeplan.errors import PipeplanError, RunFailedError
from worker_agent.engine.backward import Added, Computed, Deferred, Split, add_weight_gradients, parametrizations_of
from worker_agent.engine.casts import Casts
from worker_agent.models.randomness import others_have_drawn, seed_of, seed_others
from worker_agent.models.spec import UserCodeError, user_code
from worker_agent.models.values import as_values, carries_gradient
from worker_agent.runtime.module_state import Buffers, MinibatchStatistics, Snapshot
from worker_agent.runtime.own_weights import OwnWeights
from worker_agent.runtime.stage_memory import MicrobatchMemory, Tensors

Criterion = Callable[[Any, Any], Tensor]


@dataclass(slots=True)
class Kept:
    """What one microbatch keeps: its inputs (leaves of its graph), its targets, and the graph's roots by their edges.

    A root stands for an output that carries a gradient; it is None where nothing trainable leads to the output. The
    outputs themselves are not kept: the next stage has them, and the backward needs only their place in the graph.
    `split` is set where the backward is split in two, `buffers` where the forward runs again.
    """

    inputs: Tensors
    targets: Any = None
    roots: list[Any] = field(default_factory=list)
    split: Split | None = None
    buffers: Snapshot | None = None

    def splitting(self, *, deferring: bool) -> AbstractContextManager[None]:
        """The context of the forward that makes a graph and, with `deferring`, of the backward."""
        return self.split.active(deferring=deferring) if self.split else nullcontext()


class StageBlocks:
    """Blocks [first_block, first_block + len(blocks)) of a model, the last ones with the criterion.

    The random state is set from (seed, microbatch, block) before every block. A dropout mask belongs to the microbatch
    and the block, whoever computes it and however often: recomputation, resumption and any partition give the same
    mask. NumPy's and Python's random states are set too if the first forward has drawn from them: setting them takes
    longer than a small block.

    Modules record statistics of the data once a microbatch. With `minibatch_statistics` batch norm's running
    statistics are those of minibatches. With `autocast` blocks and criterion run under torch's autocast to that type.
    An error in a block or the criterion becomes a UserCodeError that names the block by `block_names`.
    With `own_weights` one that computes with other weights is refused.
    """

    runs_forward_in_backward = False

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        first_block: int,
        criterion: Criterion | None,
        recompute: bool,
        seed: int,
        device: torch.device,
        split_backward: bool = False,
        concatenate: bool = False,
        minibatch_statistics: bool = False,
        autocast: torch.dtype | None = None,
        block_names: Sequence[str] = (),
        own_weights: OwnWeights | None = None,
    ) -> None:
        self.blocks = tuple(blocks)
        self.criterion = criterion
        self.recompute = recompute
        self.kept: dict[int, Kept] = {}
        self.deferred: dict[int, list[Deferred | Computed]] = {}
        self.defers = False
        self._split_backward = split_backward
        self._concatenate = concatenate
        self.statistics = MinibatchStatistics(self.blocks) if minibatch_statistics else None
        self._autocast = autocast
        self._device = device
        self.changes_inputs: bool | None = None  # known once forwards without a graph have shown it
        self._buffers = Buffers(self.blocks) if recompute else None
        self._casts = Casts(self._parameters) if autocast else None
        self.memory = MicrobatchMemory(self.blocks, device=device, casts=self._casts, statistics=self.statistics)
        self._come_to: list[int] | None = None
        self._gradients_are_dense = False
        self._draws_elsewhere: bool | None = None
        numbers = range(first_block, first_block + len(self.blocks))
        names = block_names or [type(block).__name__ for block in self.blocks]
        self._titles = tuple(f"block {number} ({name})" for number, name in zip(numbers, names, strict=True))
        self._title = " to ".join(dict.fromkeys((self._titles[0], self._titles[-1])))
        self._own_weights = own_weights
        self._places = [(m._parameters, name) for block in blocks for m in block.modules() for name in m._parameters]
        self._parametrizations = parametrizations_of(self.blocks)
        self._seed = seed
        self._block_seeds = tuple(map(seed_of, numbers))
        on_gpu = device.type == "cuda"
        self._generator = torch.cuda.default_generators[device.index or 0] if on_gpu else torch.default_generator

    def forward(self, microbatch: int, inputs: Tensors, targets: Any = None) -> Tensors:
        """The stage's outputs, or its loss if it has the criterion. Keeps the graph, with recompute the inputs."""
        kept = self.kept[microbatch] = Kept(inputs, targets)
        if self._buffers:
            kept.buffers = self._buffers.snapshot()
        with self.statistics.noting() if self.statistics else nullcontext():
            if self.recompute:
                self.memory.keep_inputs(microbatch, inputs)
                return self._run_without_graph(microbatch, kept)
            return self._run_with_graph(microbatch, kept)

    def recompute_forward(self, microbatch: int) -> None:
        """Runs the forward again from the kept inputs, with the same random state, and keeps the graph."""
        kept = self.kept[microbatch]
        if self._buffers is None or kept.buffers is None:
            raise RunFailedError("a recomputation on a stage that is not to recompute")
        with self._buffers.as_of(kept.buffers):
            self._run_with_graph(microbatch, kept)
        kept.buffers = None

    def backward(self, microbatch: int, gradients: Tensors) -> Tensors:
        """Adds to the weights' gradients; returns those of the inputs that require one, in memory of their own.

        `gradients` holds one tensor for every output that carries a gradient. Zeros are returned where none was found.
        """
        inputs = [t for t in self.kept[microbatch].inputs if carries_gradient(t)]
        return required(inputs, self.backward_where_reached(microbatch, gradients))

    def backward_where_reached(self, microbatch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The same, with None for every missing gradient, of outputs and of inputs."""
        kept = self.kept.pop(microbatch)
        self.memory.release(microbatch)
        reached = _reached(kept, gradients)
        if reached:
            try:
                with kept.splitting(deferring=True):
                    torch.autograd.backward([root for root, _ in reached], [gradient for _, gradient in reached])
            except PipeplanError:
                raise
            except Exception as error:  # a block's own backward may raise anything
                with user_code(f"the backward of {self._failing(microbatch, kept, gradients)}"):
                    raise error
            if not self._gradients_are_dense:
                self._require_dense_gradients()

        if kept.split:
            deferred = self.deferred[microbatch] = kept.split.deferred
            self.defers = self.defers or bool(deferred)
            self.memory.keep_deferred(microbatch, kept.inputs, deferred)

        given = {gradient.untyped_storage().data_ptr() for gradient in gradients if gradient is not None}
        found = [leaf.grad for leaf in kept.inputs if carries_gradient(leaf)]
        # a view of a gradient that was given is copied: that memory is used again
        return tuple(g.clone() if g is not None and g.untyped_storage().data_ptr() in given else g for g in found)

    def _failing(self, microbatch: int, kept: Kept, gradients: Sequence[Tensor | None]) -> str:
        """The block in which the backward failed. A second backward finds it.

        The run is ending, so this costs nothing. To follow every backward would take a call into Python for each block.
        """
        place = self._title
        self._come_to = [len(self.blocks)]
        try:
            self._run_with_graph(microbatch, kept)
            reached = _reached(kept, gradients)
            torch.autograd.backward([root for root, _ in reached], [gradient for _, gradient in reached])
        except UserCodeError:
            return place  # the second forward failed
        except Exception:  # the first failure again
            newest = self._come_to[-1]
            return "the loss" if newest == len(self.blocks) else self._titles[newest]
        return place

    def _require_dense_gradients(self) -> None:
        """Raises RunFailedError where the first backward leaves a sparse gradient: exchanges and updates take none."""
        for title, block in zip(self._titles, self.blocks, strict=True):
            for name, parameter in block.named_parameters():
                if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                    raise RunFailedError(f"the gradient of {name} in {title} is sparse: give it a dense one")
        self._gradients_are_dense = True

    def waiting(self, microbatches: Iterable[int]) -> Counter[nn.Parameter]:
        """How often something is still to be added to each gradient that these microbatches' backwards left out."""
        return Counter(parameter for k in microbatches for call in self.deferred[k] for parameter in call.parameters())

    def backward_weight(self, microbatches: Sequence[int], added: Added = lambda _: None) -> None:
        """Adds the gradients that the backwards of these microbatches left out, and drops the tensors kept for them.

        `added` is called for every parameter as often as `waiting` counts.
        """
        deferred = [self.deferred.pop(k) for k in microbatches]
        self.memory.release_deferred(microbatches)
        add_weight_gradients(deferred, concatenate=self._concatenate, added=added)

    @property
    def autocasts(self) -> bool:
        """Whether blocks compute under our autocast. An autocast of their own drops its copies after each forward."""
        return self._casts is not None

    def weights_changed(self) -> None:
        """An update has changed weights: cast copies of them are stale."""
        if self._casts:
            self._casts.forget()

    def end_minibatch(self) -> None:
        """Advances running statistics, if they are those of minibatches."""
        if self.statistics:
            self.statistics.end_minibatch()

    def trained_outputs(self, microbatch: int, inputs: Tensors) -> tuple[bool, ...]:
        """Which outputs depend on trained weights: found by a forward that keeps nothing."""
        if self._buffers is None:
            raise RunFailedError("a forward that keeps nothing ran on a stage that does not recompute")
        copies = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in inputs)
        with self._buffers.as_of(self._buffers.snapshot()), torch.enable_grad():
            outputs = self._run(microbatch, Kept(copies))
        return tuple(t.requires_grad for t in outputs)

    def kept_storages(self, microbatch: int) -> frozenset[int]:
        """The addresses of the memory that the microbatch's weight gradients still need."""
        return frozenset(address for call in self.deferred.get(microbatch, ()) for address in call.storages())

    def _parameters(self) -> Iterable[nn.Parameter]:
        """The parameters of the version in use, each once."""
        held = (held[name] for held, name in self._places)
        return {id(parameter): parameter for parameter in held if parameter is not None}.values()

    @torch.no_grad()
    def _run_without_graph(self, microbatch: int, kept: Kept) -> Tensors:
        """Runs on copies of the inputs if blocks change these in place: the recomputation starts from them."""
        if self.changes_inputs is False:
            before = [t._version for t in kept.inputs]
            outputs = self._run(microbatch, kept)
            if before != [t._version for t in kept.inputs]:
                raise RunFailedError(
                    f"{self._titles[0]} or one after it changes its input in place, but not in every microbatch: "
                    "recomputation needs what it was; clone it before it is changed"
                )
            return outputs
        copies = tuple(t.clone() for t in kept.inputs)
        outputs = self._run(microbatch, Kept(copies, kept.targets))
        self.changes_inputs = any(t._version for t in copies)
        return outputs

    def _run_with_graph(self, microbatch: int, kept: Kept) -> Tensors:
        def run() -> Tensors:
            if self._split_backward:
                copy_of = self._casts.copy_of if self._casts else None
                kept.split = Split(self._parameters(), self._parametrizations, copy_of=copy_of)
            with kept.splitting(deferring=False):
                return self._run(microbatch, kept)

        outputs = self.memory.keep_graph(microbatch, kept.inputs, run)
        if self._own_weights:
            self._own_weights.require(outputs, self._title)
        graded = [t for t in outputs if carries_gradient(t)]
        kept.roots = [get_gradient_edge(t) if t.requires_grad else None for t in graded]
        return tuple(t.detach() for t in outputs)

    def _run(self, microbatch: int, kept: Kept) -> Tensors:
        if self._autocast is None or self._casts is None:
            return self._run_blocks(microbatch, kept)
        with self._casts.using(self._device.type, self._autocast):
            return self._run_blocks(microbatch, kept)

    def _run_blocks(self, microbatch: int, kept: Kept) -> Tensors:
        # A block may change its input in place, but no leaf of a graph: it gets a view in the same memory. Without a
        # graph it gets one as well, because hooks that it puts on its input belong to this forward alone.
        if torch.is_grad_enabled():
            values: Any = tuple(torch.ops.aten._unsafe_view(t, t.shape) if t.requires_grad else t for t in kept.inputs)
        else:
            values = tuple(t.detach() for t in kept.inputs)

        i, drawn, of_microbatch = 0, self._draws_elsewhere, seed_of(self._seed, microbatch)
        try:
            for i, (block, of_block) in enumerate(zip(self.blocks, self._block_seeds, strict=True)):
                seed = of_microbatch ^ of_block
                self._generator.manual_seed(seed)
                if self._draws_elsewhere is not False:
                    seed_others(seed)
                values = as_values(block(*values))
                if self._draws_elsewhere is None:
                    drawn = drawn or others_have_drawn(seed)
                if self._come_to is not None:
                    self._follow(i, values, self._come_to)
        except (Exception, SystemExit) as error:  # user code may raise anything
            with user_code(self._titles[i]):
                raise error
        self._draws_elsewhere = bool(drawn)
        return tuple(values) if self.criterion is None else (self._loss(self.criterion, values, kept.targets),)

    def _loss(self, criterion: Criterion, values: Tensors, targets: Any) -> Tensor:
        with user_code("the loss"):
            loss: Any = criterion(values if len(values) > 1 else values[0], targets)
            if not isinstance(loss, Tensor):
                raise TypeError(f"a loss must be a tensor, and this one is {type(loss).__name__}")
            if loss.numel() != 1 or not loss.is_floating_point():
                shape = tuple(loss.shape)
                raise TypeError(f"a loss must be one real number, and this one has shape {shape} of {loss.dtype}")
            if torch.is_grad_enabled() and not loss.requires_grad:
                raise TypeError("a loss must follow from what is trained, and this one has no gradient")
            return loss

    def _follow(self, block: int, outputs: Tensors, come_to: list[int]) -> None:
        """Has a backward note when it comes to a block's outputs."""
        for output in outputs:
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(lambda _gradients: come_to.append(block))


def required(inputs: Iterable[Tensor], found: Iterable[Tensor | None]) -> Tensors:
    """The gradients of the inputs that require one, with zeros where none was found: a batch's data require none."""
    pairs = zip(inputs, found, strict=True)
    return tuple(torch.zeros_like(t) if g is None else g for t, g in pairs if t.requires_grad)


def _reached(kept: Kept, gradients: Sequence[Tensor | None]) -> list[tuple[Any, Tensor]]:
    """The graph's roots that have a gradient, each with its own. Without `gradients` the next stage has sent none."""
    if not gradients:
        return []
    pairs = zip(kept.roots, gradients, strict=True)
    return [(root, gradient) for root, gradient in pairs if root is not None and gradient is not None]
