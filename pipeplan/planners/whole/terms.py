"""Terms: what the blocks of a recipe take and hold on a device, as sums over [start, stop).

Seconds have the collectives inside a form in them: a device waits for these. Where weights are shares, a block takes as
long as it computes, or as the next block's weights take to be gathered, whichever is longer; the same of the gradients
that leave it (Zhao et al. 2023, section 3.3). Likewise what goes to the host and what comes from it: two directions of
one link, beside the computing. An update on the host waits for its gradients, and the next batch for its weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.costs.groups import DeviceGroupLinks, links_among
from pipeplan.costs.ledger import GATHERED_BLOCKS, Ledger, ledger
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.degrees import offloads_activations, offloads_optimizer
from pipeplan.documents.engines import SHARDINGS
from pipeplan.documents.forms import AXES, Collective, Form, FormMeasurement, ModelForm
from pipeplan.documents.profile import DTYPE_BYTES
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.whole.degrees import Recipe

_ROUNDING = 1e-12


def sums(values: Sequence[float] | FloatArray) -> FloatArray:
    """Sums of the values before each place, and of all."""
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])


def axis_links(cluster: Cluster, form: Form) -> dict[str, DeviceGroupLinks]:
    """The links among the devices of each axis: tensor groups innermost, then context groups, then experts."""
    return {axis: links_among(cluster, getattr(form, axis), form.stride(axis)) for axis in AXES}


@dataclass(frozen=True, kw_only=True, eq=False)
class RecipeTerms:
    """A model in one form, at one microbatch size, with one way of recomputation: what its blocks take, in order."""

    problem: PlanningProblem
    engine: str
    model: ModelForm
    recipe: Recipe
    _at: "dict[int, ReplicaTerms]" = field(default_factory=dict)

    @cached_property
    def measured(self) -> tuple[FormMeasurement, ...]:
        """Every kind of block."""
        return tuple(kind.at(self.recipe.microbatch_size) for kind in self.model.kinds)

    @cached_property
    def forward_s(self) -> FloatArray:
        """Of every block, with its collectives."""
        return self._by_block([m.forward_s + self._exchanged_s(m.forward_collectives) for m in self.measured])

    @cached_property
    def backward_s(self) -> FloatArray:
        """Of every block, with its collectives."""
        return self._by_block([m.backward_s + self._exchanged_s(m.backward_collectives) for m in self.measured])

    @cached_property
    def again_s(self) -> FloatArray:
        """What is run again of every block, before its backward."""
        match self.recipe.recompute:
            case "block":
                return self.forward_s
            case "attention":
                return self._by_block([m.selective.recompute_s if m.selective else 0.0 for m in self.measured])
            case _:
                return np.zeros_like(self.forward_s)

    @cached_property
    def kept_bytes(self) -> FloatArray:
        """What a microbatch in flight keeps of every block."""
        return self._by_block([_kept(m, self.recipe.recompute) for m in self.measured])

    @cached_property
    def transient_bytes(self) -> FloatArray:
        """What every block holds on top while it runs: what was not kept of it, and its workspace."""
        more = [m.activation_bytes - _kept(m, self.recipe.recompute) + m.workspace_bytes for m in self.measured]
        return self._by_block([max(each, 0) for each in more])

    @cached_property
    def parameters(self) -> FloatArray:
        """Of every block, without its experts'."""
        return self._by_block([kind.parameters for kind in self.model.kinds])

    @cached_property
    def expert_parameters(self) -> FloatArray:
        """Of every block's experts."""
        return self._by_block([kind.expert_parameters for kind in self.model.kinds])

    @cached_property
    def edge_bytes(self) -> FloatArray:
        """What one device sends on where a stage ends, by the place of the cut."""
        outputs = self._by_block([m.output_bytes for m in self.measured])
        return np.concatenate([[0.0], outputs])

    def ledger(self, data: int) -> Ledger:
        """What is kept of a parameter with so many replicas of the form; devices that share sequences hold it too."""
        profile, options = self.problem.profile, self.problem.options
        sharding, holders = self.recipe.sharding, max(data, 1) * self.recipe.form.context
        return ledger(
            self.engine,
            sharding,
            dtype=profile.dtype,
            optimizer=options.optimizer,
            replicas=holders,
            optimizer_on_host=offloads_optimizer(self.recipe.offload),
        )

    def at(self, data: int) -> "ReplicaTerms":
        """With so many replicas."""
        if data not in self._at:
            self._at[data] = ReplicaTerms(terms=self, data=data)
        return self._at[data]

    def _by_block(self, by_kind: Sequence[float]) -> FloatArray:
        return np.asarray(by_kind, dtype=np.float64)[list(self.model.blocks)]

    def _exchanged_s(self, collectives: Sequence[Collective]) -> float:
        links = axis_links(self.problem.cluster, self.recipe.form)
        return sum((each.count * links[each.axis].seconds(each.kind, each.size_bytes) for each in collectives), 0.0)


