"""Data: microbatch number i holds the samples [i * b, (i + 1) * b), however the factory gives them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from pipeplan.errors import InvalidInputError
from planner_service.overview import openapi as examples
from worker_agent.models.data import MicrobatchSource, moved, open_data
from worker_agent.models.values import Value

FACTORIES = "tests.worker_agent.models.factories"
TOKENS = "worker_agent.models.text:random_tokens?sequence_length=4&samples=6"


def only(value: Value) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def number(source: MicrobatchSource, index: int) -> int:
    return int(only(source.microbatch(index)[0])[0, 0].item())


def samples(spec: str, microbatch_size: int, count: int) -> Tensor:
    source = open_data(spec, microbatch_size=microbatch_size, seed=3)
    return torch.cat([only(source.microbatch(i)[0]) for i in range(count)])


def test_the_samples_are_the_same_whatever_the_microbatch_size() -> None:
    expected = samples(TOKENS, 1, 24)
    assert torch.equal(samples(TOKENS, 4, 6), expected)  # 6 samples wrap around within the second microbatch
    assert torch.equal(samples(TOKENS, 12, 2), expected)
    assert torch.equal(expected[:6], expected[6:12])


def test_an_iterator_goes_forward_skips_starts_again_and_goes_back() -> None:
    source = open_data(f"{FACTORIES}:countdown?start=3", microbatch_size=2, seed=0)
    #      index:     0  1  2  3  4  (skip)  8  8  7   1
    wanted = [0, 1, 2, 3, 4, 8, 8, 7, 1]
    assert [number(source, i) for i in wanted] == [3, 2, 1, 3, 2, 1, 1, 2, 2]


def test_an_iterator_that_cannot_start_again_says_so_at_its_end() -> None:
    source = open_data(f"{FACTORIES}:exhausted_for_good", microbatch_size=2, seed=0)
    source.microbatch(0)
    with pytest.raises(InvalidInputError, match="must hold microbatch 1: it has ended, and gives nothing"):
        source.microbatch(1)


def test_a_microbatch_of_another_size_is_named_with_its_shape() -> None:
    source = open_data(f"{FACTORIES}:wrong_size", microbatch_size=2, seed=0)
    source.microbatch(0)
    with pytest.raises(InvalidInputError) as caught:
        source.microbatch(3)
    rule = (
        "must have the microbatch size 2 as its first dimension: the data's factory should take it, as microbatch_size"
    )
    assert str(caught.value) == f"data.3.inputs: {rule}, and make batches of that size, got (3, 2)"


def loader(name: str, *, microbatches: int = 0, **options: Any) -> MicrobatchSource:
    made: dict[str, Callable[..., Any]] = {
        "map": lambda: DataLoader(TensorDataset(torch.zeros(10, 2), torch.zeros(10)), batch_size=4, **options),
        "subset": lambda: DataLoader(
            TensorDataset(torch.zeros(99, 2), torch.zeros(99)), sampler=SubsetRandomSampler(range(10)), batch_size=4
        ),
        "stream": lambda: DataLoader(Stream(10), batch_size=4, **options),
        "generator": lambda: (pair for pair in DataLoader(Stream(10), batch_size=4)),
        "list": lambda: list(DataLoader(Stream(10), batch_size=4)),
        "whole": lambda: DataLoader(TensorDataset(torch.zeros(12, 2), torch.zeros(12)), batch_size=4),
        "batches": lambda: DataLoader([(torch.zeros(4, 2), torch.zeros(4))], batch_size=None),  # type: ignore[arg-type]
    }
    return MicrobatchSource(made[name], microbatch_size=4, name=name, microbatches=microbatches)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """So many samples, one after the other."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self._samples):
            yield torch.zeros(2), torch.zeros(())

    def __len__(self) -> int:
        return self._samples


