"""Parameters: the bytes that an engine keeps and exchanges of every block's trained and frozen parameters."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.costs.ledger import Ledger
from pipeplan.documents.forms import BlockKind, ModelForm
from pipeplan.documents.profile import DTYPE_BYTES, PRECISIONS, Profile

Entry = Callable[[Ledger], float]
"""Reads one of a ledger's fields."""


def by_block(model: ModelForm, count: Callable[[BlockKind], float]) -> FloatArray:
    """A number for every block, from its kind."""
    return np.asarray([count(kind) for kind in model.kinds], dtype=np.float64)[list(model.blocks)]


def narrow_weights(model: ModelForm, profile: Profile, *, alone: bool, kept: bool) -> tuple[FloatArray, FloatArray]:
    """By block, the additional bytes of a weight in the profile's precision, and the bytes that replicas gather of it.

    The forward's products read rows, the backward's columns: where an engine keeps them (`kept`), both exist from one
    update to the next, in addition to the weight in the profile's dtype or `alone`. Replicas gather rows; where 32
    elements share a scale, columns do not follow from rows, and replicas gather the dtype's. The first and the last
    block compute in the profile's dtype.
    """
    wide, precision = DTYPE_BYTES[profile.dtype], profile.precision
    narrow = PRECISIONS[precision] if precision and kept else 0.0
    more = 2 * narrow - (wide if alone else 0) if narrow else 0.0
    gathered = narrow if narrow and alone and precision != "mxfp8" else float(wide)
    outer = {model.blocks[0], model.blocks[-1]} - set(model.blocks[1:-1])
    return (
        np.asarray([0.0 if kind in outer else more for kind in model.blocks]),
        np.asarray([wide if kind in outer else gathered for kind in model.blocks], dtype=np.float64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class BlockParameters:
    """Every block's parameters, trained or frozen: those outside experts, and its experts', each with their ledger.

    Experts have fewer replicas. With `pipelined` those outside experts count copies of another stage's.
    """

    outside: FloatArray
    experts: FloatArray
    ledger: Ledger
    expert_ledger: Ledger

    @staticmethod
    def of(
        model: ModelForm, ledgers: Callable[[bool], tuple[Ledger, Ledger]], *, pipelined: bool
    ) -> "tuple[BlockParameters, BlockParameters]":
        """The trained and the frozen parameters; `ledgers` gives both ledgers of each."""

        def of_all(kind: BlockKind) -> int:
            return kind.parameters + (kind.tied_parameters if pipelined else 0)

        def of_frozen(kind: BlockKind) -> int:
            return kind.frozen_parameters + (kind.frozen_tied_parameters if pipelined else 0)

        frozen, frozen_experts = by_block(model, of_frozen), by_block(model, lambda kind: kind.frozen_expert_parameters)
        outside, experts = by_block(model, of_all), by_block(model, lambda kind: kind.expert_parameters)
        trained = BlockParameters(outside - frozen, experts - frozen_experts, *ledgers(True))
        return trained, BlockParameters(frozen, frozen_experts, *ledgers(False))

    @property
    def every(self) -> FloatArray:
        """All of them."""
        return np.asarray(self.outside + self.experts)

    def amount(self, entry: Entry) -> FloatArray:
        """An entry of the ledgers for all of them."""
        return np.asarray(self.outside * entry(self.ledger) + self.experts * entry(self.expert_ledger))
