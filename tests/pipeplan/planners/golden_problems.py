"""Problems by name, for the golden answers of the planners: each is built again from a few numbers.

A row of `tests/golden/planners.json` names a builder of `BUILDERS` and gives its arguments. Builders draw from a seed
or repeat a few blocks. `problem_id` shows whether a builder still makes the problem that was answered.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import auto, exact, partition, search, whole
from benchmarks.graphs import CLUSTERS, imported
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.files import parse
from pipeplan.documents.forms import Collective, ModelForm
from pipeplan.documents.identity import content_id, text_id
from pipeplan.documents.profile import Device, Profile
from pipeplan.planners.problem import Options, PlanningProblem
from tests.pipeplan.builders import PLENTY, Cell
from tests.pipeplan.model_forms import transformer
from tests.pipeplan.planners.auto.random_problems import (
    mid_size_problem,
    on_three_levels,
    pipeline_problem,
    random_problem,
    with_ties,
)
from tests.pipeplan.planners.bert_like import bert_like
from tests.pipeplan.planners.exact.mixed import Gpu, mixed_problem

PROFILES = Path(__file__).parents[2] / "data" / "profiles"
GB, GIB = 10**9, 2**30


def problem_id(problem: PlanningProblem) -> str:
    """16 digits of what is planned: the profiles, the cluster, the batch and the options."""
    documents = (problem.profile, *problem.other_profiles, problem.cluster, problem.options)
    return text_id(" ".join([*map(content_id, documents), str(problem.batch_size)]))[:16]


def drawn(*, seed: int, gb: float | None = None) -> PlanningProblem:
    """Up to ten blocks of one of many kinds on up to twelve devices."""
    return _with_memory(random_problem(seed)[1], gb)


def mid_size(
    *, seed: int, gb: float | None = None, tied: bool = False, racks: bool = False, frozen: float = 0.0
) -> PlanningProblem:
    """10 to 16 blocks on slow networks; with weights shared, on three levels, or a share of the first blocks frozen."""
    problem = mid_size_problem(seed)
    problem = with_ties(problem, seed) if tied else problem
    problem = on_three_levels(problem, seed) if racks else problem
    blocks = problem.profile.blocks
    stop = int(frozen * len(blocks))
    still = tuple(replace(block, frozen_bytes=block.weight_bytes) for block in blocks[:stop])
    problem = replace(problem, profile=replace(problem.profile, blocks=(*still, *blocks[stop:])))
    return _with_memory(problem, gb)


def pipeline(
    *, seed: int, blocks: int | None = None, devices: int | None = None, batch: int = 4, gb: float | None = None
) -> PlanningProblem:
    """Drawn blocks that were measured at one size."""
    return _with_memory(replace(pipeline_problem(seed, blocks=blocks, devices=devices), batch_size=batch), gb)


def chain(*, blocks: int, servers: int, batch: int, sigma: float = 0.0, gb: float = 16) -> PlanningProblem:
    """The 16-bit blocks of `benchmarks.auto`, equal or drawn, on servers of 8 at 10 Gb/s."""
    return auto.transformer(blocks, servers, batch, sigma=sigma, gigabytes=gb)


def long_chain(*, blocks: int, servers: int, batch: int, gb: float, is_drawn: bool = False) -> PlanningProblem:
    """The blocks of `benchmarks.search`, uneven or drawn, on servers of 8 at 100 Gb/s."""
    weights = search.drawn(blocks) if is_drawn else search.uneven(blocks)
    return search.instance(weights, servers, gb, batch)


def bert(*, devices: int, gb: float, batch: int = 1024) -> PlanningProblem:
    """BERT-32 between a heavy embedding and a heavy head."""
    return bert_like(devices=devices, memory_bytes=int(gb * GB), batch_size=batch)


def authors(*, model: str, cluster: str = "", batches: int = 32, gb: float = 16, gbits: float = 10) -> PlanningProblem:
    """A graph of PipeDream's authors, on a cluster of `benchmarks.graphs` or on 16 devices of one level."""
    profile = imported(model)
    levels = CLUSTERS[cluster] if cluster else partition.servers((16, gbits / 8 * GB))
    device = Device(name="device", memory_bytes=int(gb * GB))
    (size,) = profile.microbatch_sizes
    return PlanningProblem(profile=profile, cluster=Cluster(device=device, levels=levels), batch_size=batches * size)


def branches(*, lengths: Sequence[int], devices: int, batches: int = 8, gb: float = 16) -> PlanningProblem:
    """Branches of drawn blocks, by `benchmarks.partition`."""
    device = Device(name="device", memory_bytes=int(gb * GB))
    cluster = Cluster(device=device, levels=partition.servers((devices, 1.25e9)))
    return PlanningProblem(profile=partition.drawn(*lengths), cluster=cluster, batch_size=64 * batches)


def uneven_chain(*, case: int) -> PlanningProblem:
    """A problem of `benchmarks.exact`, by its place; the options are a row's own."""
    return replace(exact.cases()[case].problem, options=Options())


def mixed(*, seed: int, blocks: int = 8, batch: int = 8, tight: bool = False) -> PlanningProblem:
    """Two or three types of devices, of which one is slower and one has less memory."""
    draw = random.Random(seed)
    cells = [
        Cell(
            forward_s=draw.uniform(0.5, 1.5),
            backward_s=draw.uniform(1.0, 3.0),
            weight_bytes=draw.randrange(10, 60),
            output_bytes=draw.randrange(1, 9),
            activation_bytes=draw.randrange(10, 50),
        )
        for _ in range(blocks)
    ]
    held_bytes = sum(4 * cell.weight_bytes + 2 * cell.activation_bytes for cell in cells)
    memory_bytes = held_bytes // draw.choice([2, 3]) if tight else PLENTY
    gpus = [
        Gpu(name="fast", count=draw.choice([2, 4])),
        Gpu(name="slow", count=draw.choice([2, 4]), slowness=draw.choice([1.5, 2.0, 3.0]), memory_bytes=memory_bytes),
    ]
    devices = sum(gpu.count for gpu in gpus)
    levels = ((devices, draw.choice([5.0, 50.0, 500.0])),)
    return mixed_problem(cells, gpus, batch_size=batch, levels=levels, sizes=(1, 2))


