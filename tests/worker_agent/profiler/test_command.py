"""`pipeplan-agent profile` from outside: real processes, files, exit statuses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeplan.cli.console import typed_spec
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError
from tests.pipeplan.builders import Cell
from tests.pipeplan.builders import cluster as cluster_of
from tests.pipeplan.builders import profile as profile_of
from tests.processes import processes_naming
from tests.worker_agent.commands import AGENT, finish
from worker_agent.cli import app
from worker_agent.commands.profile import _show

ROOT = Path(__file__).parents[3]
MLP = "worker_agent.models.presets:mlp?width=8&depth=3"
WIDE = "worker_agent.models.presets:mlp?width=256&depth=3"
"""An update of its blocks takes longer than the noise of two rounds."""


def surroundings(directory: Path) -> dict[str, str]:
    """The command's temporary files, named in its processes' command lines, are under the directory."""
    return {"TMPDIR": str(directory), "PYTHONPATH": str(ROOT)}


def said(stderr: str) -> list[str]:
    """The lines on standard error that are not of progress."""
    return [line for line in stderr.splitlines() if not re.fullmatch(r"measuring .* steps, now .* \(\d+ s\)", line)]


def agent(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Profiles in the directory."""
    return finish(("profile", *arguments), directory=directory, variables=surroundings(directory))


def test_a_tiny_model_is_shown_in_small_units_and_one_device_without_a_neighbour(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All sizes of the quickstart's model were 0.00 MiB, and one device had a link to its neighbours."""
    cell = Cell(forward_s=2e-5, weight_bytes=288, output_bytes=32, activation_bytes=64)
    for devices, last in (
        (1, "1 device with 1 GiB"),
        (2, "2 devices with 1 GiB each; between neighbours 3 GB/s after "),
    ):
        _show(profile_of([cell]), cluster_of((devices, 3e9), memory_bytes=2**30))
        shown = capsys.readouterr().out
        assert all(word in shown for word in ("20 µs", "288 B", "32 B", "64 B")), shown
        assert shown.splitlines()[-1].startswith(last.replace("3 GB/s", "3.00 GB/s"))


def test_two_devices_give_a_profile_and_a_cluster(tmp_path: Path) -> None:
    wanted = ("--model", WIDE, "--devices", "2", "--device", "cpu", "--microbatch-sizes", "2,4", "--rounds", "3")
    files = ("-o", "P.json", "--cluster-output", "C.json")
    done = subprocess.run(
        [*AGENT, "profile", *wanted, *files, "--optimizer", "adam", "--seconds", "0", "--json"],
        env=os.environ | surroundings(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, said(done.stderr)) == (0, [])
    profile = parse(Profile, done.stdout)
    assert parse(Profile, (tmp_path / "P.json").read_text()) == profile
    assert [block.name for block in profile.blocks] == ["0.linear", "1.linear", "2.linear"]
    assert profile.weight_bytes == 3 * (256 * 256 + 256) * 4
    assert profile.microbatch_sizes == (2, 4)
    assert [m.output_bytes for m in profile.at(4)] == [4 * 256 * 4] * 3
    assert all(m.forward_s > 0 and m.backward_s > 0 for m in profile.at(2))
    assert profile.method is not None and profile.method.concurrent_devices == 2
    assert profile.method.rounds == 3
    assert profile.method.clock == "processor time of the process"
    assert profile.overheads.update_s_per_byte > 0 and profile.overheads.version_s_per_byte > 0
    assert profile.overheads.instruction_s > 0 and profile.overheads.exchange_factor > 0
    assert profile.overheads.forward_without_graph != 1.0
    cluster = parse(Cluster, (tmp_path / "C.json").read_text())
    assert cluster.devices == 2 and cluster.levels[0].latency_s > 0
    assert cluster.device == profile.device
    assert not list(tmp_path.glob("pipeplan-*"))  # torch may leave a cache of its own
    assert processes_naming(tmp_path) == []


def test_short_rounds_are_measured_for_the_seconds_that_were_asked_for(tmp_path: Path) -> None:
    wanted = ("--model", MLP, "--device", "cpu", "--microbatch-sizes", "2")
    done = agent(tmp_path, *wanted, "--rounds", "1", "--seconds", "0.2", "--json")
    assert (done.returncode, said(done.stderr)) == (0, [])
    method = parse(Profile, done.stdout).method
    assert method is not None and method.rounds > 10  # a pass of three tiny layers takes far less than 20 ms


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.campaign)])
def test_weights_of_16_bits_are_updated_and_exchanged_as_in_a_run(tmp_path: Path, dtype: str) -> None:
    # their gradients add up in float32, which a gradient of 16 bits from an earlier measurement would refuse
    wanted = ("--model", WIDE, "--devices", "2", "--device", "cpu", "--microbatch-sizes", "2", "--rounds", "2")
    done = agent(tmp_path, *wanted, "--dtype", dtype, "--optimizer", "adam", "--seconds", "0", "--json")
    assert (done.returncode, said(done.stderr)) == (0, [])
    overheads = parse(Profile, done.stdout).overheads
    assert overheads.update_s_per_byte > 0 and overheads.version_s_per_byte > 0


