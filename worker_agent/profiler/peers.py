"""Peers: the other devices of a form, represented by the shapes of the tensors that they would send.

Every exchange is noted, and gives tensors without contents. A tensor that is gathered for column-parallel layers or for
attention is not kept from forward to backward: a device keeps its own share, and gathers again (Korthikanti et al.
2022, section 4.2.2).
"""

import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeplan.documents.forms import Collective, Form, Routing
from worker_agent.profiler.block_memory import KeptStorages, storage_identity


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatheredAgain:
    """A graph's record of a gathered tensor, or of a view of one: the device's share, and the layout of the view."""

    share: Tensor
    whole_shape: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    in_ring: bool


class RecordedPeers:
    """Notes a device's exchanges in this form. `groups` of experts are equal, and tokens choose some of them."""

    def __init__(self, form: Form, *, groups: tuple[int, int] = (1, 1)) -> None:
        self.form = form
        self._groups = groups
        self._noted: list[Collective] = []
        self._shares: dict[int, tuple[weakref.ref[torch.UntypedStorage], Tensor, tuple[int, ...], bool]] = {}
        self._again: tuple[Tensor, Tensor] | None = None

    def take(self) -> tuple[Collective, ...]:
        """The collectives since the last call; equal ones are one with their number."""
        counts, self._noted, self._again = Counter(self._noted), [], None
        return tuple(replace(each, count=count) for each, count in counts.items())

    def gather(self, share: Tensor) -> Tensor:
        """The whole sequence."""
        whole = share.new_empty(_longer(share, share.dim() - 2, self.form.tensor))
        self._note("all-gather", "tensor", whole.nbytes)
        self._remember(whole, share, in_ring=False)
        return whole

    def scatter(self, whole: Tensor) -> Tensor:
        """A share of the sequence."""
        self._note("reduce-scatter", "tensor", whole.nbytes)
        return whole.new_empty((*whole.shape[:-2], whole.shape[-2] // self.form.tensor, whole.shape[-1]))

    def reduce(self, value: Tensor, *, largest: bool = False) -> Tensor:
        """The value, overwritten."""
        self._note("all-reduce", "tensor", value.nbytes)
        return value

    def trade(self, rows: Tensor, experts: int, chosen: int) -> Tensor:
        """As many rows."""
        groups, chosen_groups = self._groups
        routing = Routing(experts=experts, chosen=chosen, groups=groups, chosen_groups=chosen_groups)
        self._noted.append(Collective(kind="all-to-all", axis="expert", size_bytes=rows.nbytes, routing=routing))
        return torch.empty_like(rows)

    def ring(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole sequence: those of all other devices pass by."""
        wholes = tuple(each.new_empty(_longer(each, 2, self.form.context)) for each in (key, value))
        self._note("ring", "context", sum(w.nbytes for w in wholes) - key.nbytes - value.nbytes)
        self._remember(wholes[0], key, in_ring=True)
        self._remember(wholes[1], value, in_ring=True)
        return wholes[0], wholes[1]

    def ring_back(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values pass by once more, and their gradients with them."""
        whole_bytes = key.nbytes + value.nbytes
        self._note("ring", "context", 2 * (whole_bytes - whole_bytes // self.form.context))
        length = key.shape[2] // self.form.context
        shares = [each.new_empty((*each.shape[:2], length, *each.shape[3:])) for each in (key, value)]
        return shares[0], shares[1]

    def pack(self, tensor: Tensor, kept: KeptStorages) -> Any:
        """The form in which a graph saves a tensor; `kept` counts its bytes."""
        found = self._shares.get(storage_identity(tensor))
        if found is None:
            return kept.pack(tensor)
        _, share, whole_shape, in_ring = found
        return GatheredAgain(
            share=kept.pack(share),
            whole_shape=whole_shape,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            in_ring=in_ring,
        )

    def unpack(self, packed: Any) -> Tensor:
        """The tensor that was saved. Consecutive requests for one gathered tensor gather it once."""
        if not isinstance(packed, GatheredAgain):
            return packed  # type: ignore[no-any-return]
        share, again = packed.share, self._again
        if again is None or _place(again[0]) != _place(share):
            again = share, share.new_empty(packed.whole_shape)
            self._again = None if packed.in_ring else again
            if not packed.in_ring:  # the backward's ring brings keys and values
                self._note("all-gather", "tensor", again[1].nbytes)
        return again[1].as_strided(packed.shape, packed.stride, packed.offset)

    def _note(self, kind: str, axis: str, size_bytes: int) -> None:
        self._noted.append(Collective(kind=kind, axis=axis, size_bytes=size_bytes))

    def _remember(self, whole: Tensor, share: Tensor, *, in_ring: bool) -> None:
        """Remembers the share of a gathered tensor while that tensor lives."""
        identity, storage = storage_identity(whole), whole.untyped_storage()
        reference = weakref.ref(storage, lambda _: self._shares.pop(identity, None))
        self._shares[identity] = reference, share.detach(), tuple(whole.shape), in_ring


def _longer(share: Tensor, dim: int, times: int) -> tuple[int, ...]:
    return (*share.shape[:dim], times * share.shape[dim], *share.shape[dim + 1 :])


def _place(tensor: Tensor) -> tuple[object, ...]:
    return storage_identity(tensor), tensor.storage_offset(), tuple(tensor.shape)
