"""Made: makes the plan of a configuration and its stages, with the costs of one group of devices.

A form's group of devices counts as one device, on the cluster of groups (`costs.groups`): transfers, ports and
exchanges are those of `costs.estimate`. What a device holds comes from its engine's ledger.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

from pipeplan.arrays import FloatArray
from pipeplan.costs.estimate import estimate
from pipeplan.costs.groups import grouped, links_among
from pipeplan.costs.memory import keeps_master_weights
from pipeplan.documents.engines import TrainingEngine
from pipeplan.documents.identity import known_id
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.plan import ClosedForm, Plan, Stage, Worker
from pipeplan.documents.profile import Block, Profile
from pipeplan.documents.stage_costs import StageCosts
from pipeplan.documents.stage_memory import StageMemory
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.whole.degrees import Degrees
from pipeplan.planners.whole.exchanged import hops_before_s, placed_beyond_least_s
from pipeplan.planners.whole.placements import placement
from pipeplan.planners.whole.split import Split, Splitter, in_flight
from pipeplan.planners.whole.terms import ReplicaTerms
from pipeplan.schedules.registry import schedule_named

MEETING = (1.0, 1.5)
"""The slowdowns of transfers that share links, for each of which splits are made. The last one decides their order.
"""

COST_MODEL = "forms on a cluster of groups"


@lru_cache(maxsize=256)
def profile_of_groups(terms: ReplicaTerms) -> Profile:
    """The profile of a group of devices: the seconds of one device, and the outputs of all together.

    A block's weights are the bytes that its replicas exchange, after the devices that share sequences have summed
    theirs, and those that are not trained. Its backward includes recomputation: an exchange can run beside both.
    """
    own, states, profile = terms.terms, terms.states, terms.terms.problem.profile
    together, holding = own.recipe.form.devices, own.recipe.form.tensor
    names = [block.name for block in profile.blocks]
    first = own.model.kinds[own.model.blocks[0]].at(own.recipe.microbatch_size)
    before = [first.input_bytes, *own.edge_bytes[1:-1].tolist()]
    exchanged = [int(after - start) for start, after in pairwise(states.exchanged_bytes.tolist())]
    frozen = [int(after - start) for start, after in pairwise(states.frozen_bytes.tolist())]
    forward = [after - start for start, after in pairwise(terms.forward_s.tolist())]
    backward = [after - start for start, after in pairwise((terms.backward_s + terms.again_s).tolist())]
    blocks = tuple(
        Block(
            name=name,
            weight_bytes=holding * exchanged[index] + frozen[index],
            frozen_bytes=frozen[index],
            measurements=(
                Measurement(
                    microbatch_size=own.recipe.microbatch_size,
                    forward_s=forward[index],
                    backward_s=backward[index],
                    input_bytes=together * int(before[index]),
                    output_bytes=together * int(own.edge_bytes[index + 1]),
                    activation_bytes=0,
                ),
            ),
        )
        for index, name in enumerate(names)
    )
    return replace(profile, blocks=blocks, forms=(), edges=None, tied=(), tied_frozen=())  # `_own_exchange_s` has these


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanMaker:
    """Makes the plans of a configuration."""

    problem: PlanningProblem
    engine: TrainingEngine
    terms: ReplicaTerms
    degrees: Degrees
    splitter: Splitter
    _splits: dict[int, list[Split]] = field(default_factory=dict)
    _placed: dict[int, tuple[FloatArray, FloatArray]] = field(default_factory=dict)

    def splits(self, *, inside: int) -> list[Split]:
        """Some splits, the likely shortest batch first."""
        if inside not in self._splits:
            found = dict.fromkeys(self.splitter.several)
            if found and self.degrees.chunks == 1 < self.degrees.pipeline:
                reached_s = hops_before_s(self.terms, self.degrees, self.problem.cluster, inside=inside)
                for meeting in MEETING:
                    found |= dict.fromkeys(self.splitter.beside_slow_links(meeting * reached_s))
            self._splits[inside] = sorted(found, key=lambda stops: self.likely_s(stops, inside=inside))
        return self._splits[inside]

    def likely_s(self, stops: Split, *, inside: int) -> float:
        """An estimate of a batch's seconds: its bound as if half of all transfers shared a link. The first rank
        exchanges last.
        """
        if inside not in self._placed:
            placed = self.terms, self.degrees, self.problem.cluster
            reached_s = hops_before_s(*placed, inside=inside)
            self._placed[inside] = sum(MEETING) / 2 * reached_s, placed_beyond_least_s(*placed, inside=inside)
        reached_s, placed_s = self._placed[inside]
        return self.splitter.times.of(stops, reached_s) + float(placed_s[stops[0]])

    def plan(self, stops: Sequence[int], *, inside: int) -> Plan | None:
        """The plan with these stages and `inside` neighbouring replicas, not played; None if a device is too small."""
        if not self.splitter.fits(stops):
            return None
        problem, degrees = self.problem, self.degrees
        placed = placement(degrees.pipeline, degrees.data, inside=inside)
        stages = self._stages(stops)
        return Plan(
            planner="auto",
            cost_model=COST_MODEL,
            model=problem.profile.model,
            dtype=problem.profile.dtype,
            precision=problem.profile.precision,
            profile_id=known_id(problem.profile),
            cluster_id=known_id(problem.cluster),
            batch_size=degrees.batch_size,
            stages=stages,
            costs=self._costs(stages, placed),
            placement=placed,
            schedule=degrees.schedule,
            microbatch_size=degrees.microbatch_size,
            microbatches=degrees.microbatches,
            optimizer=problem.options.optimizer_or_default,
            memory_accounting=problem.options.memory,
            closed_form=self.closed_form(stops),
            optimal_in_flight=-int(-in_flight(degrees, 0) // 1),
            configurations_considered=1,
            master_weights=keeps_master_weights(problem.profile.dtype, problem.options.master_weights),
            chunks=degrees.chunks,
            estimated=problem.profile.estimated,
            warnings=problem.warnings,
            engine=self.engine.name,
            form=degrees.recipe.form,
            sharding=degrees.recipe.sharding,
            offload=degrees.recipe.offload,
            replicate=degrees.recipe.replicate,
            graphs=self._graphs if degrees.recipe.graphs else (),
            a2a_overlap=degrees.recipe.a2a_overlap,
            offload_share=degrees.recipe.offload_share,
            recompute_modules=self.terms.terms.model.modules if degrees.recipe.recompute == "modules" else (),
        )

    @property
    def _graphs(self) -> tuple[str, ...]:
        """The parts of layers in graphs: not a dense layer's products where passes run in pairs."""
        paired = {"mlp"} if self.degrees.recipe.a2a_overlap else set[str]()
        return tuple(part for part in self.terms.terms.model.graphs if part not in paired)

    def closed_form(self, stops: Sequence[int]) -> ClosedForm:
        """Equal steps of the slowest rank, and the bubble of the schedule (Narayanan et al. 2021, section 2.2)."""
        degrees, step_s, p = self.degrees, self.terms.step_s, self.degrees.pipeline
        stages_s = [step_s[stop] - step_s[start] for start, stop in zip((0, *stops), stops, strict=False)]
        slowest_s = max(float(sum(stages_s[rank::p])) for rank in range(p))
        batch_s = (degrees.microbatches + degrees.idle_steps) * slowest_s
        return ClosedForm(
            time_per_microbatch_s=batch_s / degrees.microbatches / degrees.data,
            throughput_samples_per_s=degrees.batch_size / batch_s,
            bubble_fraction=degrees.idle_steps / (degrees.microbatches + degrees.idle_steps),
        )

    def _stages(self, stops: Sequence[int]) -> tuple[Stage, ...]:
        degrees, terms = self.degrees, self.terms
        recompute, held = degrees.recipe.recompute, self.splitter.held_bytes(stops)
        fixed, kept, step_s = terms.states.fixed_bytes, terms.kept_bytes, terms.step_s
        ledger, not_trained = terms.states.ledger, terms.states.frozen_bytes
        by_host = self.splitter.held_by_hosts(stops)
        stages = []
        for number, (start, stop) in enumerate(zip((0, *stops), stops, strict=False)):
            states = float(fixed[stop] - fixed[start])
            frozen = float(not_trained[stop] - not_trained[start])
            share = (states - frozen) / ledger.kept if ledger.kept else 0.0
            activations = in_flight(degrees, number % degrees.pipeline) * float(kept[stop] - kept[start])
            memory = StageMemory(
                weights=int(share * ledger.weights) + int(frozen),
                gradients=int(share * ledger.gradients),
                master_weights=int(share * ledger.master_weights),
                optimizer_states=int(share * ledger.optimizer_states),
                activations=int(activations),
                transient=max(int(held[number] - states - activations), 0),
            )
            stages.append(
                Stage(
                    start=start,
                    stop=stop,
                    replicas=degrees.data,
                    recompute=recompute != "none",
                    recompute_unit="stage" if recompute == "none" else recompute,
                    time_s=float(step_s[stop] - step_s[start]),
                    memory_bytes=memory.total,
                    memory=memory,
                    host_bytes=int(by_host[number]),
                )
            )
        return tuple(stages)

    def _costs(self, stages: Sequence[Stage], placed: Sequence[Worker]) -> tuple[StageCosts, ...]:
        terms, form = self.terms, self.degrees.recipe.form
        around = estimate(
            profile_of_groups(terms),
            grouped(self.problem.cluster, form.devices),
            [replace(stage, recompute=False, recompute_unit="stage") for stage in stages],
            placed,
            microbatch_size=self.degrees.microbatch_size,
            optimizer=self.problem.options.optimizer_or_default,
            schedule=schedule_named(self.degrees.schedule),
        )
        last = Worker(stage=self.degrees.pipeline - 1, replica=placed[0].replica)
        apart = form.devices * placed.index(last)
        on_top = self.splitter.on_top_bytes([stage.stop for stage in stages]).tolist()
        return tuple(self._held(*each, apart) for each in zip(around, stages, on_top, strict=True))

    def _held(self, around: StageCosts, stage: Stage, most: float, apart: int) -> StageCosts:
        """A stage's costs with its device's memory, recomputation and update."""
        terms, update_s, start, stop = self.terms, self.terms.states.update_s, stage.start, stage.stop
        memory = stage.memory or StageMemory()
        kept = float(terms.kept_bytes[stop] - terms.kept_bytes[start])
        fixed = memory.gradients + memory.master_weights + memory.optimizer_states
        own, inside_s = terms.terms, self._own_exchange_s(start, stop, apart)
        after, exchanges, tail_s = stop < len(own.forward_s), self.degrees.data > 1, around.reduce_tail_s
        recompute_s, backward_s = (float(each[stop] - each[start]) for each in (terms.again_s, terms.backward_s))
        backward_s *= around.backward_s / (backward_s + recompute_s) if around.backward_s else 1.0
        if not self.engine.overlaps:
            tail_s = None
        return replace(
            around,
            activation_latency_s=around.activation_latency_s + (own.regathered_s(stop) if after else 0.0),
            gradient_latency_s=around.gradient_latency_s + (own.regathered_s(start) if start else 0.0),
            reduce_s=around.reduce_s + inside_s,
            reduce_inside_s=around.reduce_inside_s + inside_s,
            reduce_tail_s=None if tail_s is None else tail_s + inside_s,
            recompute_s=recompute_s,
            backward_s=backward_s,
            backward_input_s=backward_s,
            update_s=float(update_s[stop] - update_s[start]) + (0.0 if exchanges else inside_s),
            version_bytes=memory.weights,
            fixed_bytes=int(fixed + (0 if stage.recompute else most)),
            gradient_bytes=memory.gradients,
            activation_bytes=int(kept + (most if stage.recompute else 0)),
            input_bytes=int(kept),
            weight_gradient_bytes=None,
            own_gradient_bytes=0,
            split_activation_bytes=None,
            early_gradient_bytes=None,
        )

    def _own_exchange_s(self, start: int, stop: int, apart: int) -> float:
        """The seconds of the blocks' gradient exchanges except that of replicas; with a single replica, of all.

        Devices that share sequences sum their gradients first, and so do copies of experts in one replica. The first
        stage and the stage with a copy of its weights sum the copy's gradients; `apart` is the distance of the two in
        devices.
        """
        states, degrees, cluster = self.terms.states, self.degrees, self.problem.cluster
        exchanged, tied, experts_s = states.exchanged_bytes, states.tied_bytes, states.experts_exchanged_s
        inside_s = self.terms.terms.links["context"].seconds("all-reduce", float(exchanged[stop] - exchanged[start]))
        inside_s += float(experts_s[stop] - experts_s[start])
        copied = float(tied[-1] if start == 0 else tied[stop] - tied[start])
        if degrees.pipeline == 1 or copied == 0.0:
            return inside_s
        return inside_s + links_among(cluster, 2, apart).seconds("all-reduce", copied)
