"""Microbatches that are loaded ahead: the data is asked in the order of the forwards, each once, as without."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from worker_agent.models.data import Microbatch
from worker_agent.models.spec import UserCodeError
from worker_agent.runtime.feed import MicrobatchFeed
from worker_agent.runtime.status import Activity

CPU = torch.device("cpu")


class Source:
    """Microbatches that say their numbers, and which were asked for."""

    def __init__(self, stop: int = 10**6) -> None:
        self.asked: list[int] = []
        self._stop = stop

    def microbatch(self, index: int) -> Microbatch:
        """Of numbers below the stop."""
        self.asked.append(index + 1)
        if index + 1 >= self._stop:
            raise LookupError("no more")
        return torch.tensor([index + 1.0]), torch.tensor([-index - 1.0])


class Host:
    """What the host does."""

    def __init__(self) -> None:
        self.activities: list[Activity] = []

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Notes it."""
        self.activities.append(activity)
        yield


def feed(source: Source, order: list[int], *, ahead: bool, host: Host | None = None) -> MicrobatchFeed:
    return MicrobatchFeed(
        source,
        "package.module:data",
        iter(order),
        device=CPU,
        dtype=torch.float64,
        busy=host or Host(),
        inputs=True,
        targets=True,
        ahead=ahead,
        compared=lambda number: number in (2, 5),
    )


def same(found: object, number: float) -> bool:
    return isinstance(found, Tensor) and torch.equal(found, torch.tensor([number], dtype=torch.float64))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("order", [[1, 2, 3, 4], [1, 1, 2, 2], [1, 2, 1, 2, 3, 4, 3, 4], [3, 4, 5]])
def test_every_forward_gets_its_microbatch(order: list[int], ahead: bool) -> None:
    source, numbers = Source(), list[int]()
    fed = feed(source, order, ahead=ahead)
    for number in order:
        fed.load_ahead()  # the forward's own instruction
        assert same(fed.inputs(number), number)
        assert same(fed.targets(number), -number)
        fed.load_ahead()  # what comes after it
        fed.load_ahead()
        numbers += [number] * (numbers[-1:] != [number])
    assert source.asked == numbers


def test_the_next_microbatch_is_loaded_once_the_forward_is_under_way() -> None:
    source = Source()
    fed = feed(source, [1, 2, 3], ahead=True)
    fed.inputs(1)
    assert source.asked == [1]
    fed.load_ahead()
    assert source.asked == [1, 2]
    fed.load_ahead()
    fed.inputs(2)
    assert source.asked == [1, 2]


def test_without_it_nothing_is_loaded_before_it_is_asked_for() -> None:
    source = Source()
    fed = feed(source, [1, 2], ahead=False)
    fed.inputs(1)
    fed.load_ahead()
    assert source.asked == [1]


def test_what_the_data_raises_ahead_names_its_microbatch() -> None:
    host = Host()
    fed = feed(Source(stop=2), [1, 2], ahead=True, host=host)
    fed.inputs(1)
    with pytest.raises(UserCodeError, match=r"LookupError: no more, in microbatch 2 of the data package.module:data"):
        fed.load_ahead()
    assert host.activities == [Activity.DATA, Activity.DATA]
