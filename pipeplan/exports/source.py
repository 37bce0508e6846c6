"""Source: the input of an export, and the roles of a language model's blocks."""

import re
from dataclasses import dataclass

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.engines import OUR_RUNTIME
from pipeplan.documents.names import Spec, parse_spec
from pipeplan.documents.plan import Plan
from pipeplan.documents.tied import TiedWeights
from pipeplan.errors import InvalidInputError, require
from pipeplan.programs.program import pipelines_in_a_row, stages_in_a_row
from pipeplan.schedules.registry import schedule_named

ESTIMATED = "estimated: the plan's profile was computed from a datasheet, not measured"

_EMBEDDING = re.compile(r"emb|wte", re.IGNORECASE)
_HEAD = re.compile(r"head|output|logits|classifier", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """A plan with its id, the cluster for which it is made, and its profile's blocks: their names, and which of them
    share weights.
    """

    plan_id: str
    plan: Plan
    cluster: Cluster
    block_names: tuple[str, ...]
    tied_weights: tuple[TiedWeights, ...] = ()

    @property
    def heading(self) -> list[str]:
        """Which plan this is, and whether its costs were measured."""
        plan = self.plan
        title = f"pipeplan {self.plan_id}: {plan.model.name!a}, {plan.planner}, {plan.schedule}, {plan.workers} workers"
        return [title, *([ESTIMATED] if plan.estimated else [])]

    @property
    def short_id(self) -> str:
        """The start of the plan's id, as names of files and jobs hold it."""
        return re.sub(r"[^0-9a-z]", "", self.plan_id)[:8]

    @property
    def spec(self) -> Spec | None:
        """The SPEC of the plan's model; None if the profile has none that can be read."""
        try:
            return parse_spec(self.plan.model.spec or "", field="model")
        except InvalidInputError:
            return None

    @property
    def tied(self) -> bool | None:
        """Whether the embedding and the head share weights; None if neither the profile nor its SPEC says so.

        A profile of an earlier version lists no shared weights, and a folder's SPEC does not hold what its config says.
        """
        ends = {0, len(self.block_names) - 1}
        if any(ends <= set(each.blocks) for each in self.tied_weights):
            return True
        spec = self.spec
        if spec is None or not spec.is_hugging_face:
            return None
        said = spec.options.get("tie_word_embeddings", None if spec.path else False)
        return None if said is None else bool(said)

    @property
    def pipeline_ranks(self) -> int:
        """The ranks of one pipeline: fewer than stages where a rank holds several."""
        return self.plan.depth // self.plan.chunks

    @property
    def recomputes_attention(self) -> bool:
        """Whether any stage runs the core of attention again, and nothing else."""
        return any(stage.recompute_unit == "attention" for stage in self.plan.stages)

    @property
    def devices_a_node(self) -> int:
        """The devices of the cluster's innermost level, which is taken for a node."""
        return self.cluster.levels[0].size


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """A stage of a language model: transformer layers [start, stop), the embedding before and the head after them."""

    embedding: bool
    start: int
    stop: int
    head: bool


def layers_of(source: ExportSource) -> tuple[tuple[Layers, ...], list[str]]:
    """The layers of every stage, and notes on what had to be assumed."""
    names, stages = source.block_names, source.plan.stages
    embedding = bool(names) and _EMBEDDING.search(names[0]) is not None
    head = len(names) > 1 and _HEAD.search(names[-1]) is not None
    first, last = int(embedding), stages[-1].stop - int(head)
    layers = tuple(
        Layers(
            embedding=stage is stages[0],
            start=max(stage.start, first) - first,
            stop=max(min(stage.stop, last), first) - first,
            head=stage is stages[-1],
        )
        for stage in stages
    )
    missing = [what for what, there in (("embedding", embedding), ("head", head)) if not there]
    assumed = [
        f"The profile has no block with the name of the {what}: every block there counts as a transformer layer."
        for what in missing
    ]
    return layers, assumed


def require_engine(source: ExportSource, target: str, *engines: str) -> None:
    """Raises InvalidInputError for a plan that is for none of these engines: it would be another plan there."""
    rule = f"cannot be {target} for a plan that is made for the engine {source.plan.engine}"
    require(source.plan.engine in engines, "format", rule, source.plan.engine)


def require_grid(source: ExportSource, target: str, engine: str) -> int:
    """The replicas of every stage. Raises InvalidInputError if they differ: the target has one number for all.

    `engine`: the one whose plans the target trains unchanged; it also accepts plans for our runtime.
    """
    require_engine(source, target, OUR_RUNTIME, engine)
    width = source.plan.width
    if width is None:
        rule = f"cannot be {target}: it has one number of replicas for all stages, and this plan's differ"
        raise InvalidInputError("format", rule, ", ".join(map(str, source.plan.replicas)))
    if schedule_named(source.plan.schedule).v_shaped:
        rule = f"cannot be {target}: its ranks would hold other stages, and this plan's hold two in a V"
        raise InvalidInputError("format", rule, source.plan.schedule)
    if source.plan.dtype == "float64":
        raise InvalidInputError("format", f"cannot be {target}: it does not train in float64", source.plan.dtype)
    if source.plan.autocast is not None:
        rule = f"cannot be {target}: its blocks compute under autocast, for which the export has no setting"
        raise InvalidInputError("format", rule, source.plan.autocast)
    if source.plan.order not in (None, tuple(range(source.plan.stages[-1].stop))):
        rule = f"cannot be {target}: it cuts a chain of blocks, and this plan's stages take a graph's in another order"
        raise InvalidInputError("format", rule, list(source.plan.order or ()))
    return width


def grid_notes(
    source: ExportSource, engine: str, *, runs: tuple[str, ...] = ("1f1b", "data-parallel", "1f1b-interleaved")
) -> list[str]:
    """Notes on what the engine cannot take over from the plan. It runs these schedules, 1F1B instead of all others, and
    equal pipelines.
    """
    plan = source.plan
    notes = []
    if plan.schedule not in runs:
        staleness = ", and weights without staleness" if not schedule_named(plan.schedule).flushes else ""
        notes.append(
            f"The plan's schedule is {plan.schedule}; {engine} runs 1F1B with a flush: expect another throughput,"
            f" and another use of memory, than predicted{staleness}."
        )
    if plan.split_backward:
        notes.append(f"The plan splits the backward (2BP); {engine}'s schedule does not.")
    if any(stage.recompute for stage in plan.stages) and not all(stage.recompute for stage in plan.stages):
        recomputing = ", ".join(str(i) for i, stage in enumerate(plan.stages) if stage.recompute)
        notes.append(f"Only stages {recomputing} recompute in the plan; here all do, which costs time.")
    ranks = source.pipeline_ranks
    replicas = plan.replicas[:ranks]
    if ranks > 1 and plan.width != 1 and plan.placement != stages_in_a_row(replicas):
        order = "pipeline after pipeline" if plan.placement == pipelines_in_a_row(replicas) else "in another order"
        notes.append(f"The plan numbers its ranks {order}; here all replicas of a stage come in a row.")
    return notes
