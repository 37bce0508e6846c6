"""Among stages: a rank's exchanges with the other stages before an update, once for all of its own stages.

Tied parameters are parameters of several stages. Each stage has a copy, and the gradients of the copies are
summed before every update. All copies start from the same seed and take the same update of the same sum, so they stay
equal bit for bit. The checkpoint of every stage holds its copy under the parameter's one name in the whole model.

The norm is that of the whole model's gradient, over all stages. It serves to clip the gradient, and to find updates
that overflowed under a loss scale.

`Late` holds numbers that the device computes and the host reads some batches later, when they are ready. To read one at
once, the host would have to wait until the device is idle.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeplan.documents.plan import Plan
from pipeplan.programs.program import Program
from worker_agent.engine.devices import let_gloo_wait
from worker_agent.engine.replicas import total
from worker_agent.engine.results import DivergedError
from worker_agent.engine.weights import Weights
from worker_agent.models.chain import Chain
from worker_agent.runtime.job import LossScale

Look = Callable[[float], None]
"""Takes a late number. It may raise."""

Stages = tuple[int, ...]
"""Stages that share parameters, in order."""

_ALMOST_NOTHING = 1e-6
"""The constant that torch's clip_grad_norm_ adds to a norm before it divides by it."""


@dataclass(frozen=True, slots=True)
class _Number:
    batch: int
    value: Tensor
    there: torch.cuda.Event | None
    look: Look


class Late:
    """Numbers in transit to the host, which reads them `lag` batches later.

    A lag of 0 reads them at once: it is for devices on which a call returns when its work is done.
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
        """This many batches have been handed to the device: looks at the numbers that are old enough."""
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


TiedGroups = Mapping[Stages, dist.ProcessGroup]
"""The groups of a rank in which stages that share weights meet."""


def open_tied_groups(program: Program, tied: Iterable[Stages], rank: int) -> TiedGroups:
    """The process groups in which a rank sums the gradients of shared parameters. A group has one replica of each
    stage.

    Every rank makes all groups, in the same order. Stages that are all on one rank need no group.
    """
    pipeline = program.pipeline
    ranks = {(stream.stage, stream.replica): stream.rank for stream in program.streams}
    own: dict[Stages, dist.ProcessGroup] = {}
    for stages in sorted(tied):
        for replica in range(pipeline.replicas[stages[0]]):
            members = sorted({ranks[pipeline.place_of(stage)[0], replica] for stage in stages})
            if len(members) == 1:
                continue
            group = dist.new_group(members, group_desc=f"stages {stages}, replica {replica}")
            if rank in members:
                own[stages] = group
    if own and dist.get_backend() == "gloo":
        let_gloo_wait()
    return own


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One stage of a rank: its weights, the stages that hold each weight, and whether the norm counts the weight here.

    Of all replicas and stages that hold a weight, the norm counts the gradient of one.
    """

    weights: Weights
    homes: Sequence[Stages]
    counted: Sequence[bool]


class StagesTogether:
    """The exchanges of a rank with the other stages, and their effect on the next update of its own stages.

    `groups` are this rank's process groups, by the stages that share weights. Gradients of a norm above `clip_norm` are
    scaled to it. With a `loss_scale` gradients are divided by it, and an update whose gradients overflowed is left out.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        groups: Mapping[Stages, dist.ProcessGroup],
        clip_norm: float | None,
        loss_scale: LossScale | None,
        device: torch.device,
        late: Late,
    ) -> None:
        self._parts = tuple(parts)
        self._groups = groups
        self._clip_norm = clip_norm
        self._loss_scale = loss_scale
        self._device = device
        self._late = late

    def sum_tied(self, stages: Stages) -> None:
        """Replaces the gradients of the weights that these stages share by their sums, in the order of their names.

        The copies of this rank are summed first, then those of all ranks.
        """
        gradients = [part.weights.gradients() for part in self._parts]
        copies: dict[str, list[tuple[int, int]]] = {}
        for number, part in enumerate(self._parts):
            for place, (slot, its) in enumerate(zip(part.weights.slots, part.homes, strict=True)):
                if its == stages:
                    copies.setdefault(slot.name, []).append((number, place))

        names = sorted(copies)
        each = [[gradients[number][place] for number, place in copies[name]] for name in names]
        there = [[gradient for gradient in of_name if gradient is not None] for of_name in each]
        sums = [reduce(torch.add, of_name) if of_name else None for of_name in there]
        if stages in self._groups:
            first = [copies[name][0] for name in names]
            shapes = [self._parts[number].weights.slots[place].parameter for number, place in first]
            sums = total(sums, shapes, self._groups[stages])
        for name, gradient in zip(names, sums, strict=True):
            for number, place in copies[name]:  # each in memory of its own: updates scale gradients in place
                gradients[number][place] = gradient
                gradient = None if gradient is None else gradient.clone()
        for part, own in zip(self._parts, gradients, strict=True):
            part.weights.set_gradients(own)

    @property
    def loss_scale(self) -> float:
        return self._loss_scale.scale if self._loss_scale else 1.0

    def agree_on_norm(self) -> None:
        """Scales the gradients of the next updates by the norm of the whole model's mean gradient, or leaves the
        updates out.

        With a loss scale the host must know whether the update is left out, so it waits for the norm. Without one the
        device scales by itself. If the norm is not finite, a DivergedError follows on all ranks.
        """
        pairs = (pair for part in self._parts for pair in zip(part.weights.gradients(), part.counted, strict=True))
        squares = squared_norm((g for g, counted in pairs if counted and g is not None), self._device)
        dist.all_reduce(squares)
        norm = squares.sqrt() / self.loss_scale
        if self._loss_scale is None:
            self._scale(self._clipping(norm))
            self._late.add(norm, _require_finite)
        elif math.isfinite(float(norm)):
            self._scale(self._clipping(norm) / self.loss_scale)
            self._loss_scale.grow()
        else:
            for part in self._parts:
                part.weights.skip_update()
            self._loss_scale.shrink()

    def _scale(self, factor: Tensor) -> None:
        for part in self._parts:
            part.weights.scale_gradients(factor)

    def _clipping(self, norm: Tensor) -> Tensor:
        most = 1.0 if self._clip_norm is None else self._clip_norm / (norm + _ALMOST_NOTHING)
        return torch.clamp(torch.as_tensor(most, dtype=norm.dtype, device=norm.device), max=1.0)


def _require_finite(norm: float) -> None:
    if not math.isfinite(norm):
        raise DivergedError(f"the gradient's norm is {norm}: try a lower learning rate")


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of all squares in float64; each tensor's norm is computed in float32 or wider."""
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        at_least = torch.promote_types(gradient.dtype, torch.float32)
        squares += torch.linalg.vector_norm(gradient, dtype=at_least).double().square()
    return squares
