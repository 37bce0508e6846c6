"""Ledger: the bytes that an engine keeps and exchanges of each parameter, by sharding.

With Adam in mixed precision and d replicas:

    engine      none     optimizer        gradients        weights
    pipeplan    18
    megatron    18       6 + 12 / d
    deepspeed   16       4 + 12 / d       2 + 14 / d       16 / d
    fsdp                                  2 + 16 / d       16 / d

Megatron adds gradients up in float32 (its documentation of the distributed optimizer, 2023). DeepSpeed keeps them as
the weights are (Rajbhandari et al. 2020, "ZeRO", section 3.1). With ZeRO-1 on the devices its optimizer for bfloat16
also sums them in float32 and exchanges the sums: 4 bytes more (`BF16_Optimizer`; `runtime/engine.py` of 0.19 refuses
these sums without ZeRO-1). FSDP keeps float32 weights in shares and computes on copies of 16 bits (Zhao et al. 2023,
section 4.4). A device that keeps shares of the weights also holds the whole weights of two blocks: the block that
computes, and the next one, which is gathered ahead. In a pipeline all of a stage's weights are whole from the first
microbatch to the last, and so are their gradients (torchtitan 2024, section 2.1).

With the optimizer on the host, the host holds a share of the weights as a float32 copy, with its gradients and its
states: 16 / d with Adam. The device of a single stage keeps:

    megatron            6
    deepspeed           4                2                2 / d
    fsdp                                 2                0

An engine keeps only the weights of a frozen parameter; it shares and gathers them as it does all others.
"""

from dataclasses import dataclass, replace

from pipeplan.costs.memory import MASTER_BYTES, OPTIMIZER_COPIES
from pipeplan.documents.degrees import offloads_optimizer
from pipeplan.documents.engines import SHARDINGS
from pipeplan.documents.profile import DTYPE_BYTES

GATHERED_BLOCKS = 2
"""Blocks whose whole weights are on a device at once if weights are sharded."""


def sums_in_float32(dtype: str, sharding: str) -> bool:
    """Whether DeepSpeed sums gradients in separate float32 buffers, where the optimizer is on the devices."""
    return dtype == "bfloat16" and sharding == "optimizer"


def keeps_narrow_alone(sharding: str, offload: str) -> bool:
    """Whether Megatron-LM keeps weights only in a narrow precision: with its distributed optimizer on the devices
    (`--fp8-param-gather`, `arguments.py` of core 0.15).
    """
    return sharding == "optimizer" and not offloads_optimizer(offload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Bytes of each parameter on one device. `gathered`: of a block whose weights are gathered from shares.

    `exchanged`: the bytes of a gradient on its way to other replicas; `updated`: the share of the parameters that a
    device updates.
    The other fields describe an optimizer on the host. `host` are the bytes of a parameter in the host's memory. The
    link carries `gradient_down` with every backward, `weights_up` before every gather, and `update_link` with an
    update. The update reads and writes `update_host` of the host's memory (0: the device updates).
    """

    weights: float
    gradients: float
    master_weights: float
    optimizer_states: float
    gathered: int
    exchanged: int
    updated: float
    host: float = 0.0
    gradient_down: float = 0.0
    weights_up: float = 0.0
    update_link: float = 0.0
    update_host: float = 0.0

    @property
    def kept(self) -> float:
        """All bytes that stay for the whole run."""
        return self.weights + self.gradients + self.master_weights + self.optimizer_states


def ledger(
    engine: str,
    sharding: str,
    *,
    dtype: str,
    optimizer: str,
    replicas: int,
    pipelined: bool = False,
    optimizer_on_host: bool = False,
    trained: bool = True,
) -> Ledger:
    """The ledger of an engine in this dtype with this optimizer, if this many replicas share the sharded states.

    Without `trained` it is that of a frozen parameter.
    """
    size, shards = DTYPE_BYTES[dtype], SHARDINGS.index(sharding)
    mixed = size < MASTER_BYTES
    state = MASTER_BYTES if mixed else size
    weights = size if engine != "fsdp" else state
    summed = engine == "deepspeed" and sums_in_float32(dtype, sharding) and not optimizer_on_host
    gradients = size + state if summed else size if engine == "deepspeed" else state
    masters = state if mixed and engine != "fsdp" else 0
    states = OPTIMIZER_COPIES[optimizer] * state

    def share(amount: float, sharded: bool) -> float:
        return amount / replicas if sharded else float(amount)

    whole = pipelined and shards >= SHARDINGS.index("gradients")
    gathered = whole or (engine == "fsdp" and sharding == "gradients")  # the whole weights stay there
    kept = Ledger(
        weights=share(weights, shards >= 3 or engine == "fsdp") + (size if gathered else 0),
        gradients=share(gradients, shards >= 2) + (state if whole else 0),
        master_weights=share(masters, shards >= 1),
        optimizer_states=share(states, shards >= 1),
        gathered=size,
        exchanged=state if engine == "megatron" or summed else size,
        updated=share(1, shards >= 1),
    )
    known = kept
    if optimizer_on_host:
        known = _on_host(kept, engine, shards, gradients=gradients, state=state, states=states, whole=whole)
    if trained:
        return known
    return Ledger(
        weights=known.weights,
        gradients=0.0,
        master_weights=0.0,
        optimizer_states=0.0,
        gathered=size,
        exchanged=0,
        updated=0.0,
        host=kept.updated * state if optimizer_on_host and engine == "fsdp" else 0.0,
        weights_up=known.weights_up,
    )


def _on_host(kept: Ledger, engine: str, shards: int, *, gradients: int, state: int, states: int, whole: bool) -> Ledger:
    """The same with the optimizer on the host (Ren et al. 2021, section 4), and for FSDP also the weights' shares.

    Sharded gradients leave with every backward; gradients that are `whole` on the device are reduced first, and leave
    with the update. Adam reads a gradient, and reads and writes the weight and its states (section 5.1).
    """
    part, with_backward, fsdp = kept.updated, shards >= 2 and not whole, engine == "fsdp"
    weights_up, again = (state, shards >= 3 and not whole) if fsdp else (kept.gathered, False)
    left = float(state) if whole else kept.gradients
    return replace(
        kept,
        weights=kept.weights - part * state if fsdp else kept.weights,
        gradients=0.0 if with_backward else left,
        master_weights=0.0,
        optimizer_states=0.0,
        host=part * (2 * state + states),
        gradient_down=part * gradients if with_backward else 0.0,
        weights_up=part * weights_up if again else 0.0,
        update_link=part * ((0 if with_backward else gradients) + (0 if again else weights_up)),
        update_host=part * (state + 2 * (state + states) + (0 if fsdp else kept.gathered)),
    )
