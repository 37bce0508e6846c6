"""Training: the options of a run besides its plan, its model and its data. The command, jobs and ranks all use them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import cos, pi
from typing import ClassVar

from pipeplan.documents.names import STRICT
from pipeplan.documents.profile import AUTOCASTS
from pipeplan.errors import require, require_amount, require_count, require_one_of

LEARNING_RATES = ("constant", "linear", "cosine")
"""How a learning rate decays after its warm-up."""

_DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + cos(pi * done)) / 2.0,
}
"""The share of the learning rate, by the progress of the decay from 0 to 1."""

DEFAULT_RATES: Mapping[str, float] = {"sgd": 0.1, "momentum": 0.01, "adam": 0.001, "adamw": 0.001}
"""The default learning rate of each optimizer.

Adam's is its authors' (Kingma and Ba 2015, algorithm 1), which AdamW shares. A momentum of 0.9 moves ten times as far
as plain SGD in the long run, and has a tenth of its rate.
"""

DESCRIBED_RATES = ", ".join(f"{rate:g} for {name}" for name, rate in DEFAULT_RATES.items())
"""The same in words."""

FIRST_LOSS_SCALE = 2.0**16
"""Where the loss scale of float16 begins, as that of torch's GradScaler."""

BATCH_NORMS = ("microbatch", "minibatch")
"""The units over which running statistics may be taken."""


def require_planned_autocast(asked: str | None, planned: str | None) -> None:
    """Raises InvalidInputError for another autocast than the one that the plan's profile was measured under."""
    rule = f"must be the plan's, {planned}, or be left out: its profile was measured under that"
    require(asked is None or planned in (None, asked), "autocast", rule, asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionChange:
    """An option that a resumed run has changed after `step` steps; both values as JSON texts."""

    step: int
    option: str
    old: str
    new: str

    __pydantic_config__: ClassVar = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """How a plan is trained.

    - `loss` names a function; None is the model's own.
    - `learning_rate` is the largest one, by default the optimizer's in `DEFAULT_RATES`. It rises in `warmup_steps`, and
      `lr_schedule` says how it decays from there to step `decay_steps` (None: the last).
    - `clip_norm` is the largest norm that the whole model's mean gradient may have.
    - `batch_norm` says what running statistics are of, by default GPipe's "minibatch" for it and "microbatch" for
      others.
    - With `autocast` the blocks of a float32 plan compute in that type, by default in the plan's own.
    - `loss_scale` is where a dynamic scale of the loss begins, by default torch's own for float16, and none for others.
    - `checkpoint_every`: the number of steps from one checkpoint to the next; 0: never.
    - `concatenate`: with a split backward (2BP), weight gradients of several microbatches are computed as one product.
    """

    loss: str | None = None
    seed: int = 0
    learning_rate: float | None = None
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    clip_norm: float | None = None
    batch_norm: str | None = None
    autocast: str | None = None
    loss_scale: float | None = None
    checkpoint_every: int = 0
    concatenate: bool = False

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_count("seed", self.seed, at_least=0)
        require_count("warmup_steps", self.warmup_steps, at_least=0)
        require_count("checkpoint_every", self.checkpoint_every, at_least=0)
        if self.decay_steps is not None:
            require_count("decay_steps", self.decay_steps)
        for field in ("learning_rate", "clip_norm", "loss_scale"):
            if getattr(self, field) is not None:
                require_amount(field, getattr(self, field), positive=True)
        for field, names in (("lr_schedule", LEARNING_RATES), ("batch_norm", BATCH_NORMS), ("autocast", AUTOCASTS)):
            if getattr(self, field) is not None:
                require_one_of(names, field, getattr(self, field))


def share(schedule: str, step: int, *, warmup_steps: int, decay_steps: int) -> float:
    """The share of the learning rate that the update of a step (from 0) takes.

    It rises in a straight line, (step + 1) / warmup_steps, to 1 at the last step of the warm-up; from step
    `warmup_steps` on, where it is 1 still, it decays to 0 at step `decay_steps` and stays there. It follows from
    the step alone, and a resumed run continues with the rate that it would have had.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decaying = max(decay_steps - warmup_steps, 1)
    return _DECAYS[schedule](min((step - warmup_steps) / decaying, 1.0))
