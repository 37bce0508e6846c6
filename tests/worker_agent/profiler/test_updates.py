"""Updates: what a block's part takes, what coming first takes, and that they are a run's own updates."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from pipeplan.costs.estimate import update_beyond_bytes_s
from tests.pipeplan.builders import Cell, profile
from tests.worker_agent.profiler.clocks import SquaresClock
from worker_agent.profiler.results import least_s_per_byte
from worker_agent.profiler.updates import UpdateTimes, Updating, measure_updates

CALL_S, FIRST_S, TENSOR_S = 0.5, 4.0, 0.25


class Machine:
    """A clock on which an update takes what it is said to: a call, its tensors, and more for the first of a round."""

    def __init__(self, tensors: Sequence[int]) -> None:
        self.now_s = 0.0
        self.tensors = tensors
        self.fresh = True

    def before_step(self, number: int) -> None:
        self.fresh = True

    def work(self, blocks: Sequence[int]) -> None:
        self.now_s += CALL_S + FIRST_S * self.fresh + TENSOR_S * sum(self.tensors[block] for block in blocks)
        self.fresh = False

    def clock(self) -> "MachineClock":
        return MachineClock(self)


class MachineClock:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._marks_s: list[float] = []

    def mark(self) -> None:
        self._marks_s.append(self._machine.now_s)

    def seconds(self) -> list[float]:
        return self._marks_s


def chain() -> list[nn.Module]:
    return [nn.Linear(4, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 2, bias=False)]


@pytest.mark.parametrize("rounds", [2, 5])
def test_an_update_is_what_comes_first_and_each_blocks_own_part(rounds: int) -> None:
    """A stage calls its optimizer once, however many blocks it has."""
    machine = Machine((2, 0, 4, 1))
    how = Updating(
        optimizer="sgd",
        dtype="float32",
        rounds=rounds,
        make_clock=machine.clock,
        before_step=machine.before_step,
        afterwards=machine.work,
    )
    found = measure_updates(chain(), how)
    whole_s = CALL_S + FIRST_S + 7 * TENSOR_S
    assert found.first_s + sum(found.blocks_s) == pytest.approx(whole_s)
    assert found.first_s == pytest.approx(FIRST_S + CALL_S)
    assert found.blocks_s[1] == 0.0
    assert found.blocks_s[2] - found.blocks_s[3] == pytest.approx(3 * TENSOR_S)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_the_update_is_a_runs_own_after_a_backward_of_its_own(name: str) -> None:
    layer = nn.Linear(4, 3)
    before = layer.weight.detach().clone()
    passed: list[int] = []

    def backward(number: int) -> None:
        assert layer.weight.grad is None  # the update before has taken it
        layer.weight.grad = torch.ones(3, 4)
        passed.append(number)

    how = Updating(optimizer=name, dtype="float32", rounds=3, make_clock=SquaresClock, before_step=backward)
    assert measure_updates([layer], how) == UpdateTimes(blocks_s=(1.0,), first_s=0.0)
    assert passed == [0, 1, 2, 3, 4]  # a pass before every update, two of them uncounted
    assert 0 < float((layer.weight.detach() - before).abs().max()) < 1e-4


def test_a_model_that_trains_nothing_updates_for_nothing() -> None:
    def never(number: int) -> None:
        raise AssertionError

    how = Updating(optimizer="sgd", dtype="float32", rounds=1, make_clock=SquaresClock, before_step=never)
    found = measure_updates([nn.Linear(2, 2).requires_grad_(False)], how)
    assert found == UpdateTimes(blocks_s=(0.0,), first_s=0.0)


def test_a_byte_takes_the_least_seconds_of_any_block_and_the_rest_is_by_block() -> None:
    assert least_s_per_byte([8.0, 0.0, 30.0], [4, 0, 10]) == 2.0
    found = profile([Cell(weight_bytes=4), Cell(), Cell(weight_bytes=10)])
    assert update_beyond_bytes_s(found, range(3)) == 0.0
