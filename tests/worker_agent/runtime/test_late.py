"""Numbers that are read late: each once, in order, and never beyond a checkpoint or the end."""

import pytest
import torch

from worker_agent.runtime.among_stages import Late


def batches(late: Late, count: int, *, updates: int = 1) -> list[tuple[int, list[float]]]:
    """After every batch, what has been looked at so far."""
    seen: list[float] = []
    told = []
    for batch in range(1, count + 1):
        for update in range(updates):
            late.add(torch.tensor(batch + update / 10), seen.append, batch=batch)
        late.batch_done(batch)
        told.append((batch, [round(number, 1) for number in seen]))
    return told


def test_without_a_lag_a_number_is_looked_at_at_once() -> None:
    assert batches(Late(0), 2) == [(1, [1.0]), (2, [1.0, 2.0])]


def test_a_batchs_numbers_are_looked_at_when_the_batches_of_the_lag_are_done() -> None:
    told = batches(Late(2), 4, updates=2)
    assert told == [(1, []), (2, []), (3, [1.0, 1.1]), (4, [1.0, 1.1, 2.0, 2.1])]


def test_a_flush_leaves_nothing_unseen() -> None:
    late, seen = Late(2), list[float]()
    for batch in (1, 2, 3):
        late.add(torch.tensor(float(batch)), seen.append)
        late.batch_done(batch)
    late.flush()
    late.flush()
    assert seen == [1.0, 2.0, 3.0]


def test_what_looking_raises_ends_the_run() -> None:
    def refuse(number: float) -> None:
        raise ValueError(number)

    late = Late(2)
    late.add(torch.tensor(float("nan")), refuse)
    late.batch_done(1)
    with pytest.raises(ValueError, match="nan"):
        late.flush()
