"""Learning rates: a pure function of the step, so that a resumed run goes on with the rate that it would have had."""

from collections.abc import Callable
from math import cos, pi

_DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + cos(pi * done)) / 2.0,
}
"""The share of the learning rate by how much of the decay, from 0 to 1, is done."""


def share(schedule: str, step: int, *, warmup_steps: int, decay_steps: int) -> float:
    """The share of the learning rate that the update of a step (from 0) takes.

    It rises in a straight line, (step + 1) / warmup_steps, to 1 at the last step of the warm-up; from step
    `warmup_steps` on, where it is 1 still, it decays to 0 at step `decay_steps` and stays there.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decaying = max(decay_steps - warmup_steps, 1)
    return _DECAYS[schedule](min((step - warmup_steps) / decaying, 1.0))