def large(*, model: str, cluster: str, batch: int, gb: float | None = None) -> PlanningProblem:
    """A GPT or Llama, as estimated for its device, on a cluster of such devices."""
    return _with_memory(
        PlanningProblem(profile=_large_profile(model), cluster=_large_clusters()[cluster], batch_size=batch), gb
    )


def forms(
    *, layers: int, servers: int, network: float, memory_gib: float, batch: int, hidden: int = 1024, engine: str
) -> PlanningProblem:
    """Layers of a GPT with their forms, on servers of 4, for another engine."""
    profile = _forms_profile(layers, hidden)
    device = replace(profile.device, memory_bytes=int(memory_gib * GIB))
    levels = (
        Level(size=4, bandwidth_bytes_per_s=200e9, latency_s=2e-6),
        Level(size=servers, bandwidth_bytes_per_s=network, latency_s=1e-5),
    )
    cluster = Cluster(device=device, levels=levels)
    options = Options(engine=engine, optimizer="adam")
    return PlanningProblem(profile=profile, cluster=cluster, batch_size=batch, options=options)


def experts(*, batch: int, servers: int = 4, network: float = 100e9, engine: str) -> PlanningProblem:
    """Layers with experts, on servers of 8, for another engine."""
    profile = _experts_profile()
    levels = (
        Level(size=8, bandwidth_bytes_per_s=200e9, latency_s=2e-6),
        Level(size=servers, bandwidth_bytes_per_s=network, latency_s=1e-5),
    )
    cluster = Cluster(device=profile.device, levels=levels)
    options = Options(engine=engine, optimizer="adam")
    return PlanningProblem(profile=profile, cluster=cluster, batch_size=batch, options=options)


def estimated(*, model: str, cluster: str, batch: int, gbits: float | None = None, engine: str) -> PlanningProblem:
    """GPT-7B or GPT-175B of `benchmarks.whole`, on A100s with these Gb/s between servers, for another engine."""
    profile = _estimated_profile(model)
    options = Options(engine=engine, optimizer="adamw")
    machines = whole.on_network(profile, cluster, gbits)
    return PlanningProblem(profile=profile, cluster=machines, batch_size=batch, options=options)


BUILDERS: Mapping[str, Callable[..., PlanningProblem]] = {
    builder.__name__: builder
    for builder in (
        drawn,
        mid_size,
        pipeline,
        chain,
        long_chain,
        bert,
        authors,
        branches,
        uneven_chain,
        mixed,
        large,
        forms,
        experts,
        estimated,
    )
}


def built(builder: str, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> PlanningProblem:
    """The builder's problem with these options besides its own."""
    problem = BUILDERS[builder](**arguments)
    listed: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }
    return replace(problem, options=replace(problem.options, **listed))


def _with_memory(problem: PlanningProblem, gb: float | None) -> PlanningProblem:
    if gb is None:
        return problem
    device = replace(problem.cluster.device, memory_bytes=int(gb * GB))
    return replace(problem, cluster=replace(problem.cluster, device=device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """A profile of an embedding, one layer and a head, and how often its layer is repeated."""

    layers: int
    profile: Profile

    @property
    def whole(self) -> Profile:
        """The profile of all layers."""
        first, layer, last = self.profile.blocks
        layers = tuple(replace(layer, name=f"layer.{index}") for index in range(self.layers))
        return replace(self.profile, blocks=(first, *layers, last))


@cache
def _large() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((PROFILES / "large_models.json").read_text())
    return content


@cache
def _large_profile(model: str) -> Profile:
    return parse(Repeated, _large()["models"][model]).whole


@cache
def _large_clusters() -> dict[str, Cluster]:
    return {name: parse(Cluster, content) for name, content in _large()["clusters"].items()}


@cache
def _forms_profile(layers: int, hidden: int) -> Profile:
    return transformer(
        layers=layers,
        hidden=hidden,
        heads=16,
        sequence=512,
        vocabulary=4096,
        tensors=(1, 2, 4),
        sizes=(1, 2),
        flops=1e14,
    )


@cache
def _experts_profile() -> Profile:
    held = transformer(layers=4, hidden=1024, heads=16, sequence=512, tensors=(1, 2, 4), sizes=(1,))
    forms = [_with_experts(each, count) for each in held.forms for count in (1, 2, 8)]
    return replace(held, forms=tuple(forms))


def _with_experts(model: ModelForm, count: int) -> ModelForm:
    """The form, whose layers have experts on `count` devices."""
    first, layer, last = model.kinds
    form = replace(model.form, expert=count)
    traded = (Collective(kind="all-to-all", axis="expert", size_bytes=2**22 // form.tensor, count=2),) * (count > 1)
    measured = tuple(
        replace(
            each,
            forward_collectives=each.forward_collectives + traded,
            backward_collectives=each.backward_collectives + traded,
        )
        for each in layer.measurements
    )
    layer = replace(layer, expert_parameters=2**26 // form.expert_devices, measurements=measured)
    return replace(model, form=form, kinds=(first, layer, last))


@cache
def _estimated_profile(model: str) -> Profile:
    return whole.estimated({"7B": whole.SMALLER, "175B": whole.MODEL}[model])
