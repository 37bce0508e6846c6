"""What goes wrong in a model, its data or its loss is reported with type, message, place and log."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.waiting import wait_until
from tests.worker_agent.commands import AGENT, finish
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.test_run_command import SLEEP, at_instruction, command, rank_process

FAULTY = "tests.worker_agent.runtime.faulty"
MUST = "a block must return a tensor or a tuple of tensors, and this one returned"


def run(
    folder: Path, *arguments: str, model: str = SLEEP, cuts: tuple[int, ...] = (0, 2, 4)
) -> subprocess.CompletedProcess[str]:
    return finish(command(make_plan("1f1b", cuts), folder, *arguments, model=model))


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("how", "block", "sentence"),
    [
        ("list", 1, f"TypeError: {MUST} list"),
        ("dict", 3, f"TypeError: {MUST} dict"),
        ("none", 1, f"TypeError: {MUST} NoneType"),
        ("number", 3, f"TypeError: {MUST} a tuple that holds int"),
        ("nothing", 1, "TypeError: a block must return a tensor or a tuple of tensors, and this one returned an empty"),
        (
            "sparse",
            3,
            "TypeError: a block must return dense tensors, and this one returned a tensor that is",
        ),
        ("raise", 1, "ValueError: the first line says what and the last one  [31mhow"),
        ("key", 3, "KeyError: 'no such key'"),
        ("memory", 1, "too little memory"),
        ("exit", 3, "SystemExit: 0"),
        ("ended", 1, "LookupError: no more rows"),
    ],
)
def test_an_error_in_a_block_is_reported_whole(how: str, block: int, sentence: str, tmp_path: Path) -> None:
    result = run(tmp_path, model=f"{FAULTY}:failing?how={how}&block={block}")
    rank = block // 2
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert sentence in last
    assert f"error: rank {rank} (stage {rank}, replica 0) failed (" in last
    assert f", in block {block} ({block}.failing)) at F3 after 0 of 6 steps" in last
    log = Path(last.rpartition("log: ")[2])
    assert log == tmp_path / "out" / "logs" / f"rank-{rank}.log"
    assert how == "exit" or "Traceback" in log.read_text()


@pytest.mark.each_case
@pytest.mark.parametrize(("how", "code", "block"), [("gone", 0, 1), ("gone", 0, 3), ("gone with 3", 3, 1)])
def test_a_rank_that_leaves_is_to_blame_and_nobody_else(how: str, code: int, block: int, tmp_path: Path) -> None:
    result = run(tmp_path, model=f"{FAULTY}:failing?how={how.replace(' ', '%20')}&block={block}")
    rank = block // 2
    assert result.returncode == 1
    assert f"error: rank {rank} (stage {rank}, replica 0) ended" in result.stderr
    assert f"exit status {code} " in result.stderr
    assert "at F3 after 0 of 6 steps" in result.stderr


@pytest.mark.campaign
@pytest.mark.each_case
@pytest.mark.parametrize("block", [0, 3])
def test_the_block_whose_backward_fails_is_named(block: int, tmp_path: Path) -> None:
    result = run(tmp_path, model=f"{FAULTY}:failing?how=backward&block={block}")
    assert result.returncode == 1
    where = f"ZeroDivisionError: no way back, in the backward of block {block} ({block}.failing)) at B1 after 0 of 6"
    assert where in result.stderr


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--data", f"{FAULTY}:broken_data"), "OSError: shard 2 is gone, in microbatch 3 of the data"),
        (("--loss", f"{FAULTY}:broken_loss"), "TypeError: a loss must be a tensor, and this one is dict, in the loss"),
        (("--loss", f"{FAULTY}:many_losses"), "TypeError: a loss must be one real number, and this one has shape"),
        (
            ("--model", f"{FAULTY}:failing?how=factory"),
            "LookupError: no weights for this model, in the model",
        ),
        (
            ("--model", "tests.worker_agent.runtime.raises_on_import:model"),
            "RuntimeError: the licence server is away, in the import of tests.worker_agent.runtime.raises_on_import",
        ),
        (("--model", f"{FAULTY}:untrainable?kind=gradient"), "the gradient of weight in block 3 (3._sparse) is sparse"),
    ],
)
def test_an_error_outside_the_blocks_is_reported_whole(
    arguments: tuple[str, str], sentence: str, tmp_path: Path
) -> None:
    model = arguments[1] if arguments[0] == "--model" else SLEEP
    result = run(tmp_path, *(() if arguments[0] == "--model" else arguments), model=model, cuts=(0, 4))
    assert result.returncode == 1
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert "log: " in result.stderr


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("lazy", "model: must have no lazy modules, whose weights have no shape before the first batch"),
        ("complex", "model: must have real parameters: hold the parts of a complex one as two numbers"),
        ("buffer", "model: must have no buffer of complex128"),
        ("embedding", "model: must have embeddings with sparse=False"),
        ("bag", "model: must have embeddings with sparse=False"),
    ],
)
def test_what_no_stage_can_train_is_refused_at_the_start(kind: str, sentence: str, tmp_path: Path) -> None:
    result = run(tmp_path, model=f"{FAULTY}:untrainable?kind={kind}", cuts=(0, 4))
    assert result.returncode == 2
    assert sentence in result.stderr
    assert "'3." in result.stderr


@pytest.mark.campaign
def test_one_folder_takes_one_run_at_a_time(tmp_path: Path) -> None:
    """Two once trained into it together, and mixed their checkpoints; so did one that resumed a live one."""
    arguments = command(make_plan("1f1b", (0, 2, 4)), tmp_path, "--checkpoint-every", "2", model=SLEEP, steps=1000)
    with subprocess.Popen([*AGENT, *arguments], stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: (tmp_path / "out" / "checkpoints" / "step-2" / "manifest.json").exists())
        for second in (finish(arguments), finish([*arguments, "--resume"])):
            assert second.returncode == 2
            assert f"out: must be free, and process {process.pid} on " in second.stderr
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.wait()
    assert finish(going_on(arguments, tmp_path / "out")).returncode == 0


@pytest.mark.campaign
def test_a_run_is_not_resumed_while_ranks_of_a_killed_launcher_live(tmp_path: Path) -> None:
    arguments = command(make_plan("1f1b", (0, 2, 4)), tmp_path, "--checkpoint-every", "2", model=SLEEP, steps=1000)
    with subprocess.Popen([*AGENT, *arguments], stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: at_instruction(tmp_path / "out" / "ranks" / "rank-1.status") > 40)
        stopped = rank_process(process.pid, 1)
        os.kill(stopped, signal.SIGSTOP)
        process.kill()
    try:
        refused = finish([*arguments, "--resume"])
    finally:
        os.kill(stopped, signal.SIGKILL)
    assert refused.returncode == 2
    assert "ranks of an earlier run, whose launcher is gone, still live" in refused.stderr
    assert finish(going_on(arguments, tmp_path / "out")).returncode == 0


def going_on(arguments: list[str], out: Path) -> list[str]:
    """The command that resumes a run of 1,000 steps, and ends it two steps after its newest checkpoint."""
    steps = [int(path.parent.name.removeprefix("step-")) for path in out.glob("checkpoints/step-*/manifest.json")]
    return [*(str(max(steps, default=0) + 2) if word == "1000" else word for word in arguments), "--resume"]
