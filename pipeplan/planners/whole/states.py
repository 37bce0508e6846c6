"""States: the bytes of parameters, gradients and the optimizer on a device, as sums over blocks [start, stop); and the
seconds of their exchanges, copies and updates.

Replicas that share weights gather a block's before it runs; those that share gradients reduce a block's to shares after
its backward. In a pipeline, shards are gathered once a batch. With the optimizer on the host, weights and gradients are
copied over its link. An update on the host waits for its gradients, and the next batch for its weights.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.arrays import FloatArray, sums
from pipeplan.costs.groups import DeviceGroupLinks, links_among, replica_links
from pipeplan.costs.ledger import GATHERED_BLOCKS, Ledger, keeps_narrow_alone, ledger
from pipeplan.documents.degrees import offloads_optimizer
from pipeplan.documents.engines import SHARDINGS, TrainingEngine
from pipeplan.documents.forms import ModelForm
from pipeplan.documents.profile import DTYPE_BYTES
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.whole.degrees import Recipe
from pipeplan.planners.whole.parameters import BlockParameters, Entry, by_block, narrow_weights


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaStates:
    """The states of a recipe's parameters with `data` replicas, of one stage or of several (`pipelined`).

    Replicas count as neighbours: no placement exchanges faster while they compute.
    """

    problem: PlanningProblem
    engine: TrainingEngine
    model: ModelForm
    recipe: Recipe
    data: int
    pipelined: bool

    @property
    def ledger(self) -> Ledger:
        """The ledger of trained parameters outside experts."""
        return self.parameters[0].ledger

    @cached_property
    def parameters(self) -> tuple[BlockParameters, BlockParameters]:
        """Every block's trained parameters, and its frozen ones."""
        form = self.recipe.form  # devices that share sequences hold its parameters too
        replicas = self._sharing * form.context, form.expert_replicas(self._sharing)

        def ledgers(trained: bool) -> tuple[Ledger, Ledger]:
            outside, experts = (
                ledger(
                    self.engine.name,
                    self.recipe.sharding,
                    dtype=self.problem.profile.dtype,
                    optimizer=self.problem.options.optimizer_or_default,
                    replicas=sharing,
                    pipelined=self.pipelined,
                    optimizer_on_host=offloads_optimizer(self.recipe.offload),
                    trained=trained,
                )
                for sharing in replicas
            )
            return outside, experts

        return BlockParameters.of(self.model, ledgers, pipelined=self.pipelined)

    @property
    def _sharing(self) -> int:
        """The replicas of a group, which share the states."""
        return self.data // self.recipe.replicate

    def _shares(self, what: str) -> bool:
        return SHARDINGS.index(self.recipe.sharding) >= SHARDINGS.index(what)

    @property
    def _gathers_for_forward(self) -> bool:
        return self._shares("weights") or (self._shares("gradients") and self.engine.gathers_for_forward)

    def _amount(self, entry: Entry) -> FloatArray:
        """An entry of the ledger for all parameters of every block."""
        trained, frozen = self.parameters
        return trained.amount(entry) + frozen.amount(entry)

    @cached_property
    def gathered_s(self) -> tuple[FloatArray, FloatArray]:
        """The seconds of gathering every block's weights for its forward, and for its backward."""
        nothing = np.zeros(len(self.model.blocks))
        if self.pipelined or not self._gathers_for_forward:
            return nothing, nothing
        gathered_s = self._moved_s("all-gather")
        return gathered_s, gathered_s if self._shares("weights") else nothing

    @cached_property
    def scattered_s(self) -> FloatArray:
        """The seconds of reducing every block's gradients to shares, and of summing these among groups."""
        if self.pipelined or not self._shares("gradients"):
            return np.zeros(len(self.model.blocks))
        form, trained = self.recipe.form, self.parameters[0]
        groups = links_among(self.problem.cluster, self.recipe.replicate, self._sharing * form.devices)
        held = trained.outside / (self._sharing * form.context) + trained.experts / form.expert_replicas(self._sharing)
        shares = self.ledger.gathered * held
        summed_s = [groups.seconds("all-reduce", each) for each in shares.tolist()]
        return np.asarray(self._moved_s("reduce-scatter") + np.asarray(summed_s))

    def _moved_s(self, kind: str) -> FloatArray:
        moved = self.parameters if kind == "all-gather" else self.parameters[:1]  # gradients are of trained ones
        seconds = np.zeros(len(self.model.blocks))
        for links, parameters in zip(self._replica_links, ("outside", "experts"), strict=True):
            size_bytes = self.ledger.gathered * np.sum([getattr(each, parameters) for each in moved], axis=0)
            seconds += [links.seconds(kind, each) if each else 0.0 for each in size_bytes.tolist()]
        return seconds

    @cached_property
    def _replica_links(self) -> tuple[DeviceGroupLinks, DeviceGroupLinks]:
        return replica_links(self.problem.cluster, self.recipe.form, self._sharing)

    @cached_property
    def up_bytes(self) -> FloatArray:
        """The bytes of every block's weights that come from the host before they are gathered."""
        return self._amount(lambda each: each.weights_up)

    @cached_property
    def down_bytes(self) -> FloatArray:
        """The bytes of every block's gradients that go to the host with its backward."""
        return self._amount(lambda each: each.gradient_down)

    def copied_s(self, size_bytes: FloatArray) -> FloatArray:
        """The seconds of copying every block's bytes between device and host, in one direction."""
        host = self.problem.cluster.host
        return np.asarray(size_bytes / host.bandwidth_bytes_per_s if host else np.zeros_like(size_bytes))

    @cached_property
    def fixed_bytes(self) -> FloatArray:
        """Sums of the states' bytes."""
        trained, frozen = self.parameters
        narrow_bytes, _ = self._narrow
        return sums(self._amount(lambda each: each.kept) + narrow_bytes * (trained.every + frozen.every))

    @cached_property
    def _narrow(self) -> tuple[FloatArray, FloatArray]:
        alone = keeps_narrow_alone(self.recipe.sharding, self.recipe.offload)
        return narrow_weights(self.model, self.problem.profile, alone=alone, kept=self.engine.keeps_narrow)

    @cached_property
    def frozen_bytes(self) -> FloatArray:
        """Sums of the bytes of weights that are not trained."""
        return sums(self.parameters[1].amount(lambda each: each.kept))

    @cached_property
    def host_bytes(self) -> FloatArray:
        """Sums of the states' bytes on the host."""
        return sums(self._amount(lambda each: each.host))

    @property
    def gathered_bytes(self) -> FloatArray:
        """The bytes of the whole weights that a device gathers while a block runs."""
        blocks = GATHERED_BLOCKS * (not self.pipelined and self._shares("weights"))
        trained, frozen = (self.ledger.gathered * each.every for each in self.parameters)
        return np.asarray(blocks * (trained + frozen))

    @property
    def scattered_bytes(self) -> FloatArray:
        """The bytes of every block's whole gradients, which a device reduces to shares."""
        scatters = not self.pipelined and self._shares("gradients")
        return np.asarray(scatters * (self.ledger.gathered * self.parameters[0].every))

    @cached_property
    def exchanged_bytes(self) -> FloatArray:
        """Sums of the bytes that a device exchanges once a batch, as of an all-reduce.

        An all-reduce is a reduce-scatter and an all-gather. In a pipeline, shares need both once a batch; ZeRO-1 and 2
        gather the weights after their update; other shares need theirs for every microbatch. Frozen weights are only
        gathered, where they are shared. Experts have fewer replicas, farther from each other: their bytes count as the
        bytes outside experts that would take as long.
        """
        ledger, (trained, frozen) = self.ledger, self.parameters
        exchanged: float | FloatArray = ledger.exchanged if not self._shares("gradients") else 0.0
        if self.recipe.sharding == "optimizer":
            exchanged = (ledger.exchanged + self._narrow[1]) / 2
        if self._shares("gradients") and self.pipelined:
            exchanged = ledger.gathered
        elif self._shares("gradients") and not self._gathers_for_forward:
            exchanged = ledger.gathered / 2
        gathered = ledger.gathered / 2 if self.pipelined and self._gathers_for_forward else 0.0
        outside = exchanged * trained.outside + gathered * frozen.outside
        experts = exchanged * trained.experts + gathered * frozen.experts
        outside_s, experts_s = (each.seconds("all-reduce", float(experts.sum())) for each in self._replica_links)
        return sums(outside + (experts * experts_s / outside_s if outside_s else 0.0))

    @cached_property
    def experts_exchanged_s(self) -> FloatArray:
        """Sums of the exchange seconds of devices that hold the same experts, where all else has one replica."""
        outside, among = self._replica_links
        exchanged = self.ledger.exchanged * self.parameters[0].experts * (not outside.hops)
        return sums([among.seconds("all-reduce", each) if each else 0.0 for each in exchanged.tolist()])

    @cached_property
    def tied_bytes(self) -> FloatArray:
        """Sums of the bytes of gradients whose weights the first stage holds as well: a pipeline has copies of them."""
        trained = by_block(self.model, lambda kind: kind.tied_parameters - kind.frozen_tied_parameters)
        return sums(self.ledger.exchanged * trained)

    @cached_property
    def update_s(self) -> FloatArray:
        """Sums of an update's seconds."""
        profile, host = self.problem.profile, self.problem.cluster.host
        if host and offloads_optimizer(self.recipe.offload):
            link_s = self.copied_s(self._amount(lambda each: each.update_link))
            return sums(link_s + self._amount(lambda each: each.update_host) / host.update_bytes_per_s)
        seconds = profile.overheads.update_s_per_byte * DTYPE_BYTES[profile.dtype] * self.ledger.updated
        return sums(seconds * self.parameters[0].every)