@pytest.mark.parametrize(
    ("name", "options"), [("map", {}), ("map", {"num_workers": 2}), ("subset", {}), ("stream", {})]
)
def test_a_loader_whose_last_batch_is_short_is_refused_before_a_run_that_comes_to_it(
    name: str, options: dict[str, Any]
) -> None:
    rule = r"the last one of 10 samples by 4 has 2: give the DataLoader drop_last=True, got '.*'"
    with pytest.raises(InvalidInputError, match=rule):
        loader(name, microbatches=3, **options)
    source = loader(name, microbatches=2)
    assert len(source.microbatch(1)[0]) == 4
    with pytest.raises(InvalidInputError, match="a DataLoader leaves a short last one out with drop_last=True"):
        source.microbatch(2)


def test_items_whose_last_one_is_short_are_refused_before_a_run_that_comes_to_it() -> None:
    rule = r"data.2.targets: must have the microbatch size 4 .* drop_last=True, got \(2,\)"
    with pytest.raises(InvalidInputError, match=rule):
        loader("list", microbatches=3)
    assert len(loader("list", microbatches=2).microbatch(1)[0]) == 4
    with pytest.raises(InvalidInputError, match=rule):  # which nobody knows before
        loader("generator", microbatches=3).microbatch(2)


@pytest.mark.parametrize(("name", "options"), [("whole", {}), ("batches", {}), ("map", {"drop_last": True})])
def test_a_loader_without_a_short_batch_is_read_as_often_as_it_takes(name: str, options: dict[str, Any]) -> None:
    source = loader(name, microbatches=99, **options)
    assert all(len(source.microbatch(index)[0]) == 4 for index in range(9))


def test_a_loader_of_a_fixed_batch_size_is_told_to_take_the_microbatch_size() -> None:
    source = MicrobatchSource(
        lambda: DataLoader(TensorDataset(torch.zeros(72, 2), torch.zeros(72)), batch_size=32),
        microbatch_size=4,
        name="fixed",
        microbatches=99,
    )
    rule = r"data.0.targets: .* should take it, as microbatch_size, and make batches of that size, got \(32,\)"
    with pytest.raises(InvalidInputError, match=rule):
        source.microbatch(0)


@pytest.mark.parametrize(
    ("items", "sentence"),
    [
        ([torch.zeros(2)], "data.0: must be a pair of inputs and targets, got 'Tensor'"),
        ([(torch.zeros(2), 3)], "data.0.targets: must be a tensor or a tuple of tensors, got 'int'"),
        ([((), torch.zeros(2))], "data.0.inputs: must be a tensor or a tuple of tensors, got 'tuple'"),
        ([], "data: must hold at least one microbatch, got 'x:y'"),
    ],
)
def test_what_is_no_microbatch_is_refused(items: list[object], sentence: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        MicrobatchSource(lambda: items, microbatch_size=2, name="x:y").microbatch(0)
    assert str(caught.value) == sentence


def test_inputs_may_be_several_tensors() -> None:
    items = [((torch.zeros(2), torch.ones(2)), torch.zeros(2))]
    inputs, _ = MicrobatchSource(lambda: items, microbatch_size=2, name="x:y").microbatch(5)
    assert isinstance(inputs, tuple) and len(inputs) == 2


def test_a_factory_that_returns_nothing_iterable_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="must give an iterable of microbatches"):
        open_data("fractions:Fraction?numerator=3", microbatch_size=2, seed=0)


def test_the_data_of_the_apis_examples_can_be_read() -> None:
    inputs, targets = open_data(examples.DATA, microbatch_size=2, seed=0).microbatch(0)
    assert isinstance(inputs, Tensor)
    assert isinstance(targets, Tensor)
    assert inputs.shape == targets.shape
    assert len(inputs) == 2


def test_only_floating_point_tensors_take_the_models_type() -> None:
    inputs = moved((torch.ones(2), torch.ones(2, dtype=torch.int64)), torch.device("cpu"), torch.bfloat16)
    assert [t.dtype for t in inputs] == [torch.bfloat16, torch.int64]
