"""Terms: what the blocks of a recipe take and hold on a device, as sums over [start, stop).

Seconds have the collectives inside a form in them: a device waits for these. The host launches operations while the
device computes or exchanges: the slower of the two decides. Where weights are shares, a block takes as long as it
computes, or as the next block's weights take to be gathered, whichever is longer; the same of the gradients that leave
it. An exchange slows the compute beside it (Zhao et al. 2023, section 3.3). In a pipeline shares are gathered once a
batch. Likewise what goes to the host and what comes from it: two directions of one link, beside the computing. An
update on the host waits for its gradients, and the next batch for its weights.

What is run again are the layers: neither the first block nor the last one, where these are of kinds of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.costs.groups import DeviceGroupLinks, grouped, links_among
from pipeplan.costs.ledger import GATHERED_BLOCKS, Ledger, ledger
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.degrees import offloads_activations, offloads_optimizer
from pipeplan.documents.engines import SHARDINGS, TrainingEngine
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
    engine: TrainingEngine
    model: ModelForm
    recipe: Recipe
    _at: "dict[tuple[int, bool], ReplicaTerms]" = field(default_factory=dict)

    @cached_property
    def measured(self) -> tuple[FormMeasurement, ...]:
        """Every kind of block."""
        return tuple(kind.at(self.recipe.microbatch_size) for kind in self.model.kinds)

    @cached_property
    def forward_s(self) -> FloatArray:
        """Of every block, with its collectives."""
        return self._by_block([self._worked_s(self._forward_s(m), m.forward_operations) for m in self.measured])

    @cached_property
    def backward_s(self) -> FloatArray:
        """Of every block, with its collectives."""
        return self._by_block([self._worked_s(self._backward_s(m), m.backward_operations) for m in self.measured])

    @cached_property
    def again_s(self) -> FloatArray:
        """What is run again of every block, before its backward."""
        return self._by_block([self._again_s(m, way) for m, way in self._ways])

    def _again_s(self, measured: FormMeasurement, way: str) -> float:
        again_s, operations = 0.0, 0
        if way == "block":
            again_s, operations = self._forward_s(measured), measured.forward_operations
        elif way == "attention" and measured.selective:
            again_s, operations = measured.selective.recompute_s, measured.selective.operations
        own_s, launched = self._backward_s(measured), measured.backward_operations
        return self._worked_s(own_s + again_s, launched + operations) - self._worked_s(own_s, launched)

    def _forward_s(self, measured: FormMeasurement) -> float:
        return measured.forward_s + self._exchanged_s(measured.forward_collectives)

    def _backward_s(self, measured: FormMeasurement) -> float:
        return measured.backward_s + self._exchanged_s(measured.backward_collectives)

    def _worked_s(self, device_s: float, operations: int) -> float:
        """What a passage takes: its kernels, its exchanges and what is between them, or the host's launches."""
        times = self.engine.times
        return max(device_s + operations * times.gap_s, operations * times.host_s)

    @cached_property
    def _ways(self) -> tuple[tuple[FormMeasurement, str], ...]:
        """Every kind with what is run again of it."""
        inner = set(self.model.blocks[1:-1])
        way = self.recipe.recompute
        return tuple((m, way if kind in inner else "none") for kind, m in enumerate(self.measured))

    @cached_property
    def kept_bytes(self) -> FloatArray:
        """What a microbatch in flight keeps of every block."""
        return self._by_block([_kept(m, way) for m, way in self._ways])

    @cached_property
    def transient_bytes(self) -> FloatArray:
        """What every block holds on top while it runs: what was not kept of it, and its workspace."""
        more = [m.activation_bytes - _kept(m, way) + m.workspace_bytes for m, way in self._ways]
        return self._by_block([max(each, 0) for each in more])

    @cached_property
    def parameters(self) -> FloatArray:
        """Of every block, without its experts'."""
        return self._by_block([kind.parameters for kind in self.model.kinds])

    @cached_property
    def tied_parameters(self) -> FloatArray:
        """Of every block, those of the first block that it holds a copy of in a pipeline."""
        return self._by_block([kind.tied_parameters for kind in self.model.kinds])

    @cached_property
    def expert_parameters(self) -> FloatArray:
        """Of every block's experts."""
        return self._by_block([kind.expert_parameters for kind in self.model.kinds])

    @cached_property
    def edge_bytes(self) -> FloatArray:
        """What one device sends on where a stage ends, by the place of the cut.

        Devices of a tensor group that all hold the whole output send a share each (Narayanan et al. 2021, section 4.1).
        """
        outputs = self._by_block([m.output_bytes for m in self.measured])
        return np.concatenate([[0.0], outputs]) / self._senders

    @cached_property
    def sent_bytes(self) -> float:
        """What one device sends on of a microbatch, between most blocks."""
        between = self.edge_bytes[1:-1]
        return float(np.median(between)) if len(between) else 0.0

    @cached_property
    def least_send_s(self) -> float:
        """How long a port carries what a group sends on of a microbatch, at least; 0 for one group."""
        return min((size_bytes / level.transfer_bytes_per_s for level, size_bytes in self._crossed), default=0.0)

    @cached_property
    def hop_s(self) -> float:
        """What a microbatch takes from a rank to the next one and back, at least; 0 for one group of devices."""
        ways_s = (level.latency_s + size_bytes / level.transfer_bytes_per_s for level, size_bytes in self._crossed)
        return 2 * min(ways_s, default=0.0)

    @cached_property
    def _crossed(self) -> list[tuple[Level, int]]:
        """The levels that groups may send over, each with the least that passes a cut."""
        levels = grouped(self.problem.cluster, self.recipe.form.devices).levels
        edges = self.edge_bytes[1:-1]
        least = self.recipe.form.devices * int(edges.min()) if len(edges) else 0
        return [(level, least) for level in levels if level.size > 1]

    @property
    def _senders(self) -> int:
        form = self.recipe.form
        return 1 if form.sequence_parallel else form.tensor

    def regathered_s(self, cut: int) -> float:
        """How long receivers take to gather such shares of what passes the cut."""
        links = axis_links(self.problem.cluster, self.recipe.form)["tensor"]
        return links.seconds("all-gather", float(self.edge_bytes[cut]) * self._senders) if self._senders > 1 else 0.0

    def ledger(self, data: int, *, pipelined: bool) -> Ledger:
        """What is kept of a parameter with so many replicas of the form; devices that share sequences hold it too."""
        return ledger(
            self.engine.name,
            self.recipe.sharding,
            dtype=self.problem.profile.dtype,
            optimizer=self.problem.options.optimizer_or_default,
            replicas=max(data, 1) * self.recipe.form.context,
            pipelined=pipelined,
            optimizer_on_host=offloads_optimizer(self.recipe.offload),
        )

    def at(self, data: int, *, pipelined: bool) -> "ReplicaTerms":
        """With so many replicas, of one stage or of several."""
        key = data, pipelined
        if key not in self._at:
            self._at[key] = ReplicaTerms(terms=self, data=data, pipelined=pipelined)
        return self._at[key]

    def _by_block(self, by_kind: Sequence[float]) -> FloatArray:
        return np.asarray(by_kind, dtype=np.float64)[list(self.model.blocks)]

    def _exchanged_s(self, collectives: Sequence[Collective]) -> float:
        """Seconds of the collectives, with the wait for the slowest device in each.

        The longest of n exponentially distributed times is on average 1 + 1/2 + ... + 1/n times their mean (Agarwal,
        Garg and Vishnoi 2005, "The Impact of Noise on the Scaling of Collectives").
        """
        form, late_s = self.recipe.form, self.engine.times.late_s
        links = axis_links(self.problem.cluster, form)
        return sum(
            (
                each.count * (links[each.axis].seconds(each.kind, each.size_bytes) + late_s * _longest(members))
                for each in collectives
                if (members := getattr(form, each.axis)) > 1
            ),
            0.0,
        )


