"""Modules: Megatron-LM's selective recomputation of parts whose outputs are freed and recomputed.

Its `--recompute-modules layernorm moe_act mla_up_proj` free a part's output once the next product has read it, keep the
part's inputs, and recompute the output before that product's backward (core 0.15, `transformer_layer.py`,
`moe/experts.py`, `multi_latent_attention.py`: CheckpointWithoutOutput):

    layernorm     norms before experts, and before attention by latents. Other norms are one kernel with the linear
                  layer after them (Transformer Engine's LayerNormLinear), which keeps their output
    moe_act       the operations between the two products of grouped experts
    mla_up_proj   queries, keys and values of heads, made of the latents: norms, products, rotation

Tensors that the part reads from other devices count as available: the backward gathers them in any case.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from worker_agent.models.parallel import BalancedExperts
from worker_agent.profiler.fusion import made_again
from worker_agent.profiler.operations import DeviceOperation, MatrixSizes, OperationRecorder, Traffic

LATENTS = ("q_a_proj", "kv_a_proj_with_mqa")
"""The layers that make latents, as Hugging Face's models name them; `kv_b_proj` makes heads of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveCounts:
    """Selective recomputation (`documents.forms.Selective`): the recomputed operations, and the kept bytes.

    `products` are the forward's products whose left operand is recomputed, not kept.
    """

    operations: tuple[DeviceOperation, ...]
    activation_bytes: int
    unit: str = "attention"
    modules: tuple[str, ...] = ()
    products: tuple[MatrixSizes, ...] = ()


@dataclass(slots=True, kw_only=True)
class ModuleOutputs:
    """Modules' inputs and outputs while a block ran forward, by the recorder's numbers of storages and operations."""

    recorder: OperationRecorder
    _norms: set[int] = field(default_factory=set, init=False)
    _latents: set[int] = field(default_factory=set, init=False)
    _experts: list[list[int]] = field(default_factory=list, init=False)
    _attention: list[int] = field(default_factory=list, init=False)

    @contextmanager
    def noted(self, block: nn.Module) -> Iterator[None]:
        """Notes them of a block's modules."""
        handles = []
        for part in block.modules():
            children = dict(part.named_children())
            if isinstance(part, BalancedExperts):
                handles.append(part.register_forward_pre_hook(self._enter_experts, prepend=True, with_kwargs=True))
                handles.append(part.register_forward_hook(self._leave_experts))
            elif "kv_b_proj" in children and "indexer" not in children:
                handles.append(part.register_forward_pre_hook(self._enter_latents, prepend=True, with_kwargs=True))
                handles += [children[n].register_forward_hook(self._made_latents) for n in LATENTS if n in children]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def discarded(
        self, forward: Sequence[Traffic], held: Mapping[int, int], sent: Collection[int], *, kept_bytes: int
    ) -> SelectiveCounts | None:
        """The part of `kept_bytes` that stays when modules' outputs are freed; None if nothing is freed.

        `held` are the bytes, by storage, that the autograd graph keeps; `sent` are the storages of the block's inputs,
        outputs and weights.
        """
        activations, latents = set[int](), set[int]()
        for start, stop in self._experts:
            between = [place for place in range(start, stop) if forward[place].operation.sizes]
            activations |= _written(forward[between[0] + 1 : between[-1]]) if between else set()
        for start in self._attention:
            kernels = (place for place in range(start, len(forward)) if "attention" in forward[place].operation.name)
            latents |= _written(forward[start : next(kernels, start)])
        latents -= self._latents | self._norms
        parts = {"layernorm": self._norms, "moe_act": activations, "mla_up_proj": latents}
        made = _written(forward)
        freed = {name: (found & made & held.keys()) - set(sent) for name, found in parts.items()}
        freed = {name: found for name, found in freed.items() if found}
        if not freed:
            return None
        every = set().union(*freed.values())
        products = (member for member in forward if member.operation.operand == "new" and member.reads.keys() & every)
        there = held.keys() | set(sent)
        return SelectiveCounts(
            unit="modules",
            modules=tuple(freed),
            activation_bytes=kept_bytes - sum(held[each] for each in every),
            operations=tuple(
                operation for found in freed.values() for operation in made_again(forward, found, held=there - found)
            ),
            products=tuple(member.operation.sizes for member in products if member.operation.sizes),
        )

    def _enter_experts(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._norms.add(self._number(_first(args, options)))
        self._experts.append([len(self.recorder.traffic)])

    def _leave_experts(self, *_: Any) -> None:
        self._experts[-1].append(len(self.recorder.traffic))

    def _enter_latents(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._norms.add(self._number(_first(args, options)))
        self._attention.append(len(self.recorder.traffic))

    def _made_latents(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._latents.add(self._number(output))

    def _number(self, tensor: Tensor) -> int:
        return self.recorder.number(tensor.untyped_storage())


def dynamic(operations: Sequence[DeviceOperation]) -> int:
    """The number of operations of a pass from the dispatch of tokens to their experts to the combination, inclusive.

    Their shapes depend on how many tokens choose each expert.
    """
    ways = [place for place, op in enumerate(operations) if op.name in ("index_select", "index_add")]
    return ways[-1] - ways[0] + 1 if ways else 0


def _first(args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """The first tensor of numbers that a module takes: Hugging Face's attention gets it by name."""
    values = (*args, *options.values())
    return next(each for each in values if isinstance(each, Tensor) and each.is_floating_point())


def _written(operations: Sequence[Traffic]) -> set[int]:
    return {each for member in operations for each in member.writes}
