"""Among stages: what a worker exchanges with the other stages before an update.

Tied parameters are those that several stages hold. Each stage has a copy; the copies' gradients are summed before every
update. All copies start from the same seed and take the same update of the same sum: they stay equal bit for bit, and
the checkpoint of every stage holds its copy under the parameter's one name in the whole model.

The norm is that of the whole model's gradient, over all stages. It clips the gradient, and finds the updates that a
loss scale has made overflow.

`Late` holds numbers that the device computes and the host looks at. The host reads them some batches later, when they
have long been there: reading one at once would wait for everything that the device still has to do, and leave the
device without work after that.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeplan.documents.plan import Plan
from pipeplan.errors import RunFailedError
from pipeplan.programs.program import Program
from worker_agent.engine.replicas import total
from worker_agent.models.chain import Chain
from worker_agent.runtime.job import LossScale
from worker_agent.runtime.weights import Weights

Look = Callable[[float], None]
"""Takes a late number. It may raise."""

Stages = tuple[int, ...]
"""Stages that share parameters, in order."""

_ALMOST_NOTHING = 1e-6
"""What torch's clip_grad_norm_ adds to a norm before it divides by it."""


@dataclass(frozen=True, slots=True)
class _Number:
    batch: int
    value: Tensor
    there: torch.cuda.Event | None
    look: Look


class Late:
    """Numbers on their way to the host, read `lag` batches later.

    With a lag of 0 they are read at once: for devices on which a call returns when its work is done.
    """

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._done = 0
        self._under_way: deque[_Number] = deque()

    def add(self, value: Tensor, look: Look, *, batch: int | None = None) -> None:
        """Has `look` take a number of this batch, counted from 1; None stands for the batch at hand."""
        if self._lag == 0:
            look(float(value))
            return
        batch = self._done + 1 if batch is None else batch
        if value.device.type != "cuda":
            self._under_way.append(_Number(batch, value, None, look))
            return

        on_host = torch.empty_like(value, device="cpu", pin_memory=True)
        on_host.copy_(value, non_blocking=True)
        there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        there.record()
        self._under_way.append(_Number(batch, on_host, there, look))

    def batch_done(self, batch: int) -> None:
        """Everything of so many batches has been handed to the device: looks at what is old enough."""
        self._done = max(self._done, batch)
        while self._under_way and self._under_way[0].batch <= self._done - self._lag:
            self._look()

    def flush(self) -> None:
        """Waits for all numbers, and looks at them."""
        while self._under_way:
            self._look()

    def _look(self) -> None:
        number = self._under_way.popleft()
        if number.there is not None:
            number.there.synchronize()
        number.look(float(number.value))


def stages_of(plan: Plan, chain: Chain) -> dict[nn.Parameter, Stages]:
    """The stages that hold each trainable parameter, in order."""
    homes: dict[nn.Parameter, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        own = {p for block in chain.blocks[stage.start : stage.stop] for p in block.parameters() if p.requires_grad}
        for parameter in own:
            homes.setdefault(parameter, []).append(index)
    return {parameter: tuple(stages) for parameter, stages in homes.items()}


def tied_groups(homes: Mapping[nn.Parameter, Stages]) -> tuple[Stages, ...]:
    """The groups of stages that share parameters."""
    return tuple(sorted({stages for stages in homes.values() if len(stages) > 1}))


def open_tied_groups(program: Program, tied: Iterable[Stages], rank: int) -> dict[Stages, dist.ProcessGroup]:
    """The process groups in which a rank sums shared parameters' gradients: one replica of each of the stages.

    Every rank makes all groups, in the same order.
    """
    ranks = {(stream.stage, stream.replica): stream.rank for stream in program.streams}
    own: dict[Stages, dist.ProcessGroup] = {}
    for stages in sorted(tied):
        for replica in range(program.pipeline.replicas[stages[0]]):
            members = [ranks[stage, replica] for stage in stages]
            group = dist.new_group(members, group_desc=f"stages {stages}, replica {replica}")
            if rank in members:
                own[stages] = group
    return own


class StagesTogether:
    """The exchanges of one worker with the other stages, and what follows from them for its next update.

    `homes` are the stages that hold each weight. `groups` are this worker's process groups, by the stages that share
    weights. `counted` says of every weight whether the norm takes its gradient from here: of all replicas and stages
    that hold a weight, one counts. Gradients of a norm above `clip_norm` are scaled to it. With a `loss_scale`
    gradients are divided by it, and an update whose gradients overflowed is left out.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        homes: Sequence[Stages],
        groups: Mapping[Stages, dist.ProcessGroup],
        counted: Sequence[bool],
        clip_norm: float | None,
        loss_scale: LossScale | None,
        device: torch.device,
        late: Late,
    ) -> None:
        self._weights = weights
        self._homes = tuple(homes)
        self._groups = groups
        self._counted = tuple(counted)
        self._clip_norm = clip_norm
        self._loss_scale = loss_scale
        self._device = device
        self._late = late

    def sum_tied(self, stages: Stages) -> None:
        """Replaces the gradients of the weights that these stages share by their sums, in the order of their names."""
        gradients = self._weights.gradients()
        shared = [index for index, its in enumerate(self._homes) if its == stages]
        shared.sort(key=lambda index: self._weights.slots[index].name)
        slots = self._weights.slots
        sums = total(
            [gradients[index] for index in shared], [slots[index].parameter for index in shared], self._groups[stages]
        )
        for index, gradient in zip(shared, sums, strict=True):
            gradients[index] = gradient
        self._weights.set_gradients(gradients)

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by."""
        return self._loss_scale.scale if self._loss_scale else 1.0

    def agree_on_norm(self) -> None:
        """Scales what the next update takes by the norm of the whole model's mean gradient, or leaves the update out.

        With a loss scale the host must know whether the update is left out, and waits for the norm. Without one the
        device scales by itself; if the norm is not finite, a RunFailedError follows on all ranks.
        """
        pairs = zip(self._weights.gradients(), self._counted, strict=True)
        squares = squared_norm((g for g, counted in pairs if counted and g is not None), self._device)
        dist.all_reduce(squares)
        norm = squares.sqrt() / self.loss_scale
        if self._loss_scale is None:
            self._weights.scale_gradients(self._clipping(norm))
            self._late.add(norm, _require_finite)
        elif math.isfinite(float(norm)):
            self._weights.scale_gradients(self._clipping(norm) / self.loss_scale)
            self._loss_scale.grow()
        else:
            self._weights.skip_update()
            self._loss_scale.shrink()

    def _clipping(self, norm: Tensor) -> Tensor:
        most = 1.0 if self._clip_norm is None else self._clip_norm / (norm + _ALMOST_NOTHING)
        return torch.clamp(torch.as_tensor(most, dtype=norm.dtype, device=norm.device), max=1.0)


def _require_finite(norm: float) -> None:
    if not math.isfinite(norm):
        raise RunFailedError(f"the gradient's norm is {norm}: try a lower learning rate")


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of all squares in float64; a tensor's own norm is taken in float32 at least."""
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        at_least = torch.promote_types(gradient.dtype, torch.float32)
        squares += torch.linalg.vector_norm(gradient, dtype=at_least).double().square()
    return squares
