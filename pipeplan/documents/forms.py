"""Forms: what one device computes of a model whose blocks several devices share.

Tensor parallelism gives a device a share of every weight matrix and of the attention heads (Shoeybi et al. 2019,
"Megatron-LM", section 3), with sequence parallelism also a share of the tokens between them (Korthikanti et al. 2022,
section 4.2). Context parallelism gives it a share of every sequence (Liu et al. 2023, "Ring Attention"), expert
parallelism some of a layer's experts (Lepikhin et al. 2021, "GShard"). A form says how many devices share in each way.
What they exchange stands beside what each computes: a cluster's links put a price to it.
"""

from dataclasses import dataclass, replace
from math import comb, gcd
from typing import ClassVar

from pipeplan.documents.names import STRICT, require_name
from pipeplan.errors import require, require_amount, require_count, require_one_of, require_unique

AXES = ("tensor", "context", "expert")
SELECTIVE_UNITS = ("modules", "attention", "operation")
MODULES = ("layernorm", "moe_act", "mla_up_proj")
"""What `modules` may be, by Megatron-LM's names (`--recompute-modules`)."""

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ring")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How many devices share a block, and in which way.

    `tensor` devices share its matrices, with `sequence_parallel` also the tokens between them; `context` devices share
    its sequences. Its experts are shared among `expert` groups of neighbouring devices, whichever of the other axes
    these devices differ on; the devices of a group share the features of each expert. A group has as many devices as a
    tensor group or, with an `expert_tensor` of 1, a single one, which dispatches its own share of the tokens to whole
    experts (Megatron-LM's `--expert-tensor-parallel-size`).
    """

    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        for axis in AXES:
            require_count(axis, getattr(self, axis))
        rule = "needs tensor parallelism"
        require(self.tensor > 1 or not self.sequence_parallel, "sequence_parallel", rule, self.sequence_parallel)
        rule = f"must be 1 below the tensor degree, {self.tensor}, or left out where it is that degree"
        known = self.expert_tensor is None or self.expert_tensor == 1 < self.tensor
        require(known, "expert_tensor", rule, self.expert_tensor)

    @property
    def devices(self) -> int:
        """The devices that hold one copy of a stage together, without its experts."""
        return self.tensor * self.context

    @property
    def expert_tensor_degree(self) -> int:
        """The devices that share the features of an expert."""
        return self.expert_tensor or self.tensor

    @property
    def expert_devices(self) -> int:
        """The devices that hold one copy of a stage's experts together."""
        return self.expert * self.expert_tensor_degree

    @property
    def replicas_together(self) -> int:
        """The fewest replicas that have whole copies of the experts among them; their number divides all replicas'."""
        return self.expert_devices // gcd(self.expert_devices, self.devices)

    def expert_replicas(self, replicas: int) -> int:
        """The copies of the experts that `replicas` copies of a stage have."""
        return self.devices * replicas // self.expert_devices

    def stride(self, axis: str) -> int:
        """The distance in ranks from one device of an axis to the next: tensor groups are innermost, then context
        groups.

        Devices that share experts are neighbours among all of a stage (Megatron-LM's `parallel_state.py`).
        """
        return {"tensor": 1, "context": self.tensor, "expert": self.expert_tensor_degree}[axis]


WHOLE = Form()
"""No block is shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a token chooses its experts: `chosen` of them, from at most `chosen_groups` of `groups` equal groups.

    DeepSeek-V3 (DeepSeek-AI 2024, section 2.1.2) limits the groups, and with them the nodes that a token reaches.
    """

    experts: int
    chosen: int
    groups: int = 1
    chosen_groups: int = 1

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        for field in ("experts", "chosen", "groups", "chosen_groups"):
            require_count(field, getattr(self, field))
        require(self.experts % self.groups == 0, "groups", f"must divide the {self.experts} experts", self.groups)
        require(
            self.chosen_groups <= self.groups, "chosen_groups", f"must be at most {self.groups}", self.chosen_groups
        )
        most = self.chosen_groups * self.experts // self.groups
        require(self.chosen <= most, "chosen", f"must be at most the {most} experts of chosen groups", self.chosen)

    def units_reached(self, units: int) -> float:
        """The mean number of `units`, each with an equal share of the experts, in which a token has one of its experts.

        All choices are equally likely: routers are trained to balance their experts.
        """
        share, group = self.experts // units, self.experts // self.groups
        inside = min(share, group)  # of a group's experts in a unit; a unit has `whole` groups, or a part of one
        whole = max(share // group, 1)
        open_experts = self.chosen_groups * group
        missed = 0.0
        for hit in range(min(whole, self.chosen_groups) + 1):
            ways = comb(whole, hit) * comb(self.groups - whole, self.chosen_groups - hit)
            missed += ways * comb(open_experts - hit * inside, self.chosen) / comb(open_experts, self.chosen)
        return units * (1 - missed / comb(self.groups, self.chosen_groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What the devices of one axis exchange, `count` times one after another.

    `size_bytes` is that of the whole tensor: what an all-gather leaves on every device, what a reduce-scatter, an
    all-reduce or an all-to-all takes from each, what a ring passes by each of them in all. An all-to-all of tokens says
    their `routing`: its bytes are a copy of each token for each of its experts.
    """

    kind: str
    axis: str
    size_bytes: int
    count: int = 1
    routing: Routing | None = None

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require(self.kind in COLLECTIVES, "kind", f"must be one of {', '.join(COLLECTIVES)}", self.kind)
        require(self.axis in AXES, "axis", f"must be one of {', '.join(AXES)}", self.axis)
        require_count("size_bytes", self.size_bytes, at_least=0)
        require_count("count", self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selective:
    """Selective recomputation: a part of a block runs again before its backward.

    `unit` says which: the core of `attention` (Korthikanti et al. 2022, section 5), one `operation` after the other,
    all but attention and every second matrix product (torchtitan 2024, section 2.3), or the outputs of `modules`
    (Megatron-LM core 0.15, `transformer_config.py`). `activation_bytes` is then kept from forward to backward, and
    `recompute_s` is the additional time. `operations` are those launched again.
    """

    recompute_s: float
    activation_bytes: int
    operations: int = 0
    unit: str = "attention"
    modules: tuple[str, ...] = ()

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_amount("recompute_s", self.recompute_s)
        require_count("activation_bytes", self.activation_bytes, at_least=0)
        require_count("operations", self.operations, at_least=0)
        require_one_of(SELECTIVE_UNITS, "unit", self.unit)
        rule = f"must be some of {', '.join(MODULES)}, with the unit modules alone"
        known = set(self.modules) <= set(MODULES) and bool(self.modules) == (self.unit == "modules")
        require(known, "modules", rule, list(self.modules))


@dataclass(frozen=True, slots=True, kw_only=True)
class FormMeasurement:
    """What one device does of one microbatch in one block. Seconds are of compute alone, bytes are the device's own.

    `backward_input_s` and `backward_weight_s` are the parts of a split backward, where they are known. `input_bytes`
    is what the device keeps of the block's input where the block is run again. A block that is run again repeats its
    forward collectives. `forward_operations` and `backward_operations` say how many kernels the host launches, where
    the seconds leave that out; they are 0 where the seconds were measured. The `dynamic` ones among them are of
    experts: no graph holds these, because their shapes depend on how many tokens choose an expert. `selective` and
    `other_selective` are the ways to run a part of the block again, by a unit each.
    """

    microbatch_size: int
    forward_s: float
    backward_s: float
    input_bytes: int
    output_bytes: int
    activation_bytes: int
    workspace_bytes: int = 0
    backward_input_s: float | None = None
    backward_weight_s: float | None = None
    forward_collectives: tuple[Collective, ...] = ()
    backward_collectives: tuple[Collective, ...] = ()
    selective: Selective | None = None
    forward_operations: int = 0
    backward_operations: int = 0
    other_selective: tuple[Selective, ...] = ()
    dynamic_forward_operations: int = 0
    dynamic_backward_operations: int = 0

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_count("microbatch_size", self.microbatch_size)
        for field in ("forward_s", "backward_s"):
            require_amount(field, getattr(self, field))
        counts = ("input_bytes", "output_bytes", "activation_bytes", "workspace_bytes")
        for field in (*counts, "forward_operations", "backward_operations"):
            require_count(field, getattr(self, field), at_least=0)
        for field in ("forward_operations", "backward_operations"):
            dynamic, every = getattr(self, f"dynamic_{field}"), getattr(self, field)
            require_count(f"dynamic_{field}", dynamic, at_least=0)
            require(dynamic <= every, f"dynamic_{field}", f"must be at most {field}, {every}", dynamic)
        for field in ("backward_input_s", "backward_weight_s"):
            if getattr(self, field) is not None:
                require_amount(field, getattr(self, field))
        both = (self.backward_input_s is None) == (self.backward_weight_s is None)
        require(both, "backward_input_s", "must be given together with backward_weight_s", self.backward_input_s)
        units = [each.unit for each in self.every_selective]
        require_unique("other_selective", "must not name a unit twice", units)

    @property
    def every_selective(self) -> tuple[Selective, ...]:
        """The ways to run a part of the block again."""
        return ((self.selective,) if self.selective else ()) + self.other_selective

    def selective_by(self, unit: str) -> Selective | None:
        """The way of this unit; None if the block has none."""
        return next((each for each in self.every_selective if each.unit == unit), None)

    @property
    def in_graphs(self) -> "FormMeasurement":
        """The same where a graph holds each pass, but for dynamic operations: the host launches one graph.

        A graph reads and writes memory of its own. A microbatch in flight has its output there, beside the next block's
        input (Transformer Engine, `make_graphed_callables`).
        """

        def held(way: Selective) -> Selective:
            return replace(way, activation_bytes=way.activation_bytes + self.output_bytes)

        return replace(
            self,
            forward_operations=min(self.forward_operations, 1 + self.dynamic_forward_operations),
            backward_operations=min(self.backward_operations, 1 + self.dynamic_backward_operations),
            activation_bytes=self.activation_bytes + self.output_bytes,
            selective=self.selective and held(self.selective),
            other_selective=tuple(map(held, self.other_selective)),
        )

    def kept_bytes(self, recompute: str) -> int:
        """What is kept from forward to backward where this runs again: a unit, the whole `block`, or `none`."""
        part = self.selective_by(recompute)
        if recompute == "block":
            return self.input_bytes
        return part.activation_bytes if part else self.activation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """Blocks that do the same: their name, what one device holds of their parameters, and what it does.

    `expert_parameters` are those of the device's own experts, of which there are fewer replicas than of `parameters`.
    `tied_parameters` are those of the chain's first block that this one uses as well: on a stage of its own it holds a
    copy of them, and both stages add up what their gradients are (Narayanan et al. 2021, section 3.2). Of each of the
    three, the `frozen` ones are not trained.
    """

    name: str
    parameters: int
    measurements: tuple[FormMeasurement, ...]
    expert_parameters: int = 0
    tied_parameters: int = 0
    frozen_parameters: int = 0
    frozen_expert_parameters: int = 0
    frozen_tied_parameters: int = 0

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_name("name", self.name)
        for field in ("parameters", "expert_parameters", "tied_parameters"):
            every, frozen = getattr(self, field), getattr(self, f"frozen_{field}")
            require_count(field, every, at_least=0)
            require_count(f"frozen_{field}", frozen, at_least=0)
            require(frozen <= every, f"frozen_{field}", f"must be at most {field}, {every}", frozen)
        require(len(self.measurements) > 0, "measurements", "must hold at least one measurement", self.measurements)
        sizes = [each.microbatch_size for each in self.measurements]
        require_unique("measurements", "must not measure a microbatch size twice", sizes)

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The known sizes, ascending."""
        return tuple(sorted(each.microbatch_size for each in self.measurements))

    def at(self, microbatch_size: int) -> FormMeasurement:
        """The measurement at this size; one must exist."""
        return next(each for each in self.measurements if each.microbatch_size == microbatch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForm:
    """A model in one form: its kinds of blocks, and by `blocks` the kind of each block in the order of the data."""

    form: Form
    kinds: tuple[BlockKind, ...]
    blocks: tuple[int, ...]

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require(len(self.kinds) > 0, "kinds", "must hold at least one kind of block", self.kinds)
        require_unique("kinds", "must not hold a name twice", [kind.name for kind in self.kinds])
        sizes = self.microbatch_sizes
        for index, kind in enumerate(self.kinds):
            rule = f"must measure the same microbatch sizes as the first kind, {list(sizes)}"
            require(kind.microbatch_sizes == sizes, f"kinds.{index}.measurements", rule, list(kind.microbatch_sizes))
        require(len(self.blocks) > 0, "blocks", "must hold at least one block", self.blocks)
        known = all(0 <= number < len(self.kinds) for number in self.blocks)
        require(known, "blocks", f"must name kinds by their numbers below {len(self.kinds)}", self.blocks)

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The known sizes, ascending; the same for every kind."""
        return self.kinds[0].microbatch_sizes

    @property
    def graphs(self) -> tuple[str, ...]:
        """The parts of its layers that graphs can hold, by Megatron-LM's names (`--cuda-graph-modules`)."""
        layers = [self.kinds[kind] for kind in sorted({*self.blocks[1:-1]})]
        if not any(kind.expert_parameters for kind in layers):
            return ("full",)
        dense = ("mlp",) if any(not kind.expert_parameters for kind in layers) else ()
        return ("attn", *dense, "moe_router", "moe_preprocess")

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules whose outputs any of its blocks can make again."""
        ways = (m.selective_by("modules") for kind in self.kinds for m in kind.measurements)
        found = {name for way in ways if way for name in way.modules}
        return tuple(name for name in MODULES if name in found)
