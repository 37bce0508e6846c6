"""Engine options: the checks of degrees, schedule and sharding for an engine that need no profile."""

from math import gcd

from pipeplan.documents.degrees import ANY_OFFLOAD
from pipeplan.documents.engines import (
    TrainingEngine,
    cannot_graph,
    cannot_overlap_a2a,
    engine_named,
    require_degrees,
    require_offload_share,
    require_replicate,
    require_sharding,
    with_optimizer,
)
from pipeplan.documents.forms import AXES, Form
from pipeplan.errors import require
from pipeplan.planners.problem import Options
from pipeplan.schedules.registry import schedule_named


def require_engine_options(options: Options, *, devices: int, batch_size: int) -> None:
    """Raises InvalidInputError for options that the engine, the devices or the batch rule out."""
    optimizer = options.optimizer_or_default
    engine = with_optimizer(engine_named(options.engine or ""), optimizer)
    if options.schedule is not None:
        known = engine.schedules or ()
        rule = f"must be one of {', '.join(known)} for the engine {engine.name}"
        require(schedule_named(options.schedule).name in known, "schedule", rule, options.schedule)
    known = tuple(dict.fromkeys((*engine.shardings, *engine.pipelined_shardings)))
    rule = f"must be one of {', '.join(known)} for the engine {engine.name} with the optimizer {optimizer}"
    require(options.sharding in (None, *known), "sharding", rule, options.sharding)
    rule = f"must be one of {', '.join(engine.recomputes)} for the engine {engine.name}"
    require(options.recompute_unit in (None, *engine.recomputes), "recompute_unit", rule, options.recompute_unit)
    asked = options.sequence_parallel
    rule = f"must be off for the engine {engine.name}, which has none"
    require(engine.sequence_parallel or not asked, "sequence_parallel", rule, asked)
    require(options.tensor != 1 or not asked, "sequence_parallel", "needs tensor parallelism", asked)
    unit = "block" if options.recompute_unit == "block" and options.recompute else "none"
    if options.graphs:
        graph = cannot_graph(engine, recompute=unit, offload=options.offload or "none")
        require(graph is None, "graphs", graph or "", options.graphs)
    if options.a2a_overlap:
        form, pipelined = Form(expert=options.expert or 2), (options.stages or 1) > 1
        apart = cannot_overlap_a2a(engine, form, recompute=unit, pipelined=pipelined, interleaved=options.chunks != 1)
        require(apart is None, "a2a_overlap", apart or "", options.a2a_overlap)
    if options.offload_share is not None:
        offload = "both" if options.offload == ANY_OFFLOAD else options.offload or "none"
        require_offload_share(engine, offload, options.offload_share)
    _require_shares(options, engine, devices=devices, batch_size=batch_size)
    _require_schedule(options, engine)


def _require_shares(options: Options, engine: TrainingEngine, *, devices: int, batch_size: int) -> None:
    """Raises InvalidInputError for degrees that the engine does not have, or that divide no devices or no batch."""
    require_degrees(engine, devices, {axis: getattr(options, axis) or 1 for axis in AXES})
    ranks, replicas, groups = options.stages or 1, options.data or 1, (options.tensor or 1) * (options.context or 1)
    require(devices % groups == 0, "context", f"must with tensor divide the cluster's {devices} devices", groups)
    rule = f"must be at most {devices // groups}: tensor and context leave so many groups of {devices} devices"
    require(ranks * groups <= devices, "stages", rule, ranks)
    require(batch_size % replicas == 0, "data", f"must divide the batch ({batch_size} samples)", replicas)
    left = devices // groups // ranks
    rule = f"must be at most {left}: tensor, context and stages leave so many replicas of {devices} devices"
    require(replicas <= left, "data", rule, replicas)
    size, share = options.microbatch_size or 1, batch_size // replicas
    require_expert_shares(options, engine, most=left * groups)
    rule = f"must divide the {share} samples of a batch that each of the {replicas} replicas has"
    require(share % size == 0, "microbatch_size", rule, size)
    rule = (
        f"must be at most {share // size} for the engine {engine.name}: its pipelines need a microbatch for each stage"
    )
    require(ranks <= share // size or not engine.fills_pipelines, "stages", rule, ranks)
    if options.data and options.microbatch_size and (options.chunks or 1) > 1:
        rule = f"must be 1 where {ranks} ranks do not divide a replica's {share // size} microbatches"
        require(share // size % ranks == 0, "chunks", rule, options.chunks)


def require_expert_shares(options: Options, engine: TrainingEngine, *, most: int) -> None:
    """Raises InvalidInputError for experts that the `most` devices of a stage cannot share evenly, and for groups into
    which its replicas cannot be divided.
    """
    own, tensor, expert = options.expert_tensor, options.tensor, options.expert or 1
    rule = f"must be left out for the engine {engine.name}, whose experts have the tensor degree"
    require(engine.whole_experts or own in (None, tensor), "expert_tensor", rule, own)
    rule = f"must be 1 or the tensor degree, {tensor}"
    require(own is None or tensor is None or own in (1, tensor), "expert_tensor", rule, own)
    least = own or (1 if engine.whole_experts else tensor or 1)
    rule = f"must be at most {most // least}: a stage has at most {most} devices, and an expert {least} of them"
    require(expert * least <= most, "expert", rule, expert)
    together = 1  # replicas with whole copies of the experts, where their number is known
    if options.data is not None and tensor is not None and options.context is not None:
        devices, together = tensor * options.context * options.data, expert * least
        together //= gcd(together, tensor * options.context)
        rule = f"must divide, with the {least} devices of an expert, the {devices} of a stage (tensor x context x data)"
        require(devices % (expert * least) == 0, "expert", rule, expert)
    require_replicate(engine, options.replicate or 1, data=options.data, together=together)


def _require_schedule(options: Options, engine: TrainingEngine) -> None:
    """Raises InvalidInputError for numbers of stages that the schedule, the sharding or the engine does not have."""
    known, chunks, asked = engine.schedules, options.chunks or 1, options.schedule
    interleaves = known is None or "1f1b-interleaved" in known
    rule = f"must be 1 for the engine {engine.name}, which has no ranks of several stages"
    require(interleaves or chunks == 1, "chunks", rule, chunks)
    rule = "must be 1 where one rank holds all blocks"
    require(options.stages != 1 or chunks == 1, "chunks", rule, chunks)
    if asked is not None:
        laws = schedule_named(asked)
        rule = f"must be 1 for the schedule {laws.name}"
        require(not laws.single_stage or options.stages in (None, 1), "stages", rule, options.stages)
        require(laws.chunked or chunks == 1, "chunks", rule, chunks)
        rule = f"must be above 1 for the schedule {laws.name} on the engine {engine.name}"
        require(laws.single_stage or options.stages != 1, "stages", rule, options.stages)
        require(not laws.chunked or options.chunks != 1, "chunks", rule, options.chunks)
    if options.sharding is not None and options.stages is not None:
        require_sharding(engine, options.sharding, pipelined=options.stages > 1)
