"""Estimates: plans for a model without a profile. An agent estimates it by a datasheet, and then a planner plans.

    ModelPlanRequest ──service──▶ EstimateTask ──agent──▶ EstimateResult ──service──▶ PlanTask(PlanRequest)

The command line estimates with the same microbatches, by the same datasheets.
"""

import json
from typing import Annotated, Literal

from pydantic import Field

from pipeplan.documents.cluster import known_types
from pipeplan.documents.devices import KNOWN_TYPES
from pipeplan.documents.files import parse_sent
from pipeplan.documents.profile import Device, Profile
from pipeplan.errors import require
from pipeplan.protocol.listing import WireModel
from pipeplan.protocol.plans import PlanQuestion, PlanRequest

MOST_TOKENS = 2**16
LEAST_SAMPLES = 8
USUAL_LENGTH = 512
"""Microbatches are estimated up to so many tokens, but at least up to so many samples."""

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
SequenceLength = Annotated[
    int | None, Field(ge=1, le=2**20, description="tokens a sequence of random data; default: at most 512")
]


class ModelPlanRequest(PlanQuestion):
    """Asks a planner for the fastest plan of a model without a profile, which an agent estimates by a datasheet first.

    The cluster's devices must have one; an agent's operator must allow the model, as for profile jobs.
    """

    model: str = Field(min_length=1, max_length=2000, description="SPEC of the model", examples=["hf:gpt2?n_layer=4"])
    sequence_length: SequenceLength = None
    dtype: Dtype = "float32"

    def with_profile(self, profile_id: str) -> PlanRequest:
        """The same with a profile in the model's place."""
        shared = {name: getattr(self, name) for name in PlanQuestion.model_fields}
        return PlanRequest(profile_id=profile_id, **shared)


class EstimateTask(WireModel):
    """Estimate a model's profile by a datasheet; no device is needed. The job goes on as the plan of its request."""

    kind: Literal["estimate"] = "estimate"
    request: ModelPlanRequest
    analytic: str = Field(max_length=64, description="the datasheet's key")
    microbatch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, max_length=64)

    @property
    def model(self) -> str:
        """The SPEC that an agent's operator must allow."""
        return self.request.model


class EstimateResult(WireModel):
    """What an estimate gives."""

    kind: Literal["estimate"] = "estimate"
    profile: Profile


def parse_plan_request(content: bytes) -> PlanRequest | ModelPlanRequest:
    """The request for a plan in a JSON text: one with a `model` is for an estimate. Raises InvalidInputError."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None  # the parser says what is wrong with it
    if isinstance(document, dict) and "model" in document:
        return parse_sent(ModelPlanRequest, content)
    return parse_sent(PlanRequest, content)


def microbatch_sizes(batch_size: int, sequence_length: int | None, asked: int | None) -> tuple[int, ...]:
    """The sizes to estimate: the one asked for, else the powers of two that divide the batch, up to a sensible one."""
    if asked is not None:
        return (asked,)
    most = max(LEAST_SAMPLES, MOST_TOKENS // (sequence_length or USUAL_LENGTH))
    return tuple(size for size in (2**power for power in range(most.bit_length())) if batch_size % size == 0)


def datasheet_of(device: Device) -> str:
    """The key of the device's datasheet. Raises InvalidInputError for a name that stands for none, or for several."""
    found = sorted(known_types(device.name))
    rule = f"must be a device with a datasheet ({', '.join(KNOWN_TYPES)}) where the profile is estimated"
    require(len(found) > 0, "cluster.device.name", rule, device.name)
    rule = f"must say which of {', '.join(found)} it is, where the profile is estimated"
    require(len(found) == 1, "cluster.device.name", rule, device.name)
    return found[0]
