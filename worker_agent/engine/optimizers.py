"""Optimizers by name, as a plan names them."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from pipeplan.documents.plan import OPTIMIZERS
from pipeplan.errors import require

Item = TypeVar("Item")

BUCKET_BYTES = 2**25
"""How many bytes of float32 gradients a step creates at a time. A larger parameter forms a step alone."""

SIXTEEN_BITS = (torch.bfloat16, torch.float16)

STATES = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adam": ("step", "exp_avg", "exp_avg_sq"),
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
}
"""The states that each optimizer keeps of a weight."""

MOMENTUM = 0.9
ADAMW_DECAY = 0.01


class Optimizer:
    """A torch optimizer in its fused form, one pass over weights, gradients and states, with the defaults of torch.

    On a CPU, SGD of 16-bit weights takes one operation after the other instead: the fused kernel of torch 2.13
    does not change most of them (pytorch/pytorch#191763). "momentum" is SGD with momentum 0.9.

    States are stored by the weights' numbers in their stage, because a weight's memory may change between steps.
    They are named as in torch's classes. These import `torch._dynamo`, which takes each process
    over a second and 72 MiB; the functions behind them do not.
    """

    def __init__(self, name: str, learning_rate: float) -> None:
        """Raises InvalidInputError for a name that is not known."""
        require(name in OPTIMIZERS, "optimizer", f"must be one of {', '.join(OPTIMIZERS)}", name)
        self.name = name
        self.learning_rate = learning_rate
        self.states: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)

    @property
    def state_names(self) -> tuple[str, ...]:
        return STATES[self.name]

    @torch.no_grad()
    def step(self, weights: Mapping[int, Tensor], gradients: Mapping[int, Tensor]) -> None:
        """Updates the weights in place, by their gradients of the same type and strides. Both are by place.

        A place that has its first gradient gets its states.
        """
        updated, taken = list(weights.values()), [gradients[place] for place in weights]
        for place, weight in weights.items():
            state = self.states[place]
            if self.name == "momentum" and not state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            elif self.name != "sgd" and not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        states = [self.states[place] for place in weights]
        if self.name in ("sgd", "momentum"):
            sgd(
                updated,
                taken,
                [state.get("momentum_buffer") for state in states],
                foreach=False,
                fused=not any(weight.dtype in SIXTEEN_BITS and weight.is_cpu for weight in updated),
                weight_decay=0.0,
                momentum=MOMENTUM if self.name == "momentum" else 0.0,
                lr=self.learning_rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
        else:
            adam(
                updated,
                taken,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                decoupled_weight_decay=self.name == "adamw",
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=self.learning_rate,
                weight_decay=ADAMW_DECAY if self.name == "adamw" else 0.0,
                eps=1e-8,
                maximize=False,
            )


def in_buckets(items: Sequence[Item], size_bytes: Callable[[Item], int]) -> Iterator[Sequence[Item]]:
    """The items in order, in runs of at most BUCKET_BYTES, or of one item."""
    start = run_bytes = 0
    for index, item in enumerate(items):
        if index > start and run_bytes + size_bytes(item) > BUCKET_BYTES:
            yield items[start:index]
            start, run_bytes = index, 0
        run_bytes += size_bytes(item)
    yield items[start:]