def _longest(members: int) -> float:
    """The longest of so many times, in the mean, as a multiple of their mean."""
    return sum(1 / place for place in range(1, members + 1))


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
    pipelined: bool
    _slowest_s: dict[int, float] = field(default_factory=dict)

    @cached_property
    def ledger(self) -> Ledger:
        """Of parameters that are no expert's."""
        return self.terms.ledger(self.data, pipelined=self.pipelined)

    def _shares(self, what: str) -> bool:
        return SHARDINGS.index(self.terms.recipe.sharding) >= SHARDINGS.index(what)

    @property
    def _gathers_for_forward(self) -> bool:
        return self._shares("weights") or (self._shares("gradients") and self.terms.engine.gathers_for_forward)

    @cached_property
    def _gathered_s(self) -> tuple[FloatArray, FloatArray]:
        """How long every block's weights take to be gathered for its forward, and for its backward."""
        nothing = np.zeros_like(self.terms.forward_s)
        if self.pipelined or not self._gathers_for_forward:
            return nothing, nothing
        gathered_s = self._moved_s("all-gather")
        return gathered_s, gathered_s if self._shares("weights") else nothing

    @cached_property
    def _scattered_s(self) -> FloatArray:
        """How long every block's gradients take to be reduced to shares."""
        if self.pipelined or not self._shares("gradients"):
            return np.zeros_like(self.terms.forward_s)
        return self._moved_s("reduce-scatter")

    def _moved_s(self, kind: str) -> FloatArray:
        terms, form = self.terms, self.terms.recipe.form
        links = links_among(terms.problem.cluster, self.data * form.context, form.stride("context"))
        whole = terms.parameters + terms.expert_parameters / form.expert
        return np.asarray([links.seconds(kind, each * self.ledger.gathered) for each in whole.tolist()])

    def _beside_s(self, computing_s: FloatArray, exchanging_s: FloatArray) -> FloatArray:
        """Of compute and an exchange beside it."""
        slowed_s = computing_s + self.terms.engine.times.beside * exchanging_s
        return np.asarray(np.maximum(slowed_s, exchanging_s))

    @cached_property
    def forward_s(self) -> FloatArray:
        """Sums of the forwards' seconds."""
        alone_s = self._beside_s(self.terms.forward_s, self._gathered_s[0])
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

    def slowest_rank_s(self, ranks: int) -> float:
        """What the slowest of so many ranks computes of a microbatch at least.

        That is its share, or of the k longest blocks its part of k.
        """
        if ranks not in self._slowest_s:
            together_s = self._longest_s
            many = np.arange(1, len(together_s))
            part_s = float((together_s[many] - together_s[many - -(-many // ranks)]).max())
            self._slowest_s[ranks] = max(float(self.step_s[-1]) / ranks, part_s)
        return self._slowest_s[ranks]

    @cached_property
    def _longest_s(self) -> FloatArray:
        """Sums of what blocks take of a microbatch, the longest first."""
        return sums(np.sort(np.diff(self.step_s))[::-1])

    @cached_property
    def _whole_backward_s(self) -> FloatArray:
        """Of every block, with what is run again."""
        computing_s = self.terms.backward_s + self.terms.again_s
        alone_s = self._beside_s(computing_s, self._gathered_s[1] + self._scattered_s)
        up_s = self._copied_s(self._left_bytes + self._up_bytes)
        down_s = self._copied_s(self._of_parameters(lambda each: each.gradient_down))
        return np.asarray(np.maximum(alone_s, np.maximum(up_s, down_s)))

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

    @cached_property
    def _parameters(self) -> FloatArray:
        """Of every block, with its copies of another stage's, without its experts'."""
        return self.terms.parameters + (self.terms.tied_parameters if self.pipelined else 0.0)

    def _of_parameters(self, entry: Callable[[Ledger], float]) -> FloatArray:
        """An entry of the ledger, of all parameters of every block. Experts have fewer replicas."""
        terms = self.terms
        experts = terms.ledger(self.data // terms.recipe.form.expert, pipelined=self.pipelined)
        return self._parameters * entry(self.ledger) + terms.expert_parameters * entry(experts)

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
        terms, one = self.terms, not self.pipelined
        whole = self.ledger.gathered * (terms.parameters + terms.expert_parameters)
        gathered = GATHERED_BLOCKS * (one and self._shares("weights"))
        scattered = one and self._shares("gradients")
        return np.asarray(terms.transient_bytes + (gathered + scattered) * whole)

    @cached_property
    def exchanged_bytes(self) -> FloatArray:
        """Sums of the bytes that a device exchanges once a batch, as of an all-reduce.

        An all-reduce is a reduce-scatter and an all-gather. In a pipeline, shares need both once a batch; ZeRO-2
        gathers the weights after their update; other shares need theirs for every microbatch.
        """
        ledger, terms = self.ledger, self.terms
        exchanged = ledger.exchanged if not self._shares("gradients") else 0.0
        if self._shares("gradients") and self.pipelined:
            exchanged = ledger.gathered
        elif self._shares("gradients") and not self._gathers_for_forward:
            exchanged = ledger.gathered / 2
        return sums(exchanged * (self._parameters + terms.expert_parameters))

    @cached_property
    def tied_bytes(self) -> FloatArray:
        """Sums of the gradients' bytes of copies that the first stage has as well."""
        return sums(self.ledger.exchanged * self.terms.tied_parameters)

    @cached_property
    def update_s(self) -> FloatArray:
        """Sums of what an update takes."""
        terms, profile = self.terms, self.terms.problem.profile
        host = terms.problem.cluster.host
        if host and offloads_optimizer(terms.recipe.offload):
            link_s = self._copied_s(self._of_parameters(lambda each: each.update_link))
            return sums(link_s + self._of_parameters(lambda each: each.update_host) / host.update_bytes_per_s)
        seconds = profile.overheads.update_s_per_byte * DTYPE_BYTES[profile.dtype] * self.ledger.updated
        return sums(seconds * (self._parameters + terms.expert_parameters))