@pytest.mark.campaign
def test_a_factory_that_raises_ends_in_one_sentence_and_leaves_no_process(tmp_path: Path) -> None:
    spec = "tests.worker_agent.profiler.factories:raising_on_the_second_rank"
    done = agent(tmp_path, "--model", spec, "--devices", "2", "--device", "cpu")
    assert (done.returncode, done.stdout) == (1, "")
    place = f"in the model's factory {spec}"
    sentence = f"error: profiling failed on rank 1: KeyError: 'the weights are not here', {place}; log: "
    assert done.stderr.startswith(sentence) and done.stderr.count("\n") == 1
    logs = Path(done.stderr.removeprefix(sentence).strip())
    assert any("Traceback" in log.read_text() for log in logs.glob("**/stderr.log"))
    assert processes_naming(tmp_path) == []


def test_wrong_input_found_in_a_process_is_reported_as_wrong_input(tmp_path: Path) -> None:
    done = agent(tmp_path, "--model", "torch.nn:Sequential", "--device", "cpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "error: --model: must have at least one block, but torch.nn:Sequential returned none, got ()\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--microbatch-sizes", "1,two"), "--microbatch-sizes"),
        (("--microbatch-sizes", "0"), "--microbatch-sizes"),
        (("--microbatch-sizes", "4,4"), "--microbatch-sizes"),
        (("--dtype", "int8"), "--dtype"),
        (("--devices", "0"), "--devices"),
        (("--optimizer", "lion"), "--optimizer"),
        (("--loss", "torch.nn:MSELoss"), "--data"),
        (("--data", "nothing"), "--data"),
    ],
)
def test_wrong_options_are_refused_by_name_before_anything_is_started(arguments: tuple[str, ...], field: str) -> None:
    outcome = CliRunner().invoke(app, ["profile", "--model", MLP, *arguments])
    assert isinstance(outcome.exception, InvalidInputError)
    assert outcome.exception.field == field


@pytest.mark.parametrize(
    "arguments",
    [
        ("profile",),
        ("blocks",),
        ("run", "--plan", "plan.json", "--data", "preset:random_tokens", "--steps", "1", "--out", "run"),
    ],
)
def test_a_family_is_not_taken_for_the_folder_of_its_name(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights of the family's full size were once trained in the place of those in the folder."""
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.chdir(tmp_path)
    command, *more = arguments
    model = ["hf:gpt2"] if command == "blocks" else ["--model", "hf:gpt2"]
    refused = CliRunner().invoke(app, [command, *model, *more]).exception
    assert isinstance(refused, InvalidInputError)
    rule = "must be hf:./gpt2 for the folder of this name, or hf:gpt2? for the family"
    assert (refused.field, refused.rule) == ("model" if command == "blocks" else "--model", rule)
    for meant in ("hf:gpt2?", "hf:gpt2?n_layer=2", "hf:./gpt2", "hf:opt"):
        typed_spec(meant, field="model")


def test_the_command_starts_without_torch() -> None:
    code = "import sys, worker_agent.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_missing_extra_is_said_in_one_sentence(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for place in (Path(p) for p in sys.path if p.endswith("-packages")):
        for entry in place.iterdir():
            if not entry.name.startswith("torch"):
                (packages / entry.name).symlink_to(entry)
    code = "from worker_agent.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, "profile", "--model", MLP],
        env={"PYTHONPATH": f"{ROOT}{os.pathsep}{packages}", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: this command needs torch: pip install 'pipeplan[worker]'\n"


def test_a_process_ends_soon_after_its_parent() -> None:
    child = (
        "from worker_agent.engine.processes import exit_with_parent;"
        "exit_with_parent(); print('ready', flush=True); input()"
    )
    parent = (
        "import subprocess, sys; r, w = __import__('os').pipe();"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=r, stdout=subprocess.PIPE, pass_fds=(w,));"
        "print(p.stdout.readline().decode().strip(), flush=True); import os; os._exit(0)"
    )
    # The child holds both ends of its own input: it ends only because its parent has. Its errors go to our pipe.
    done = subprocess.run([sys.executable, "-c", parent], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("ready\n", "")
