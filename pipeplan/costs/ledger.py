"""Ledger: the bytes that an engine keeps of each parameter, and what it exchanges of it, by sharding.

With Adam in mixed precision, of d replicas:

    engine      none     optimizer        gradients        weights
    pipeplan    18
    megatron    18       6 + 12 / d
    deepspeed   16       4 + 12 / d       2 + 14 / d       16 / d
    fsdp                                  2 + 16 / d       16 / d

Megatron adds gradients up in float32 (its documentation of the distributed optimizer, 2023). DeepSpeed keeps them as
the weights are (Rajbhandari et al. 2020, "ZeRO", section 3.1). FSDP keeps float32 weights in shares and computes on
copies of 16 bits (Zhao et al. 2023, section 4.4). Where weights are shares, the whole ones of two blocks are there
beside them: of the block that computes, and of the next one, which is gathered ahead. In a pipeline all of a stage's
weights are whole from the first microbatch to the last, and so are their gradients (torchtitan 2024, section 2.1).
"""

from dataclasses import dataclass

from pipeplan.costs.memory import MASTER_BYTES, OPTIMIZER_COPIES
from pipeplan.documents.engines import SHARDINGS
from pipeplan.documents.profile import DTYPE_BYTES

GATHERED_BLOCKS = 2
"""Blocks whose whole weights are there at once where weights are shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Bytes of each parameter on one device. `gathered`: of a block whose weights are gathered from shares.

    `exchanged`: the bytes of a gradient on its way to other replicas; `updated`: the share of the parameters that a
    device updates.
    """

    weights: float
    gradients: float
    master_weights: float
    optimizer_states: float
    gathered: int
    exchanged: int
    updated: float

    @property
    def kept(self) -> float:
        """All that is there from start to end."""
        return self.weights + self.gradients + self.master_weights + self.optimizer_states


def ledger(engine: str, sharding: str, *, dtype: str, optimizer: str, replicas: int, pipelined: bool = False) -> Ledger:
    """What an engine keeps in this dtype with this optimizer, where so many replicas share what is sharded."""
    size, shards = DTYPE_BYTES[dtype], SHARDINGS.index(sharding)
    mixed = size < MASTER_BYTES
    state = MASTER_BYTES if mixed else size
    weights = size if engine != "fsdp" else state
    gradients = size if engine == "deepspeed" else state
    masters = state if mixed and engine != "fsdp" else 0
    states = OPTIMIZER_COPIES[optimizer] * state

    def share(amount: float, sharded: bool) -> float:
        return amount / replicas if sharded else float(amount)

    whole = pipelined and shards >= SHARDINGS.index("gradients")
    gathered = whole or (engine == "fsdp" and sharding == "gradients")  # the whole weights stay there
    return Ledger(
        weights=share(weights, shards >= 3 or engine == "fsdp") + (size if gathered else 0),
        gradients=share(gradients, shards >= 2) + (state if whole else 0),
        master_weights=share(masters, shards >= 1),
        optimizer_states=share(states, shards >= 1),
        gathered=size,
        exchanged=gradients if engine == "megatron" else size,
        updated=share(1, shards >= 1),
    )
