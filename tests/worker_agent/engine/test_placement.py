"""Where a rank's process is placed, and what is set before its device is looked for."""

import os

import pytest
import torch

from worker_agent.engine import devices as placement


@pytest.fixture(autouse=True)
def _no_lasting_effects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(placement, "_keep_freed_memory", lambda: None)


@pytest.mark.parametrize(("given", "seen"), [(None, "32"), ("1", "1")])
def test_a_gpu_has_a_queue_for_every_communicator_unless_its_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, seen: str
) -> None:
    found: list[str | None] = []

    def is_available() -> bool:
        found.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        return False

    if given is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    else:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    placement.place_process("auto", 0, 1)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    assert found == [seen]
