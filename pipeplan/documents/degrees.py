"""Degrees that are words: what is kept in the host's memory; and why each degree of a plan has its value.

Offloading keeps on the host what a device does not need all the time. `activations`: what blocks keep from forward to
backward is copied there after a block's forward, and back before its backward (Rhu et al. 2016, "vDNN").
`optimizer`: the optimizer's weights and states are there, gradients go there, and the host's processors update (Ren et
al. 2021, "ZeRO-Offload", section 4).
"""

from dataclasses import dataclass
from typing import ClassVar

from pipeplan.documents.names import STRICT

OFFLOADS = ("none", "activations", "optimizer", "both")

ANY_OFFLOAD = "any"
"""A request's word for all of them. It is also the default if nothing fits without offloading."""


def offloads_activations(offload: str) -> bool:
    """Whether activations go to the host."""
    return offload in ("activations", "both")


def offloads_optimizer(offload: str) -> bool:
    """Whether the optimizer's weights and states are on the host."""
    return offload in ("optimizer", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeChoice:
    """The chosen value of a degree, and the best plan found with another value instead.

    `throughput_samples_per_s` is that plan's, played; None if none fits, or none could be played. `reason` says
    which.
    """

    degree: str
    value: str
    instead: str
    throughput_samples_per_s: float | None
    reason: str

    __pydantic_config__: ClassVar = STRICT
