"""Where a rank's process is placed, and what is set before its device is looked for."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.forked import fork_server
from worker_agent.engine import devices as placement
from worker_agent.engine.lines import open_lines
from worker_agent.engine.replicas import open_replica_group


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


@pytest.mark.skipif(sys.platform != "linux", reason="the scheduler's policies are Linux's")
def test_gloos_threads_do_not_stop_the_thread_that_computes(tmp_path: Path) -> None:
    processes = [fork_server().Process(target=_look_at_threads, args=(tmp_path, rank), daemon=True) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    for rank in (0, 1):
        before, opened, after = (json.loads((tmp_path / f"{name}-{rank}").read_text()) for name in LOOKS)
        assert before and set(before.values()) == {os.SCHED_OTHER}
        assert opened == {**dict.fromkeys(before, os.SCHED_BATCH), "computes": os.SCHED_OTHER}
        assert len(after) > len(opened)  # with the threads of the replicas' group
        assert after == {**dict.fromkeys(after, os.SCHED_BATCH), "computes": os.SCHED_OTHER}


LOOKS = ("before", "opened", "after")


def _look_at_threads(folder: Path, rank: int) -> None:
    """The policies of gloo's threads: of a process group, after its lines are opened, and with a group of replicas."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    (folder / f"before-{rank}").write_text(json.dumps(_policies()))
    open_lines([], rank)
    (folder / f"opened-{rank}").write_text(json.dumps({**_policies(), "computes": os.sched_getscheduler(0)}))
    assert open_replica_group([0, 0], rank) is not None
    (folder / f"after-{rank}").write_text(json.dumps({**_policies(), "computes": os.sched_getscheduler(0)}))
    dist.barrier()


def _policies() -> dict[str, int]:
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().startswith("gloo")]
    return {task.name: os.sched_getscheduler(int(task.name)) for task in tasks}
