"""What a process has taken of a GPU: the device's own figures, told apart from the allocator's and the host's."""

import pytest
import torch

from pipeplan.documents.profile import Device, DeviceMemory
from worker_agent.engine.devices import device_memory, with_context

GPU = torch.device("cuda", 0)
DESCRIBED = Device(name="H200", memory_bytes=1000)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 1,000 bytes: 700 are taken, 640 of them by the allocator, which had 660 and lent out 600 at most."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (300, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 640)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 660)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 600)


@pytest.mark.usefixtures("one_gpu")
def test_what_lies_beside_the_allocator_is_the_context() -> None:
    assert device_memory(GPU, 1) == DeviceMemory(allocated_bytes=600, reserved_bytes=660, context_bytes=60)
    assert with_context(DESCRIBED, GPU, 1).usable_bytes == 940


@pytest.mark.usefixtures("one_gpu")
def test_of_a_gpu_that_ranks_share_nobody_says_what_is_whose() -> None:
    assert device_memory(GPU, 2) is None
    assert with_context(DESCRIBED, GPU, 2) == DESCRIBED


def test_a_cpu_has_no_memory_but_the_hosts() -> None:
    assert device_memory(torch.device("cpu"), 1) is None
