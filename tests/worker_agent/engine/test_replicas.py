"""Exchanges among replicas while they compute: when gradients are on their way, and that it changes none of them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeplan.costs.collectives import BUCKET_BYTES, FIRST_BUCKET_BYTES
from pipeplan.errors import RunFailedError
from pipeplan.programs.footprint import footprints
from tests.schedules import ASP
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import train
from tests.worker_agent.runtime.test_executor import (
    CUTS,
    DATA,
    MODEL,
    RATE,
    SEED,
    STEPS,
    checkpoint_weights,
    distance,
    job_of,
)
from worker_agent.engine.backward import Computed, Deferred, Split, add_weight_gradients
from worker_agent.engine.replicas import ExchangeError, Replicas, buckets_of
from worker_agent.runtime.stage import StageBlocks

WIDE = 400
"""A weight of that many rows and columns is larger than the first bucket."""


def parameters(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype, device="meta")) for size in sizes]


def test_buckets_hold_each_parameter_once_the_last_ones_first_and_only_the_first_is_small() -> None:
    large = parameters((WIDE, WIDE), (WIDE,), (WIDE, WIDE), (WIDE,), (2048, 2048))
    assert buckets_of(large) == ((4,), (3, 2, 1, 0))
    small = parameters(*[(256, 256)] * 100, dtype=torch.float32)
    buckets = buckets_of(small)
    assert [place for bucket in buckets for place in bucket] == list(reversed(range(100)))
    sizes = [sum(4 * prod(small[place].shape) for place in bucket) for bucket in buckets]
    assert sizes == [FIRST_BUCKET_BYTES, 24 * 2**20]
    assert BUCKET_BYTES > 24 * 2**20


def test_a_bucket_holds_one_dtype() -> None:
    half = parameters((4,), dtype=torch.bfloat16)
    assert buckets_of([*parameters((4,)), *half, *parameters((4,))]) == ((2, 0), (1,))


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of one: what is exchanged comes back as it is."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch re-exports it at run time only
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.new_group([0])
    dist.destroy_process_group()


def gradients_of(replicas: Replicas, version: int, layers: nn.Module, x: Tensor) -> list[Tensor]:
    leaves = list(layers.parameters())
    output = layers(x).sum()
    with replicas.exchanging(version, leaves, None):
        output.backward()
    return [gradient for gradient in replicas.gradients(version, own=False) if gradient is not None]


def test_gradients_are_on_their_way_while_the_backward_goes_on(alone: dist.ProcessGroup) -> None:
    """The last layer's are taken before the first's come, once an exchange has shown that each is added to once."""
    layers = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE)).double()
    first, _, last = layers
    taken: list[bool] = []
    first.register_full_backward_pre_hook(lambda *_: taken.append(last.weight.grad is None))
    replicas = Replicas(alone, list(layers.parameters()))
    x = torch.randn(3, WIDE, dtype=torch.float64, requires_grad=True)
    found = [gradients_of(replicas, version, layers, x) for version in (1, 2)]
    assert taken == [False, True]
    layers(x).sum().backward()
    for gradients in found:
        for gradient, parameter in zip(gradients, layers.parameters(), strict=True):
            assert parameter.grad is not None
            assert torch.equal(gradient, parameter.grad)


def test_a_gradient_that_is_added_to_after_it_went_is_an_error_and_never_wrong(alone: dist.ProcessGroup) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.again = False

        def forward(self, x: Tensor) -> Tensor:
            def part(y: Tensor) -> Tensor:
                return torch.as_tensor(self.linear(y))

            once = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=True)
            twice = torch.utils.checkpoint.checkpoint(part, once, use_reentrant=True) if self.again else once
            return torch.as_tensor(twice)

    layer = Changing()
    replicas = Replicas(alone, list(layer.parameters()))
    x = torch.randn(3, 4, requires_grad=True)
    gradients_of(replicas, 1, layer, x)
    layer.again = True
    with pytest.raises(RunFailedError, match="adds to a parameter's gradient twice"):
        gradients_of(replicas, 2, layer, x)


def test_an_exchange_that_fails_inside_a_backward_is_no_error_of_the_block(
    alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = StageBlocks(
        [nn.Linear(4, 4)], first_block=0, criterion=None, recompute=False, seed=0, device=torch.device("cpu")
    )
    leaves = list(stage.blocks[0].parameters())
    replicas = Replicas(alone, leaves)

    def train(version: int) -> None:
        stage.forward(version, (torch.ones(1, 4),))
        with replicas.exchanging(version, leaves, None):
            stage.backward(version, (torch.ones(1, 4),))

    def lost(*_: object, **__: object) -> None:
        raise dist.DistBackendError("NCCL communicator was aborted")

    train(1)
    monkeypatch.setattr(dist, "all_reduce", lost)
    with pytest.raises(ExchangeError, match=r"^DistBackendError: NCCL communicator was aborted$"):
        train(2)


@pytest.mark.parametrize("concatenate", [False, True])
def test_gradients_are_on_their_way_while_weight_gradients_are_added(
    alone: dist.ProcessGroup, concatenate: bool
) -> None:
    """p2 of two microbatches: the last layer's are taken once the second is in, or both together, before the first's
    are complete. What p1 has completed, the gain, waits for nothing.
    """
    layers = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE)).double()
    gain = nn.Parameter(torch.ones(WIDE, dtype=torch.float64))
    leaves = [*layers.parameters(), gain]
    xs = [torch.randn(3, WIDE, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    deferred: list[list[Deferred | Computed]] = []
    for x in xs:
        split = Split(leaves)
        with split.active(deferring=False):
            output = (layers(x) * gain).sum()
        with split.active(deferring=True):
            output.backward()
        deferred.append(split.deferred)
    replicas, seen = Replicas(alone, leaves), list[tuple[bool, bool]]()
    waiting = Counter(parameter for calls in deferred for call in calls for parameter in call.parameters())
    with replicas.adding(1, leaves, waiting) as added:

        def noted(leaf: nn.Parameter) -> None:
            added(leaf)
            seen.append((leaf is leaves[0], leaves[2].grad is None))

        add_weight_gradients(deferred, concatenate=concatenate, added=noted)
    last_is_taken = [taken for _, taken in seen].index(True)
    first_is_complete = max(i for i, (first, _) in enumerate(seen) if first)
    assert last_is_taken < first_is_complete
    found = replicas.gradients(1, own=False)
    torch.stack([(layers(x) * gain).sum() for x in xs]).sum().backward()  # type: ignore[no-untyped-call]
    for gradient, leaf in zip(found, leaves, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "depth", "microbatches", "split_backward"),
    [
        ("data-parallel", 1, 1, False),
        ("data-parallel", 1, 3, False),
        ("data-parallel", 1, 3, True),
        ("1f1b", 2, 2, False),
        ("1f1b", 2, 2, True),
        ("zb-h1", 2, 3, False),
        ("pipedream-2bw", 1, 2, False),
        ("pipedream-2bw", 2, 3, False),
    ],
)
def test_gradients_of_several_buckets_equal_the_single_process_reference(
    schedule: str, depth: int, microbatches: int, split_backward: bool, tmp_path: Path
) -> None:
    model, data = (spec.replace("width=8", f"width={WIDE}") for spec in (MODEL, DATA))
    plan = make_plan(schedule, CUTS[depth], replicas=2, microbatches=microbatches, split_backward=split_backward)
    run_ranks(replace(job_of(plan, tmp_path, steps=STEPS), model=model, data=data))
    expected = train(plan, model, data, steps=STEPS, seed=SEED, learning_rate=RATE)
    assert distance(checkpoint_weights(tmp_path, STEPS), expected) < 1e-11


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", ["data-parallel", "pipedream-2bw"])
def test_parameters_reached_twice_or_never_by_a_backward_are_exchanged_whole(schedule: str, tmp_path: Path) -> None:
    """The same samples on one replica and on two; on each another half of a layer may be idle."""
    found = []
    for replicas in (1, 2):
        plan = make_plan(schedule, CUTS[1], replicas=replicas, microbatches=4 // replicas)
        out = tmp_path / str(replicas)
        run_ranks(replace(job_of(plan, out, steps=STEPS), model="tests.worker_agent.runtime.awkward:uneven"))
        found.append(checkpoint_weights(out, STEPS))
    assert distance(*found) < 1e-12


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "depth", "replicas"),
    [("data-parallel", 1, 2), ("pipedream-2bw", 1, 2), ("pipedream-2bw", 2, 2), (ASP, 1, 3)],
)
def test_versions_and_sets_of_gradients_are_held_as_the_stream_says(
    schedule: str, depth: int, replicas: int, tmp_path: Path
) -> None:
    plan = make_plan(schedule, CUTS[depth], replicas=replicas, microbatches=2)
    job = replace(job_of(plan, tmp_path, steps=6), checkpoint_every=2)
    for result, stream in zip(run_ranks(job), job.program().streams, strict=True):
        blocks = CUTS[depth][stream.stage + 1] - CUTS[depth][stream.stage]
        version_bytes = blocks * (8 * 8 + 8) * torch.float64.itemsize
        held = list(footprints(stream.instructions, recompute=False))
        weights_bytes = [(each.versions + each.gradients + each.further_gradients) * version_bytes for each in held]
        first = next(i for i, each in enumerate(held) if each.activations)
        activation_bytes = result.lane.memory_bytes[first] - weights_bytes[first]
        assert list(result.lane.memory_bytes) == [
            weights + each.activations * activation_bytes for weights, each in zip(weights_bytes, held, strict=True)
        ]
