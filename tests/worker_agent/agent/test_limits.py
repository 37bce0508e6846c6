"""Limits of a job's processes, and what they see of the agent's environment."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until
from worker_agent.agent.child import VARIABLE, JobProcess, Mark, kill_left_behind, kill_marked, start
from worker_agent.agent.limits import JobLimits, folder_bytes, without_secrets

SHOWN = """
import resource, os
from worker_agent.agent.limits import JobLimits
JobLimits(memory_bytes=2**31, open_files=128, processes=1000, nice=3).apply()
kinds = (resource.RLIMIT_DATA, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE)
print([resource.getrlimit(kind)[1] for kind in kinds], os.nice(0))
"""


def test_a_jobs_process_is_limited_and_writes_no_core_files() -> None:
    before = os.nice(0)
    done = subprocess.run([sys.executable, "-c", SHOWN], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"[{2**31}, 128, 1000, 0] {min(before + 3, 19)}"


RESERVED = """
import mmap
from worker_agent.agent.limits import JobLimits
JobLimits(memory_bytes=2**30).apply()
MAP_NORESERVE = 0x4000
reserved = mmap.mmap(-1, 2**36, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, prot=mmap.PROT_READ)
try:
    bytearray(2**31)
except MemoryError:
    print(len(reserved))
"""


def test_addresses_that_are_only_reserved_as_cuda_does_it_are_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", RESERVED], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (str(2**36), "")


def test_without_limits_a_process_keeps_its_own() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert JobLimits() == JobLimits(memory_bytes=None, open_files=None, processes=None, nice=0)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PIPEPLAN_AGENT_TOKEN", "x"),
        ("PIPEPLAN_AGENT_CONFIG", "/etc/agent.toml"),
        ("HF_TOKEN", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_ACCESS_KEY_ID", "x"),
        ("PGPASSWORD", "x"),
        ("SSH_AUTH_SOCK", "x"),
        ("DATABASE_URL", "x"),
        ("https_proxy", "http://me:word@proxy:3128"),
        ("HARMLESS", "it holds the-agents-token"),
    ],
)
def test_a_job_does_not_see_secrets(name: str, value: str) -> None:
    assert without_secrets({name: value, "PATH": "/bin"}, token="the-agents-token") == {"PATH": "/bin"}


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "HOME", "OMP_NUM_THREADS"])
def test_a_job_sees_the_rest_and_what_is_to_be_kept(name: str) -> None:
    assert without_secrets({name: "1"}, token=None) == {name: "1"}
    assert without_secrets({"HF_TOKEN": "x"}, token=None, keep=("HF_TOKEN",)) == {"HF_TOKEN": "x"}


def test_a_folders_bytes_are_those_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"x" * 100_000)
    assert 100_000 <= folder_bytes(tmp_path) < 200_000


ESCAPED = "import os, time; os.fork() or (os.setsid(), os.fork() or time.sleep(60)); time.sleep(60)"


def _marked(work_dir: Path) -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += f":{work_dir}".encode() in path.read_bytes() and VARIABLE.encode() in path.read_bytes()
        except OSError:
            continue
    return found


def test_processes_that_a_job_started_end_with_it_even_in_sessions_of_their_own(tmp_path: Path) -> None:
    mark = Mark(work_dir=tmp_path, agent=os.getpid(), job="j", fence=1)
    environment = dict(os.environ) | mark.environment()
    with subprocess.Popen([sys.executable, "-c", ESCAPED], env=environment) as process:
        wait_until(lambda: _marked(tmp_path) == 3)
        other = Mark(work_dir=tmp_path, agent=os.getpid(), job="j", fence=2)
        kill_marked(other)
        assert _marked(tmp_path) == 3
        kill_marked(mark)
        assert process.wait() < 0
    assert _marked(tmp_path) == 0


def test_what_an_agent_that_is_gone_left_behind_is_ended_and_nothing_else(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    for agent, left in ((os.getpid(), 0), (gone.pid, 1)):
        mark = Mark(work_dir=tmp_path, agent=agent, job="j", fence=1)
        with subprocess.Popen(["sleep", "60"], env=dict(os.environ) | mark.environment()) as process:
            wait_until(lambda: _marked(tmp_path) == 1)
            assert kill_left_behind(tmp_path) == left
            process.kill()


def test_a_job_that_prints_without_end_of_line_is_counted_and_fills_no_memory(tmp_path: Path) -> None:
    """A line was once read whole, however long."""
    mark = Mark(work_dir=tmp_path, agent=os.getpid(), job="j", fence=1)
    endless = "import sys; sys.stderr.write('x' * 1_000_000); sys.stdout.write('y' * 500_000)"
    process = subprocess.Popen(
        [sys.executable, "-c", endless], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    child = JobProcess(process, mark)
    child.read()
    process.wait()
    child.stop()
    assert child.printed == 1_500_000
    assert max(len(line) for line in child.errors) <= 4000


def test_a_task_without_its_files_ends_with_a_sentence(tmp_path: Path) -> None:
    child = start(tmp_path, Mark(work_dir=tmp_path, agent=os.getpid(), job="j", fence=1), os.environ)
    child.process.wait()
    child.stop()
    assert "limits.json" in child.reason()
