"""Parallel: modules with a device's share of a layer, and their exchanges with the other devices' shares.

As Megatron-LM has it (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section
2.3; Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2):

    a value enters      what several column-parallel layers read, once for all of them: as it is, and its gradient is
                        summed; with sequence parallelism gathered, and its gradient scattered
    a value leaves      what a row-parallel layer makes: summed, and its gradient as it is; with sequence parallelism
                        scattered, and its gradient gathered

Values are (..., S, features): the dimension before the last one is the sequence, or all tokens. Peers bring them to
other devices: nothing here communicates.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.documents.forms import Form


class Peers(Protocol):
    """Exchanges of a device's values with the devices that share its blocks."""

    def gather(self, share: Tensor) -> Tensor:
        """The shares of all tensor-parallel devices, one after the other in the sequence."""

    def scatter(self, whole: Tensor) -> Tensor:
        """The device's share of the sequence, of the sum over all tensor-parallel devices."""

    def reduce(self, value: Tensor, *, largest: bool = False) -> Tensor:
        """The sum (or the largest) over all tensor-parallel devices. May overwrite the value."""

    def trade(self, rows: Tensor, experts: int, chosen: int) -> Tensor:
        """Rows for the experts of all expert-parallel devices, for as many rows of the own experts. Its own inverse.

        Each token has a row for each of its `chosen` ones of all `experts`.
        """

    def ring(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, N, T, D) of all context-parallel devices, in the order of the sequence."""

    def ring_back(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The device's share of the gradients of `ring`'s result, summed over all context-parallel devices."""


