"""Terms: the seconds and bytes of a recipe's blocks on a device, as sums over [start, stop).

Seconds include the collectives inside a form, because a device waits for these. The host launches operations, or graphs
of them, while the device computes or exchanges; the slower of the two counts. With sharded weights, a block takes the
longer of its compute and the gathering of the next block's weights; the same holds for the reduction of its gradients
(`ReplicaStates`). An exchange slows the compute that it overlaps (Zhao et al. 2023, section 3.3). Copies to and from
the host also overlap the compute, in the two directions of one link.

Only the layers are recomputed: neither the first nor the last block, if these have kinds of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pipeplan.arrays import FloatArray, sums
from pipeplan.costs.groups import DeviceGroupLinks, axis_links, grouped, sends_tokens_once
from pipeplan.documents.cluster import Level
from pipeplan.documents.degrees import offloads_activations
from pipeplan.documents.engines import TrainingEngine
from pipeplan.documents.forms import AXES, Collective, FormMeasurement, ModelForm
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.whole.degrees import Recipe
from pipeplan.planners.whole.states import ReplicaStates

_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class RecipeTerms:
    """The terms of a model's blocks, in order, in one form, at one microbatch size, with one unit of recomputation.

    `alone` is the share of passes that overlap no pass of another microbatch (`_exposed`).
    """

    problem: PlanningProblem
    engine: TrainingEngine
    model: ModelForm
    recipe: Recipe
    alone: float = 0.0
    _at: "dict[tuple[int, bool], ReplicaTerms]" = field(default_factory=dict)

    @cached_property
    def measured(self) -> tuple[FormMeasurement, ...]:
        """The measurement of every kind of block, layers in graphs where the recipe has them."""
        found = [kind.at(self.recipe.microbatch_size) for kind in self.model.kinds]
        layers = {*self.model.blocks[1:-1]} if self.recipe.graphs else set[int]()
        if self.recipe.a2a_overlap:  # graphs of a dense layer's products do not run in pairs
            layers = {kind for kind in layers if self.model.kinds[kind].expert_parameters}
        return tuple(m.in_graphs if kind in layers else m for kind, m in enumerate(found))

    @cached_property
    def forward_s(self) -> FloatArray:
        """Every block's forward, with its collectives."""
        return self._by_block([self._worked_s(self._forward_s(m), m.forward_operations) for m in self.measured])

    @cached_property
    def backward_s(self) -> FloatArray:
        """Every block's backward, with its collectives."""
        return self._by_block([self._worked_s(self._backward_s(m), m.backward_operations) for m in self.measured])

    @cached_property
    def again_s(self) -> FloatArray:
        """Every block's recomputation before its backward."""
        return self._by_block([self._again_s(m, way) for m, way in self._ways])

    def _again_s(self, measured: FormMeasurement, way: str) -> float:
        again_s, operations = 0.0, 0
        if way == "block":
            again_s, operations = self._forward_s(measured), measured.forward_operations  # never in pairs
        elif part := measured.selective_by(way):
            again_s, operations = part.recompute_s, part.operations
        own_s, launched = self._backward_s(measured), measured.backward_operations
        return self._worked_s(own_s + again_s, launched + operations) - self._worked_s(own_s, launched)

    def _forward_s(self, measured: FormMeasurement) -> float:
        waited_s, experts_s = self._exchanged_s(measured.forward_collectives)
        return measured.forward_s + waited_s + self._exposed(measured) * experts_s

    def _backward_s(self, measured: FormMeasurement) -> float:
        waited_s, experts_s = self._exchanged_s(measured.backward_collectives)
        return measured.backward_s + waited_s + self._exposed(measured) * experts_s

    def _exposed(self, measured: FormMeasurement) -> float:
        """The share of experts' exchanges for which a device waits.

        Where they overlap, a layer's forward runs concurrently with its backward of another microbatch. The pair takes
        the longer of both computations and of both exchanges (Megatron-LM core 0.16, `combined_1f1b.py`).
        """
        if not self.recipe.a2a_overlap:
            return 1.0
        passes = (measured.forward_collectives, measured.backward_collectives)
        waited_s, experts_s = (sum(each) for each in zip(*map(self._exchanged_s, passes), strict=True))
        computed_s = measured.forward_s + measured.backward_s + waited_s
        in_pairs = max(1 - computed_s / experts_s, 0.0) if experts_s else 0.0
        return self.alone + (1 - self.alone) * in_pairs

    def _worked_s(self, device_s: float, operations: int) -> float:
        """The longer of a pass's kernels, exchanges and the gaps between them, and of the host's launches."""
        times = self.engine.times
        return max(device_s + operations * times.gap_s, operations * times.host_s)

    @cached_property
    def _ways(self) -> tuple[tuple[FormMeasurement, str], ...]:
        """Every kind with its unit of recomputation."""
        inner = set(self.model.blocks[1:-1])
        way = self.recipe.recompute
        return tuple((m, way if kind in inner else "none") for kind, m in enumerate(self.measured))

    @cached_property
    def kept_bytes(self) -> FloatArray:
        """The bytes that a microbatch in flight keeps of every block."""
        return self._by_block([m.kept_bytes(way) for m, way in self._ways])

    @cached_property
    def transient_bytes(self) -> FloatArray:
        """Every block's transient bytes while it runs: activations that were not kept, and its workspace."""
        more = [m.activation_bytes - m.kept_bytes(way) + m.workspace_bytes for m, way in self._ways]
        return self._by_block([max(each, 0) for each in more])

    @cached_property
    def edge_bytes(self) -> FloatArray:
        """The bytes that one device sends at the end of a stage, by the place of the cut.

        Devices of a tensor group that all hold the whole output send a share each (Narayanan et al. 2021, section 4.1).
        """
        outputs = self._by_block([m.output_bytes for m in self.measured])
        return np.concatenate([[0.0], outputs]) / self._senders

    @cached_property
    def sent_bytes(self) -> float:
        """The bytes that one device sends for a microbatch, between most blocks."""
        between = self.edge_bytes[1:-1]
        return float(np.median(between)) if len(between) else 0.0

    @cached_property
    def least_send_s(self) -> float:
        """The least time for which a group's transfer of a microbatch occupies a port; 0 for one group."""
        return min((size_bytes / level.transfer_bytes_per_s for level, size_bytes in self._crossed), default=0.0)

    @cached_property
    def hop_s(self) -> float:
        """The least time of a microbatch's transfers from a rank to the next and back; 0 for one group of devices."""
        ways_s = (level.latency_s + size_bytes / level.transfer_bytes_per_s for level, size_bytes in self._crossed)
        return 2 * min(ways_s, default=0.0)

    @cached_property
    def _crossed(self) -> list[tuple[Level, int]]:
        """The levels over which groups may send, each with the fewest bytes that pass a cut."""
        levels = grouped(self.problem.cluster, self.recipe.form.devices).levels
        edges = self.edge_bytes[1:-1]
        least = self.recipe.form.devices * int(edges.min()) if len(edges) else 0
        return [(level, least) for level in levels if level.size > 1]

    @property
    def _senders(self) -> int:
        form = self.recipe.form
        return 1 if form.sequence_parallel else form.tensor

    @cached_property
    def links(self) -> dict[str, DeviceGroupLinks]:
        """Those of the form's axes (`axis_links`)."""
        return axis_links(self.problem.cluster, self.recipe.form)

    def regathered_s(self, cut: int) -> float:
        """The seconds in which receivers gather these shares of the bytes that pass the cut."""
        links = self.links["tensor"]
        return links.seconds("all-gather", float(self.edge_bytes[cut]) * self._senders) if self._senders > 1 else 0.0

    def at(self, data: int, *, pipelined: bool) -> "ReplicaTerms":
        """The terms with `data` replicas, of one stage or of several."""
        key = data, pipelined
        if key not in self._at:
            own = self
            if self.recipe.a2a_overlap:
                # Before and after all pairs, the first rank computes the microbatches in flight: with two stages a
                # rank, and as many ranks as the devices allow; with more stages they are fewer.
                ranks = self.problem.cluster.devices // self.recipe.form.devices // data
                microbatches = self.problem.batch_size // data // self.recipe.microbatch_size
                own = replace(self, alone=min((1.5 * ranks if pipelined else 1) / microbatches, 1.0), _at={})
            self._at[key] = ReplicaTerms(terms=own, data=data, pipelined=pipelined)
        return self._at[key]

    def _by_block(self, by_kind: Sequence[float]) -> FloatArray:
        return np.asarray(by_kind, dtype=np.float64)[list(self.model.blocks)]

    def _exchanged_s(self, collectives: Sequence[Collective]) -> tuple[float, float]:
        """Seconds of the collectives for which the device waits; and of those between experts, which may overlap."""
        form, waited_s = self.recipe.form, dict.fromkeys(AXES, 0.0)
        once = sends_tokens_once(self.engine, form, self.problem.cluster.device.name)
        for each in collectives:
            if getattr(form, each.axis) > 1:
                links, routing = self.links[each.axis], each.routing if once else None
                waited_s[each.axis] += each.count * links.seconds(each.kind, each.size_bytes, routing)
        if form.sequence_parallel:
            waited_s["tensor"] *= 1 - self.engine.times.tensor_hidden
        experts_s = waited_s.pop("expert")
        return sum(waited_s.values()), experts_s


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaTerms:
    """The terms of a recipe with `data` replicas, as sums over blocks.

    Replicas count as neighbours: no placement exchanges faster while they compute.
    """

    terms: RecipeTerms
    data: int
    pipelined: bool
    _slowest_s: dict[int, float] = field(default_factory=dict)

    @cached_property
    def states(self) -> ReplicaStates:
        """The states of the parameters, and their exchanges."""
        own = self.terms
        return ReplicaStates(
            problem=own.problem,
            engine=own.engine,
            model=own.model,
            recipe=own.recipe,
            data=self.data,
            pipelined=self.pipelined,
        )

    def _beside_s(self, computing_s: FloatArray, exchanging_s: FloatArray) -> FloatArray:
        """The seconds of compute that overlaps an exchange."""
        slowed_s = computing_s + self.terms.engine.times.beside * exchanging_s
        return np.asarray(np.maximum(slowed_s, exchanging_s))

    @cached_property
    def forward_s(self) -> FloatArray:
        """Sums of the forwards' seconds."""
        alone_s, states = self._beside_s(self.terms.forward_s, self.states.gathered_s[0]), self.states
        copied_s = np.maximum(states.copied_s(self._left_bytes), states.copied_s(states.up_bytes))
        return sums(np.maximum(alone_s, copied_s))

    @cached_property
    def backward_s(self) -> FloatArray:
        """Sums of the backwards' seconds, without recomputation."""
        return sums(self._whole_backward_s - self.terms.again_s)

    @cached_property
    def again_s(self) -> FloatArray:
        """Sums of the recomputation's seconds."""
        return sums(self.terms.again_s)

    @cached_property
    def step_s(self) -> FloatArray:
        """Sums of all seconds of a microbatch."""
        return self.forward_s + sums(self._whole_backward_s)

    def slowest_rank_s(self, ranks: int) -> float:
        """Lower bound on the slowest rank's compute for a microbatch, with `ranks` ranks.

        It is an equal share of all compute or, of the k longest blocks for some k, the shortest ceil(k / ranks).
        """
        if ranks not in self._slowest_s:
            together_s = self._longest_s
            many = np.arange(1, len(together_s))
            part_s = float((together_s[many] - together_s[many - -(-many // ranks)]).max())
            self._slowest_s[ranks] = max(float(self.step_s[-1]) / ranks, part_s)
        return self._slowest_s[ranks]

    @cached_property
    def _longest_s(self) -> FloatArray:
        """Sums of the blocks' seconds for a microbatch, the longest first."""
        return sums(np.sort(np.diff(self.step_s))[::-1])

    @cached_property
    def _whole_backward_s(self) -> FloatArray:
        """Every block's backward, with recomputation."""
        computing_s, states = self.terms.backward_s + self.terms.again_s, self.states
        alone_s = self._beside_s(computing_s, states.gathered_s[1] + states.scattered_s)
        up_s, down_s = states.copied_s(self._left_bytes + states.up_bytes), states.copied_s(states.down_bytes)
        return np.asarray(np.maximum(alone_s, np.maximum(up_s, down_s)))

    @cached_property
    def _left_bytes(self) -> FloatArray:
        """The bytes that a microbatch keeps on the host for every block, from forward to backward.

        The offloaded layers are spread evenly among the others.
        """
        recipe = self.terms.recipe
        return self.terms.kept_bytes * recipe.offload_share * float(offloads_activations(recipe.offload))

    def no_slower(self, other: "ReplicaTerms") -> bool:
        """Whether no block's forward, backward or update takes longer than with the other terms."""
        pairs = (
            (self.forward_s, other.forward_s),
            (self.backward_s, other.backward_s),
            (self.states.update_s, other.states.update_s),
        )
        return all(bool((np.diff(mine) <= np.diff(its) + _ROUNDING * its[-1]).all()) for mine, its in pairs)

    @cached_property
    def kept_bytes(self) -> FloatArray:
        """Sums of the bytes that a microbatch in flight keeps on the device."""
        return sums(self.terms.kept_bytes - self._left_bytes)

    @cached_property
    def left_bytes(self) -> FloatArray:
        """Sums of the bytes that a microbatch in flight keeps on the host."""
        return sums(self._left_bytes)

    @cached_property
    def transient_bytes(self) -> FloatArray:
        """Every block's transient bytes while it runs, with the whole weights that are gathered for it."""
        return np.asarray(self.terms.transient_bytes + self.states.gathered_bytes + self.states.scattered_bytes)
