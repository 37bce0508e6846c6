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
from worker_agent.engine.channel import open_lines


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
    process = fork_server().Process(target=_look_at_threads, args=(tmp_path,), daemon=True)
    process.start()
    process.join(30)
    assert process.exitcode == 0
    before, after = (json.loads((tmp_path / name).read_text()) for name in ("before", "after"))
    assert before and set(before.values()) == {os.SCHED_OTHER}
    assert after == {**dict.fromkeys(before, os.SCHED_BATCH), "computes": os.SCHED_OTHER}


def _look_at_threads(folder: Path) -> None:
    """The policies of gloo's threads of a process group, before and after its lines are opened."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    (folder / "before").write_text(json.dumps(_policies()))
    open_lines([], 0)
    (folder / "after").write_text(json.dumps({**_policies(), "computes": os.sched_getscheduler(0)}))


def _policies() -> dict[str, int]:
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().startswith("gloo")]
    return {task.name: os.sched_getscheduler(int(task.name)) for task in tasks}