AnyPeers = TypeVar("AnyPeers", bound=Peers, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region(Generic[AnyPeers]):
    """The context of a device's share: the form, its number among the tensor-parallel devices, and the others."""

    form: Form
    peers: AnyPeers
    rank: int = 0

    @property
    def of_experts(self) -> "Region[AnyPeers]":
        """The region of a layer's experts, which may have a tensor degree of their own."""
        if self.form.expert_tensor is None:
            return self
        return replace(self, form=replace(self.form, tensor=1, sequence_parallel=False, expert_tensor=None), rank=0)

    def enter(self, x: Tensor) -> Tensor:
        """The input of column-parallel layers."""
        there, back = (
            (self.peers.gather, self.peers.scatter) if self.form.sequence_parallel else (_same, self.peers.reduce)
        )
        return x if self.form.tensor == 1 else _exchanged(there, back, x)

    def leave(self, x: Tensor) -> Tensor:
        """The output of a row-parallel layer for the next module."""
        there, back = (
            (self.peers.scatter, self.peers.gather) if self.form.sequence_parallel else (self.peers.reduce, _same)
        )
        return x if self.form.tensor == 1 else _exchanged(there, back, x)

    def positions(self, share: Tensor) -> Tensor:
        """(..., S) positions of the device's share of a sequence -> those of the whole, from 0."""
        times = self.form.tensor if self.form.sequence_parallel else 1
        positions = torch.arange(times * share.shape[-1], device=share.device)
        return positions.expand(*share.shape[:-1], -1) if share.dim() > 2 else positions.unsqueeze(0)

    def trade(self, rows: Tensor, experts: int, chosen: int) -> Tensor:
        """Rows of the device's own experts for rows of the others', and the same of their gradients."""
        trade = partial(self.peers.trade, experts=experts, chosen=chosen)
        return rows if self.form.expert == 1 else _exchanged(trade, trade, rows)

    def summed(self, x: Tensor) -> Tensor:
        """The sum of a value over all devices, which each of them uses for its share of the next operations."""
        return x if self.form.tensor == 1 else _exchanged(self.peers.reduce, self.peers.reduce, x)

    def ring(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of the whole sequence (Liu et al. 2023, "Ring Attention with Blockwise Transformers")."""
        return (key, value) if self.form.context == 1 else _exchanged(self.peers.ring, self.peers.ring_back, key, value)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _exchanged(there: Callable[..., Any], back: Callable[..., Any], *values: Tensor) -> Any:
    """An exchange of values, whose backward is another exchange of the gradients."""
    return _ThereAndBack.apply(there, back, *values)  # type: ignore[no-untyped-call]


class _ThereAndBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: Callable[..., Any], back: Callable[..., Any], *values: Tensor) -> Any:
        ctx.back = back
        return there(*values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.back(*gradients)
        return (None, None, *(found if isinstance(found, tuple) else (found,)))


class ColumnShare(nn.Module):
    """A linear layer's share of the output features. Without `adds_bias` the bias is for the caller to add.

    Its input has entered, unless it `enters` here.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, region: Region[Peers], *, adds_bias: bool, enters: bool
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.region = region
        self.adds_bias = adds_bias
        self.enters = enters

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, inputs) -> (B, S, share of outputs)."""
        whole = self.region.enter(x) if self.enters else x
        return functional.linear(whole, self.weight, self.bias if self.adds_bias else None)


class RowShare(nn.Module):
    """A linear layer's share of the input features. The bias is whole, and added to the output.

    An output that `stays` is summed for the column-parallel layers of the same module, and does not leave.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        region: Region[Peers],
        *,
        adds_bias: bool,
        stays: bool = False,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.region = region
        self.adds_bias = adds_bias
        self.stays = stays

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, share of inputs) -> (B, S, outputs), with sequence parallelism the share of S."""
        product = functional.linear(x, self.weight)
        product = self.region.summed(product) if self.stays else self.region.leave(product)
        return product if self.bias is None or not self.adds_bias else product + self.bias


class RowEmbedding(nn.Module):
    """An embedding's share of the vocabulary: tokens that others hold give zero, and the sum leaves, scaled."""

    def __init__(self, weight: nn.Parameter, region: Region[Peers], *, scale: Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.region = region
        self.scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) -> (B, S, width), with sequence parallelism the share of S."""
        own = tokens - self.region.rank * len(self.weight)
        elsewhere = (own < 0) | (own >= len(self.weight))
        rows = functional.embedding(own.masked_fill(elsewhere, 0), self.weight)
        found = self.region.leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0))
        return found if self.scale is None else found * self.scale.to(found.dtype)


class _TokenSums(torch.autograd.Function):
    """Rows are added to those of their tokens. The backward needs the tokens alone; torch's keeps the rows, too."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        """(T, H), (R,) and (R, H) -> (T, H)."""
        ctx.save_for_backward(tokens)
        return sums.index_add(0, tokens, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        """(T, H) -> (R, H) for the rows."""
        (tokens,) = ctx.saved_tensors
        return None, None, gradient.index_select(0, tokens)


class BalancedExperts(nn.Module):
    """A device's share of a layer's experts, and of the features of each, where every expert gets as many tokens.

    Real tokens choose their experts, and experts have different numbers of them. This is their average load, in the
    order of Megatron-LM's dispatcher: tokens are sorted by expert, traded, gathered among the devices that share
    the features of experts; then all of it back. The number of an expert's tokens is rounded up. The router's weights
    go with the tokens and multiply the values between an expert's products: no returned tensor is then kept
    (Megatron-LM's `weighted_bias_swiglu_impl`).
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        gate: Callable[[Tensor], Tensor],
        region: Region[Peers],
        *,
        transposed: bool,
    ) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, weight)
        self.gate = gate
        self.region = region
        self.transposed = transposed

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(..., H), and the experts of each of its tokens and their weights (tokens, k) -> (..., H)."""
        shape, hidden = hidden.shape, hidden.reshape(-1, hidden.shape[-1])
        order = top_k_index.flatten().argsort()
        tokens = order // top_k_index.shape[-1]
        experts = len(self.get_parameter("down_proj"))
        routing = experts * self.region.form.expert, top_k_index.shape[-1]
        own = self.region.enter(self.region.trade(hidden.index_select(0, tokens), *routing).unsqueeze(0))
        count = own.shape[1]
        each = -(-count // experts)
        chosen = top_k_weights.flatten().index_select(0, order).unsqueeze(-1).to(hidden.dtype)
        shares = self.region.enter(self.region.trade(chosen, *routing).unsqueeze(0))
        rows, shares = (
            (part if each * experts == count else functional.pad(part, (0, 0, 0, each * experts - count))).view(
                experts, each, -1
            )
            for part in (own, shares)
        )
        up = "up_proj" if "up_proj" in self._parameters else "gate_up_proj"
        made = self._product(self.gate(self._product(rows, up)) * shares, "down_proj", shares)
        left = self.region.leave(made.view(1, each * experts, -1)[:, :count]).squeeze(0)
        rows = self.region.trade(left, *routing)
        summed: Tensor = _TokenSums.apply(torch.zeros_like(hidden), tokens, rows)  # type: ignore[no-untyped-call]
        return summed.view(shape)

    def _product(self, rows: Tensor, name: str, shares: Tensor | None = None) -> Tensor:
        """Every expert's rows with its weight, where rows have `shares` with that of the bias; devices that share the
        input's features add a part of it each.
        """
        weight, bias = self.get_parameter(name), self._parameters.get(f"{name}_bias")
        matrix = weight if self.transposed else weight.transpose(1, 2)
        if bias is None:
            return torch.bmm(rows, matrix)
        if shares is None:
            return torch.baddbmm(bias.unsqueeze(1), rows, matrix)
        part = bias if self.region.form.tensor == 1 else bias / self.region.form.tensor
        return torch.baddbmm(part.unsqueeze(1) * shares, rows, matrix)


class RoutedExperts(nn.Module):
    """Experts of a module that computes all tokens with all experts: here only each token's own experts compute it.

    The router's weights multiply the experts' outputs, where those of Llama 4 multiply their inputs: the number of
    operations is the same.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.router = module.router
        self.experts = module.experts
        self.shared_expert = module.shared_expert
        self.top_k = module.top_k

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(..., H) -> (tokens, H), and the router's logits (tokens, experts)."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        logits = functional.linear(tokens, self.router.weight)
        weights, chosen = torch.topk(logits, self.top_k, dim=-1)
        return self.shared_expert(tokens) + self.experts(tokens, chosen, weights.sigmoid()), logits


def gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    """(..., 2 I), gates and then values -> (..., I)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


class ShareOfPositions(nn.Module):
    """An embedding of positions: takes whole sequences, and returns the device's share of them."""

    def __init__(self, weight: nn.Parameter, region: Region[Peers]) -> None:
        super().__init__()
        self.weight = weight
        self.region = region

    def forward(self, positions: Tensor) -> Tensor:
        """(..., S) -> (..., S, width), with sequence parallelism the share of S."""
        if self.region.form.sequence_parallel:
            positions = positions.chunk(self.region.form.tensor, dim=-1)[self.region.rank]
        return functional.embedding(positions, self.weight)


class WholePositions(nn.Module):
    """A rotary embedding: takes the device's share of a sequence, and returns that of the whole sequence, which
    attention's heads see."""

    def __init__(self, rotary: nn.Module, region: Region[Peers]) -> None:
        super().__init__()
        self.rotary = rotary
        self.region = region

    def forward(self, hidden: Tensor, position_ids: Tensor, *others: Any, **named: Any) -> Any:
        """The rotary embedding's output, for positions from 0."""
        return self.rotary(hidden, self.region.positions(position_ids), *others, **named)


class VocabularyLoss:
    """Cross entropy of logits whose last dimension is the device's share of the vocabulary, in float32 or wider.

    A mean over all tokens, as losses.default_loss is. Devices exchange three numbers a token: the largest logit, the
    target's, and the sum of exponentials.
    """

    def __init__(self, region: Region[Peers]) -> None:
        self.region = region

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(..., share of vocabulary), (...) -> a scalar."""
        logits = outputs.reshape(-1, outputs.shape[-1]).to(torch.promote_types(outputs.dtype, torch.float32))
        return _CrossEntropy.apply(logits, targets.reshape(-1), self.region)  # type: ignore[no-any-return,no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    """Keeps the probabilities, which replace the logits, and where the targets are."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, region: Region[Peers]) -> Tensor:
        reduce = region.peers.reduce
        shifted = logits - reduce(logits.amax(dim=-1), largest=True).unsqueeze(-1)
        own = targets - region.rank * logits.shape[-1]
        elsewhere = (own < 0) | (own >= logits.shape[-1])
        own = own.masked_fill(elsewhere, 0).unsqueeze(-1)
        targeted = reduce(shifted.gather(-1, own).squeeze(-1).masked_fill(elsewhere, 0.0))
        exponentials = shifted.exp_()
        total = reduce(exponentials.sum(dim=-1))
        losses = total.log() - targeted
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), own, elsewhere)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        probabilities, own, elsewhere = ctx.saved_tensors
        ones = (~elsewhere).to(probabilities.dtype).unsqueeze(-1)
        return probabilities.scatter_add_(-1, own, -ones).mul_(gradient / len(own)), None, None
