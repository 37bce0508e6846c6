"""Executor: the one loop over a stream's instructions. It knows no schedule: the stream alone sets the order."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan.errors import ScheduleError
from pipeplan.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Checkpoint,
    Forward,
    Instruction,
    Recompute,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    ReduceNorm,
    ReduceTied,
    SendActivation,
    SendGradient,
    StartReduce,
    Update,
    is_transfer,
)
from pipeplan.programs.program import Stream
from pipeplan.programs.repeating import retirements
from worker_agent.engine.casts import keeping_casts
from worker_agent.engine.replicas import Replicas
from worker_agent.engine.weights import Weights
from worker_agent.models.values import carries_gradient
from worker_agent.runtime.among_stages import StagesTogether
from worker_agent.runtime.mail import Mail
from worker_agent.runtime.recorder import Recorder
from worker_agent.runtime.stage import StageBlocks
from worker_agent.runtime.stage_by_block import StageByBlock
from worker_agent.runtime.stage_memory import Tensors, most_known, total_known

Feed = Callable[[int], Any]
"""A microbatch's inputs, or its targets, by its number; the first and the last stage have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The executor's observer: called at every instruction, after an update with its loss, and for a checkpoint."""

    on_instruction: Callable[[int, Instruction], None]
    on_update: Callable[[int, Tensor | None], None]
    on_checkpoint: Callable[[Checkpoint], None]


@dataclass(kw_only=True, eq=False)
class Executor:
    """Executes the stream of one stage. Between instructions all state is in the stage, the weights and the mail.

    The first stage has `inputs`, the last one `targets`, a stage with several replicas `replicas`, and a stream with
    exchanges among stages `among_stages`. `update_microbatches` is the number of microbatches whose mean gradient makes
    an update on this worker. Without `input_gradients` no block before the stage is trained: it returns no gradients.
    `untrained_bytes` are those of its frozen weights and buffers, None where not all can be counted.
    """

    stream: Stream
    stage: StageBlocks | StageByBlock
    weights: Weights
    mail: Mail
    replicas: dist.ProcessGroup | None
    recorder: Recorder
    hooks: Hooks
    inputs: Feed | None
    targets: Feed | None
    update_microbatches: int
    among_stages: StagesTogether | None = None
    input_gradients: bool = True
    untrained_bytes: int | None = 0

    def __post_init__(self) -> None:
        self._replicas = (
            Replicas(self.replicas, [slot.parameter for slot in self.weights.slots]) if self.replicas else None
        )
        self._completes: StartReduce | None = None
        self._exchanged: dict[int, list[Tensor]] = {}
        self._gathers = False
        self._early = False
        self._early_bytes: int | None = None
        self._received: dict[int, Tensors] = {}
        self._gradients: dict[int, Tensors] = {}
        self._outgoing: dict[int, Tensors] = {}
        self._outgoing_gradients: dict[int, Tensors] = {}
        self._losses: list[Tensor] = []
        self._most_bytes: int | None = 0
        self._retiring = retirements(self.stream.instructions)
        self._before: Executor | None = None
        self._after: Executor | None = None

    def hand_to(self, after: "Executor") -> None:
        """Connects the next stage, which is on this rank too: they pass tensors on directly, without a send."""
        self._after, after._before = after, self

    def go_on_with(self, instructions: Sequence[Instruction]) -> None:
        """From now on its instructions are these, instead of the rest of its stream."""
        self._retiring = retirements(instructions)

    def run(self) -> None:
        """Executes the whole stream, and waits until everything that it sends has arrived."""
        run_together([self], self.stream.instructions)
        self.mail.flush()

    def step(self, instruction: Instruction) -> None:  # noqa: C901 (one case an instruction)
        """Executes this instruction, the next one of its stream."""
        retired = next(self._retiring)
        match instruction:
            case Forward(microbatch=k, version=version):
                self.weights.use(version)
                self._forward(k)
            case Recompute(microbatch=k, version=version):
                self.weights.use(version)
                self.stage.recompute_forward(k)
            case Backward(microbatch=k, version=version) | BackwardInput(microbatch=k, version=version):
                self.weights.use(version)  # blocks may run forwards again: all of them, or those that checkpoint
                self.weights.grade(version)
                self._backward(k, split=isinstance(instruction, BackwardInput))
            case BackwardWeight(microbatches=numbers, version=version):
                self.weights.grade(version)
                self._backward_weight(numbers)
            case SendActivation(microbatch=k, peer=peer):
                self.mail.send_activation(k, peer, self._outgoing.pop(k))
            case RecvActivation(microbatch=k, peer=peer):
                self._received[k] = self.mail.receive_activation(k, peer)
            case SendGradient(microbatch=k, peer=peer):
                self.mail.send_gradient(peer, self._outgoing_gradients.pop(k))
            case RecvGradient(microbatch=k, peer=peer):
                self._gradients[k] = self.mail.receive_gradient(k, peer)
            case StartReduce(version=version, source=source):
                if source in (None, self.stream.rank):
                    self._completes = instruction
                else:
                    self._among_replicas.expect(version, source)
                    self._exchanged[version] = []
            case ReduceGradients():
                self._reduce(instruction)
            case ReduceTied(stages=stages):
                self._among_other_stages.sum_tied(stages)
            case ReduceNorm():
                self._among_other_stages.agree_on_norm()
            case Update(version=version):
                self.stage.end_minibatch()
                self.weights.update(version, keep_base=version - 1 not in retired)
                self.stage.weights_changed()
                self.hooks.on_update(version, self._take_loss(version))
            case Checkpoint():
                self.hooks.on_checkpoint(instruction)
            case _:
                assert_never(instruction)
        if self.stage.runs_forward_in_backward and isinstance(instruction, Backward):
            self._most_bytes = self._held_now()  # before the version that it used is gone
        for version in retired:
            self.weights.retire(version, keep=not self._exchanged and not isinstance(instruction, Checkpoint))

    def _forward(self, k: int) -> None:
        if self.inputs is None:
            graded = self.input_gradients
            inputs = tuple(t.detach().requires_grad_(graded and carries_gradient(t)) for t in self._received.pop(k))
        else:
            fed = self.inputs(k)
            inputs = fed if isinstance(fed, tuple) else (fed,)
        outputs = self.stage.forward(k, inputs, self.targets(k) if self.targets else None)
        if self.stage.criterion is not None:
            self._losses.append(outputs[0])
        elif self._after is None:
            self._outgoing[k] = outputs
        else:  # a copy, as a channel makes one: blocks may change their inputs in place
            self._after._received[k] = tuple(t.clone(memory_format=torch.contiguous_format) for t in outputs)

    def _backward(self, k: int, *, split: bool) -> None:
        """The stage's backward. If it completes the gradients of an exchange, it also begins the exchange."""
        if self.stage.criterion is None:
            gradients: Tensors = tuple(self._gradients.pop(k))
        else:
            loss_scale = self.among_stages.loss_scale if self.among_stages else 1.0
            gradients = (torch.full_like(self._losses[-1], loss_scale / self.update_microbatches),)

        started, self._completes = self._completes, None
        if started is None:
            self._early = split and (self._early or not self._gathers)
            self._gathers = True
            to_inputs = self.stage.backward(k, gradients)
        else:
            with self._among_replicas.exchanging(started.version, self.weights.graded, started.source):
                to_inputs = self.stage.backward(k, gradients)
            self._note_exchanged(started.version)

        if self._before is not None:
            self._before._gradients[k] = to_inputs
        elif self.inputs is None:
            self._outgoing_gradients[k] = to_inputs
        self.mail.release(k, kept=self.stage.kept_storages(k))

    def _backward_weight(self, microbatches: Sequence[int]) -> None:
        started, self._completes = self._completes, None
        if started is None:
            self._gathers, self._early = True, False
            self.stage.backward_weight(microbatches)
        else:
            waiting = self.stage.waiting(microbatches)
            with self._among_replicas.adding(started.version, self.weights.graded, waiting) as added:
                self.stage.backward_weight(microbatches, added)
            self._note_exchanged(started.version)
        for k in microbatches:
            self.mail.release(k)

    def _note_exchanged(self, version: int) -> None:
        """The exchange of a version's gradients has begun: later gradients are for the next version."""
        self._exchanged[version], self._losses = self._losses, []
        self._gathers = self._early = False

    def _reduce(self, exchange: ReduceGradients) -> None:
        replicas = self._among_replicas
        if self.stage.statistics:
            self.stage.statistics.merge(replicas.group)
        if not replicas.is_under_way(exchange.version):
            replicas.give(exchange.version, self.weights.graded, exchange.source)
        self.weights.set_gradients(replicas.gradients(exchange.version, own=exchange.source == self.stream.rank))

    @property
    def _among_replicas(self) -> Replicas:
        if self._replicas is None:
            raise ScheduleError("a gradient exchange on a stage without replicas")
        return self._replicas

    @property
    def _among_other_stages(self) -> StagesTogether:
        if self.among_stages is None:
            raise ScheduleError("an exchange among stages without its parts")
        return self.among_stages

    def _take_loss(self, version: int) -> Tensor | None:
        """The mean loss of the microbatches whose gradients made the version."""
        losses = self._exchanged.pop(version, None)
        if losses is None:
            losses, self._losses = self._losses, []
            self._gathers = self._early = False
        return torch.stack(losses).mean() if losses else None

    def held_bytes(self) -> int | None:
        """Bytes of weight versions, gradients and optimizer states, of frozen weights and buffers, and of the tensors
        that microbatches keep.

        A microbatch keeps everything, only its input, or the tensors for p2, the second half of a split backward
        (`BackwardWeight`). None where not all can be counted. After a backward by block the result is the peak during
        that backward. The caller reads it after every instruction except transfers.
        """
        most_bytes, self._most_bytes = self._most_bytes, 0
        return most_known((most_bytes, self._held_now()))

    def _held_now(self) -> int | None:
        weights = self.weights
        sets = len(self._exchanged) + self._gathers
        further = max(sets - 1, 0)  # in the exchange they have the weights' dtypes
        own_bytes = weights.gradient_bytes
        if self._early:  # p1 has made these gradients, and p2 none; they are counted once
            if self._early_bytes is None:
                made = [leaf.grad for leaf in weights.graded]
                self._early_bytes = sum(gradient.nbytes for gradient in made if gradient is not None)
            own_bytes = self._early_bytes
        gradients = min(sets, 1) * own_bytes + further * weights.version_bytes
        fixed = gradients + weights.master_bytes + weights.optimizer_bytes
        return total_known((fixed, weights.live_bytes, self.untrained_bytes, self.stage.memory.held_bytes()))


def run_together(executors: Sequence[Executor], instructions: Iterable[Instruction]) -> None:
    """Executes a rank's whole stream: the loop. Each instruction is for the executor of its chunk.

    When it returns, the last messages may still be in transit: `Mail.flush` waits for them.
    """
    hooks, recorder = executors[0].hooks, executors[0].recorder
    held_bytes: int | None = 0
    with keeping_casts() if any(executor.stage.autocasts for executor in executors) else nullcontext():
        for index, instruction in enumerate(instructions):
            hooks.on_instruction(index, instruction)
            recorder.begin()
            executors[instruction.chunk].step(instruction)
            if index == 0 or not is_transfer(instruction):  # a transfer does not change the bytes
                held_bytes = total_known(executor.held_bytes() for executor in executors)
            recorder.end(instruction, held_bytes)