def _kept(measured: FormMeasurement, recompute: str) -> int:
    if recompute == "block":
        return measured.input_bytes
    if recompute == "attention" and measured.selective:
        return measured.selective.activation_bytes
    return measured.activation_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaTerms:
    """The terms of a recipe with so many replicas, as sums over blocks.

    Replicas count as neighbours: no placement exchanges faster while they compute.
    """

    terms: RecipeTerms
    data: int

    @cached_property
    def _gathered_s(self) -> FloatArray:
        """How long every block's weights take to be gathered."""
        recipe, terms = self.terms.recipe, self.terms
        if SHARDINGS.index(recipe.sharding) < SHARDINGS.index("weights"):
            return np.zeros_like(terms.forward_s)
        return self._moved_s("all-gather")

    @cached_property
    def _scattered_s(self) -> FloatArray:
        """How long every block's gradients take to be reduced to shares."""
        recipe, terms = self.terms.recipe, self.terms
        if SHARDINGS.index(recipe.sharding) < SHARDINGS.index("gradients"):
            return np.zeros_like(terms.forward_s)
        return self._moved_s("reduce-scatter")

    def _moved_s(self, kind: str) -> FloatArray:
        terms, form = self.terms, self.terms.recipe.form
        links = links_among(terms.problem.cluster, self.data * form.context, form.stride("context"))
        size = terms.ledger(self.data).gathered
        whole = terms.parameters + terms.expert_parameters / form.expert
        return np.asarray([links.seconds(kind, each * size) for each in whole.tolist()])

    @cached_property
    def forward_s(self) -> FloatArray:
        """Sums of the forwards' seconds."""
        alone_s = np.maximum(self.terms.forward_s, self._gathered_s)
        return sums(np.maximum(alone_s, np.maximum(self._copied_s(self._left_bytes), self._copied_s(self._up_bytes))))

    @cached_property
    def backward_s(self) -> FloatArray:
        """Sums of the backwards' seconds, without what is run again."""
        return sums(self._whole_backward_s - self.terms.again_s)

    @cached_property
    def again_s(self) -> FloatArray:
        """Sums of the seconds of what is run again."""
        return sums(self.terms.again_s)

    @cached_property
    def step_s(self) -> FloatArray:
        """Sums of all that a microbatch takes."""
        return self.forward_s + sums(self._whole_backward_s)

    @cached_property
    def _whole_backward_s(self) -> FloatArray:
        """Of every block, with what is run again."""
        computing_s = self.terms.backward_s + self.terms.again_s
        alone_s = np.maximum(computing_s, self._gathered_s + self._scattered_s)
        up_s = self._copied_s(self._left_bytes + self._up_bytes)
        return np.asarray(
            np.maximum(alone_s, np.maximum(up_s, self._copied_s(self._of_parameters(lambda each: each.gradient_down))))
        )

    @cached_property
    def _left_bytes(self) -> FloatArray:
        """What every block's microbatch has on the host from forward to backward."""
        return self.terms.kept_bytes * float(offloads_activations(self.terms.recipe.offload))

    @cached_property
    def _up_bytes(self) -> FloatArray:
        """What comes up of every block's weights before they are gathered."""
        return self._of_parameters(lambda each: each.weights_up)

    def _copied_s(self, size_bytes: FloatArray) -> FloatArray:
        """How long every block's bytes take between device and host, one way."""
        host = self.terms.problem.cluster.host
        return np.asarray(size_bytes / host.bandwidth_bytes_per_s if host else np.zeros_like(size_bytes))

    def _of_parameters(self, entry: Callable[[Ledger], float]) -> FloatArray:
        """An entry of the ledger, of all parameters of every block. Experts have fewer replicas."""
        terms = self.terms
        whole, experts = terms.ledger(self.data), terms.ledger(self.data // terms.recipe.form.expert)
        return terms.parameters * entry(whole) + terms.expert_parameters * entry(experts)

    def no_slower(self, other: "ReplicaTerms") -> bool:
        """Whether no block takes longer than with the other terms, there, back, or to be updated."""
        pairs = (
            (self.forward_s, other.forward_s),
            (self.backward_s, other.backward_s),
            (self.update_s, other.update_s),
        )
        return all(bool((np.diff(mine) <= np.diff(its) + _ROUNDING * its[-1]).all()) for mine, its in pairs)

    @cached_property
    def fixed_bytes(self) -> FloatArray:
        """Sums of the states' bytes."""
        return sums(self._of_parameters(lambda each: each.kept))

    @cached_property
    def kept_bytes(self) -> FloatArray:
        """Sums of what a microbatch in flight keeps on the device."""
        return sums(self.terms.kept_bytes - self._left_bytes)

    @cached_property
    def left_bytes(self) -> FloatArray:
        """Sums of what a microbatch in flight leaves to the host."""
        return sums(self._left_bytes)

    @cached_property
    def host_bytes(self) -> FloatArray:
        """Sums of what the host has of the states."""
        return sums(self._of_parameters(lambda each: each.host))

    @cached_property
    def transient_bytes(self) -> FloatArray:
        """What every block holds on top while it runs, with the whole weights that are gathered for it."""
        terms, shards = self.terms, SHARDINGS.index(self.terms.recipe.sharding)
        whole = terms.parameters + terms.expert_parameters
        size = terms.ledger(self.data).gathered
        gathered = GATHERED_BLOCKS * size * whole if shards >= SHARDINGS.index("weights") else 0.0
        scattered = size * whole if shards >= SHARDINGS.index("gradients") else 0.0
        return np.asarray(terms.transient_bytes + gathered + scattered)

    @cached_property
    def exchanged_bytes(self) -> FloatArray:
        """Sums of the gradients' bytes that a device exchanges once a batch."""
        terms = self.terms
        if SHARDINGS.index(terms.recipe.sharding) >= SHARDINGS.index("gradients"):
            return np.zeros(len(terms.forward_s) + 1)
        return sums(terms.ledger(self.data).exchanged * (terms.parameters + terms.expert_parameters))

    @cached_property
    def update_s(self) -> FloatArray:
        """Sums of what an update takes."""
        terms, profile = self.terms, self.terms.problem.profile
        host = terms.problem.cluster.host
        if host and offloads_optimizer(terms.recipe.offload):
            link_s = self._copied_s(self._of_parameters(lambda each: each.update_link))
            return sums(link_s + self._of_parameters(lambda each: each.update_host) / host.update_bytes_per_s)
        seconds = profile.overheads.update_s_per_byte * DTYPE_BYTES[profile.dtype] * terms.ledger(self.data).updated
        return sums(seconds * (terms.parameters + terms.expert_parameters))
