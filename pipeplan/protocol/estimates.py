"""Estimates: plans for a model without a profile. An agent estimates the profile by a datasheet, then a planner plans.

    ModelPlanRequest ──service──▶ EstimateTask ──agent──▶ EstimateResult ──service──▶ PlanTask(PlanRequest)

The command line estimates with the same microbatches, by the same datasheets.
"""

import json
from dataclasses import dataclass
from itertools import product
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeplan.documents.cluster import Cluster, known_types
from pipeplan.documents.devices import KNOWN_TYPES
from pipeplan.documents.engines import OUR_RUNTIME, engine_named, require_degrees
from pipeplan.documents.files import parse_sent
from pipeplan.documents.forms import AXES, Form
from pipeplan.documents.names import STRICT
from pipeplan.documents.profile import PRECISIONS, Device, Profile, require_precision
from pipeplan.errors import require, require_count, require_one_of
from pipeplan.planners.engine_options import require_engine_options
from pipeplan.planners.problem import Options
from pipeplan.protocol.listing import WireModel
from pipeplan.protocol.plans import PlanQuestion, PlanRequest

MOST_TOKENS = 2**16
LEAST_SAMPLES = 8
USUAL_LENGTH = 512
"""Microbatches are estimated up to MOST_TOKENS, but at least up to LEAST_SAMPLES; USUAL_LENGTH is a sequence's."""

MOST_SHARING, MOST_EXPERT = 8, 64
"""Devices that share a sequence, and those that share experts, at most, unless more are asked for."""

MOST_DEVICES = 4096
"""Devices of a stage, at most: no more matter, and clusters that are larger have one profile."""

LEAST_SHARE = 2048
"""Tokens of a sequence that each of several devices has at least, unless more devices are asked for."""

Precision = Annotated[
    Literal["fp8", "mxfp8", "nvfp4"] | None,
    Field(description="what the linear layers of a bfloat16 model compute in, with an engine that does so"),
]
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
    precision: Precision = None

    @model_validator(mode="after")
    def _require_precision_for_the_dtype(self) -> Self:
        require_precision(self.precision, self.dtype)
        return self

    def with_profile(self, profile_id: str) -> PlanRequest:
        """The same request with a profile instead of the model."""
        shared = {name: getattr(self, name) for name in PlanQuestion.model_fields}
        return PlanRequest(profile_id=profile_id, **shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormsAsked:
    """The forms of an estimated profile besides whole blocks.

    `tensor`, `context` and `expert` are degrees that must be possible. If they are None, all powers of two up to
    `most_tensor`, `most_context` and `most_expert` are tried, and those that are impossible for the model are left out.
    `expert_tensor` is the experts' own tensor degree; if it is None, 1 and the tensor degree are tried where experts
    are shared. A stage has `most_devices` at most, where that is known.
    `precision` is what linear layers compute in, where that is not the model's dtype. `fusion` says where
    elementwise operations run in fused kernels, as a compiler or Transformer Engine makes them: in all blocks, in the
    last block with its loss, or nowhere.
    """

    tensor: int | None = None
    context: int | None = None
    expert: int | None = None
    most_tensor: int = 1
    most_context: int = 1
    most_expert: int = 1
    sequence_parallel: bool = True
    attention: Literal["flash", "unfused"] = "flash"
    fusion: Literal["all", "loss", "none"] = "all"
    precision: str | None = None
    expert_tensor: int | None = None
    most_devices: int | None = None

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        for field in (*AXES, "expert_tensor", *(f"most_{axis}" for axis in AXES), "most_devices"):
            if getattr(self, field) is not None:
                require_count(field, getattr(self, field))
        if self.precision is not None:
            require_one_of(PRECISIONS, "precision", self.precision)
        require_one_of(("flash", "unfused"), "attention", self.attention)
        require_one_of(("all", "loss", "none"), "fusion", self.fusion)

    @property
    def forms(self) -> tuple[Form, ...]:
        """All of them, whether they are possible for the model or not."""
        degrees = [(getattr(self, axis), getattr(self, f"most_{axis}")) for axis in AXES]
        every = ([2**k for k in range(most.bit_length())] if fixed is None else [fixed] for fixed, most in degrees)
        found = (
            Form(
                tensor=tensor,
                sequence_parallel=self.sequence_parallel and tensor > 1,
                context=context,
                expert=expert,
                expert_tensor=1 if own == 1 < tensor else None,
            )
            for tensor, context, expert in product(*every)
            for own in dict.fromkeys((tensor, 1))
            if self.expert_tensor == own
            or (self.expert_tensor is None and (own == tensor or (expert > 1 and self.sequence_parallel)))
        )
        most = self.most_devices
        return tuple(form for form in found if most is None or form.devices * form.replicas_together <= most)

    def may_lack(self, degree: str) -> bool:
        """Whether an impossible form with this degree is left out: only if the user does not name the degree."""
        return degree in AXES and getattr(self, degree) is None


class EstimateTask(WireModel):
    """Estimate a model's profile by a datasheet; no device is needed. The job continues as the plan of its request.

    `forms` are set if the plan is for an engine that shares blocks among devices.
    """

    kind: Literal["estimate"] = "estimate"
    request: ModelPlanRequest
    analytic: str = Field(max_length=64, description="the datasheet's key")
    microbatch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, max_length=64)
    forms: FormsAsked | None = None

    @property
    def model(self) -> str:
        return self.request.model


