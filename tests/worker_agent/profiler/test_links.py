"""Links: what can be said of them without a second process. Two processes measure theirs in test_command."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from worker_agent.profiler.links import measure_links


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_rank_that_is_alone_has_the_bandwidth_of_its_memory_and_no_latency() -> None:
    link = measure_links(torch.device("cpu"), repeats=2)
    assert link is not None
    assert link.latency_s == 0.0 and link.bandwidth_bytes_per_s > 0