class EstimateResult(WireModel):
    """What an estimate gives."""

    kind: Literal["estimate"] = "estimate"
    profile: Profile


def parse_plan_request(content: bytes) -> PlanRequest | ModelPlanRequest:
    """The request for a plan in a JSON text; with a `model`, it needs an estimate. Raises InvalidInputError."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None  # the parser reports what is wrong
    if isinstance(document, dict) and "model" in document:
        return parse_sent(ModelPlanRequest, content)
    return parse_sent(PlanRequest, content)


def microbatch_sizes(batch_size: int, sequence_length: int | None, asked: int | None) -> tuple[int, ...]:
    """The sizes to estimate: the one asked for, else the powers of two that divide the batch, up to a sensible one."""
    if asked is not None:
        return (asked,)
    most = max(LEAST_SAMPLES, MOST_TOKENS // (sequence_length or USUAL_LENGTH))
    return tuple(size for size in (2**power for power in range(most.bit_length())) if batch_size % size == 0)


def forms_asked(
    cluster: Cluster, options: Options, *, batch_size: int, sequence_length: int | None, precision: str | None = None
) -> FormsAsked | None:
    """The forms that the engine and the options allow; None for our runtime, which never shares a block.

    Tensor groups stay inside a server, and no group may span a part of a level. Raises InvalidInputError for options
    that the engine, the devices or the batch rule out.
    """
    engine, length = engine_named(options.engine or OUR_RUNTIME), sequence_length or 0
    engine.require_precision(precision)
    if engine.name == OUR_RUNTIME:
        require_degrees(engine, cluster.devices, {axis: getattr(options, axis) or 1 for axis in AXES})
        return None
    require_engine_options(options, devices=cluster.devices, batch_size=batch_size)
    return FormsAsked(
        tensor=options.tensor,
        context=options.context,
        expert=options.expert,
        most_tensor=cluster.levels[0].size if "tensor" in engine.axes else 1,
        most_context=min(MOST_SHARING, max(length // LEAST_SHARE, 1)) if "context" in engine.axes else 1,
        most_expert=min(MOST_EXPERT, cluster.devices) if "expert" in engine.axes else 1,
        sequence_parallel=engine.sequence_parallel and options.sequence_parallel is not False,
        precision=precision,
        expert_tensor=options.expert_tensor if engine.whole_experts else None,
        most_devices=min(MOST_DEVICES, cluster.devices // (options.stages or 1)),
    )


def datasheet_of(device: Device) -> str:
    """The key of the device's datasheet. Raises InvalidInputError for a name that means none, or several."""
    found = sorted(known_types(device.name))
    rule = f"must be a device with a datasheet ({', '.join(KNOWN_TYPES)}) where the profile is estimated"
    require(len(found) > 0, "cluster.device.name", rule, device.name)
    rule = f"must say which of {', '.join(found)} it is, where the profile is estimated"
    require(len(found) == 1, "cluster.device.name", rule, device.name)
    return found[0]
