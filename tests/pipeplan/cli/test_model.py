"""`pipeplan solve --model`: the profile comes from the worker's profiler, once, and from the cache then."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.cli.model import Estimate, key_of
from pipeplan.documents.files import parse, read
from pipeplan.documents.identity import content_id
from pipeplan.documents.profile import Profile
from pipeplan.protocol.estimates import LEAST_SAMPLES, MOST_TOKENS, USUAL_LENGTH, microbatch_sizes
from tests.pipeplan.cli.commands import Ended, pipeplan, write

ROOT = Path(__file__).parents[3]
CONFIG = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 2,
    "vocab_size": 500,
    "n_positions": 256,
    "architectures": ["GPT2LMHeadModel"],
}
ASKED = ("--model", "hf:config.json", "--cluster", "dgx-a100:2", "--batch-size", "16")
LONG = (*ASKED, "--sequence-length", "256", "--dtype", "bfloat16", "--planner", "gpipe", "--json")
PROGRESS = re.compile(r" \(\d+ s\)$")
"""How lines of progress end: on a busy machine there may be some."""


class Place:
    """A folder with a small config, and a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.work, self.cache, self.broken = folder / "work", folder / "cache", folder / "broken"
        self.work.mkdir()
        write(self.work / "config.json", CONFIG)
        (self.broken / "torch").mkdir(parents=True)
        (self.broken / "torch" / "__init__.py").write_text("raise RuntimeError('the profiler was started')\n")

    @property
    def kept(self) -> list[Path]:
        """What the cache holds."""
        return sorted(path for path in self.cache.rglob("*") if path.is_file())

    def solve(self, *arguments: str, broken: bool = False, start: str = "import sys") -> Ended:
        """`pipeplan solve` in the folder; `broken`: with a torch that ends the profiler as soon as it starts."""
        paths = [str(self.broken)] if broken else []
        done = subprocess.run(
            [sys.executable, "-c", f"{start}; from pipeplan.cli.app import main; main()", "solve", *arguments],
            env=os.environ | {"XDG_CACHE_HOME": str(self.cache), "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)])},
            capture_output=True,
            text=True,
            check=False,
            cwd=self.work,
        )
        lines = (line for line in done.stderr.splitlines(keepends=True) if not PROGRESS.search(line))
        return Ended(done.returncode, done.stdout, "".join(lines))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def plan_of(ended: Ended) -> Any:
    """The answer, without the time that it took."""
    assert ended.status == 0, ended.err
    return ended.document | {"solve_time_s": 0}


def test_a_config_and_a_name_give_a_plan_and_the_second_time_no_profiler_starts(once: tuple[Place, Ended]) -> None:
    place, first = once
    plan = plan_of(first)
    assert plan["feasible"] and plan["estimated"] is True
    assert first.err.startswith("profile: estimated for a100-80gb in ") and first.err.count("\n") == 1
    [kept] = place.kept
    profile = read(Profile, kept)  # as a profile file, for `check` and others
    assert (profile.estimated, profile.dtype, profile.microbatch_sizes) == (True, "bfloat16", (1, 2, 4, 8, 16))
    assert profile.at(16)[0].output_bytes == 16 * 256 * 64 * 2  # sequences of 256 tokens, 64 wide, 2 bytes each
    assert content_id(profile) == plan["profile_id"]
    assert f"kept as {kept}" in first.err

    second = place.solve(*LONG, broken=True)
    assert plan_of(second) == plan
    assert second.err == f"profile: from the cache, {kept}\n"
    other_network = place.solve(*LONG, "--cluster", "p4de.24xlarge", broken=True)
    assert plan_of(other_network)["profile_id"] == plan["profile_id"]


ESTIMATE = Estimate(
    model="hf:config.json",
    analytic="a100-80gb",
    dtype="bfloat16",
    optimizer="adam",
    microbatch_sizes="1,2",
    sequence_length=256,
)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "hf:config.json?n_layer=5"},
        {"model": "hf:other.json"},
        {"analytic": "a100-40gb"},
        {"dtype": "float16"},
        {"optimizer": "adamw"},
        {"microbatch_sizes": "1,2,4"},
        {"sequence_length": 128},
        {"sequence_length": None},
    ],
)
def test_everything_that_is_asked_is_in_the_key(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("config.json", "other.json"):
        write(tmp_path / name, CONFIG)
    assert key_of(ESTIMATE) == key_of(replace(ESTIMATE)) is not None
    assert key_of(replace(ESTIMATE, **changed)) != key_of(ESTIMATE)


def test_what_a_config_holds_is_in_the_key_and_its_folder_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for folder, content in (("one", CONFIG), ("other", CONFIG), ("wider", CONFIG | {"n_embd": 128})):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        write(tmp_path / folder / "config.json", content)
        keys.append(key_of(ESTIMATE))
    assert keys[0] == keys[1] != keys[2]


def test_a_users_own_code_has_no_key() -> None:
    assert key_of(replace(ESTIMATE, model="mine:model")) is None
    assert key_of(replace(ESTIMATE, model="preset:mlp")) is not None


@pytest.mark.each_case
@pytest.mark.parametrize("changed", [("--batch-size", "8"), ("--no-cache",)])
def test_another_question_is_not_answered_by_the_cache(
    place: Place, asked_once: list[Path], changed: tuple[str, ...]
) -> None:
    fill(place, asked_once)
    assert_profiler_started(place.solve(*LONG, *changed, broken=True))


@pytest.mark.campaign
def test_what_was_done_to_a_kept_file_is_seen_and_the_file_is_made_again(place: Place, asked_once: list[Path]) -> None:
    fill(place, asked_once)
    [kept] = place.kept
    text = kept.read_text()
    plan = plan_of(place.solve(*LONG, broken=True))
    longer = json.loads(text)
    longer["blocks"][1]["measurements"][0]["forward_s"] *= 2
    for wrong in (b"", b"{}", text[:-100].encode(), b"\xff\xfe", json.dumps(longer).encode()):
        kept.write_bytes(wrong)
        assert_profiler_started(place.solve(*LONG, broken=True))
    assert plan_of(place.solve(*LONG)) == plan
    assert place.kept == [kept] and kept.read_text() == text


@pytest.mark.campaign
def test_a_cache_that_cannot_be_written_is_said_and_does_not_end_it(place: Place) -> None:
    place.cache.write_text("a file in its place")
    ended = place.solve(*LONG)
    assert ended.status == 0
    assert f"not kept: {place.cache}/pipeplan/profiles cannot be written" in ended.err


@pytest.mark.campaign
def test_a_model_of_ones_own_code_is_estimated_each_time(place: Place) -> None:
    code = "import torch\ndef model(): return [torch.nn.Linear(8, 8) for _ in range(3)]\n"
    (place.work / "mine.py").write_text(code)
    asked = ("--model", "mine:model", "--cluster", "l4", "--batch-size", "4", "--planner", "gpipe", "--json")
    ended = place.solve(*asked)
    assert len(plan_of(ended)["stages"]) <= 3
    assert "not kept" in ended.err and place.kept == []


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--dtype", "bfloat16", "--cluster", "p3.16xlarge"),
            "--dtype: must be one in which V100-SXM2-16GB's datasheet",
        ),
        (("--sequence-length", "257"), "--sequence-length: must be at most the 256 positions of the model's config"),
        (("--model", "hf:other.json"), "model.model_type: must be one of bart, bert, bloom"),
        (("--dtype", "int8"), "--dtype: "),
    ],
)
def test_what_the_profiler_refuses_is_one_sentence_with_status_2(
    place: Place, arguments: tuple[str, ...], sentence: str
) -> None:
    write(place.work / "other.json", CONFIG | {"model_type": "gpt5", "architectures": ["GPT5LMHeadModel"]})
    ended = place.solve(*ASKED, *arguments)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(f"error: {sentence}") and ended.err.count("\n") == 1
    assert place.kept == []


def test_without_the_extra_the_sentence_says_how_to_install_it(place: Place) -> None:
    ended = place.solve(*ASKED, start="import sys; sys.modules['torch'] = None")
    assert (ended.status, ended.err) == (1, "error: --model needs torch: pip install 'pipeplan[worker]'\n")


MEGATRON = ("--model", "hf:gpt2", "--engine", "megatron")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--model", "hf:missing.json"),
            "--model: must be a file or folder on this machine: there is none of this name",
        ),
        (("--model", "hf:a/L"), "--model: must be a file or folder on this machine: there is none of this name, and "),
        (("--model", "nonsense"), "--model: must be hf:FAMILY?key=value"),
        (("--model", "llama_here"), "--model: must be hf:./llama_here for the folder of this name, got 'llama_here'"),
        (
            ("--model", "hf:gpt2", "--dtype", "fp8"),
            "--dtype: must be the type of the weights; linear layers in 8 and 4 bits are --precision fp8, got 'fp8'",
        ),
        (("--model", "hf:gpt2", "--profile", "P.json"), "--model: must not be given beside --profile"),
        ((), "--profile: is required, unless there is a --model to estimate"),
        (("--profile", "P.json", "--dtype", "bfloat16"), "--dtype: is an option of --model"),
        (("--profile", "P.json", "--sequence-length", "8"), "--sequence-length: is an option of --model"),
        (("--profile", "P.json", "--no-cache"), "--no-cache: is an option of --model"),
        (("--model", "hf:gpt2", "--batch-size", "0"), "--batch-size: must be a whole number of at least 1"),
        (("--model", "hf:gpt2", "--cluster", "cpu.json"), "cluster.device.name: must be a device with a datasheet"),
        (
            ("--model", "hf:gpt2", "--cluster", "a100.json"),
            "cluster.device.name: must say which of a100-40gb",
        ),
        (("--model", "hf:gpt2", "--cluster", "dgx-h10"), "--cluster: must be a file, or NAME"),
        ((*MEGATRON, "--data", "3"), "--data: must divide the batch (8 samples), got 3"),
        ((*MEGATRON, "--microbatch-size", "3"), "--microbatch-size: must divide the 8 samples of a batch"),
        ((*MEGATRON, "--stages", "16"), "--stages: must be at most 8: tensor and context leave so many groups"),
        ((*MEGATRON, "--stages", "1", "--chunks", "2"), "--chunks: must be 1 where one rank holds all blocks"),
        ((*MEGATRON, "--schedule", "zb-h1"), "--schedule: must be one of data-parallel, 1f1b"),
        ((*MEGATRON, "--sharding", "weights"), "--sharding: must be one of none, optimizer"),
    ],
)
def test_what_is_wrong_is_said_before_the_profiler_starts(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama_here").mkdir()
    levels = [{"size": 2, "bandwidth_bytes_per_s": 1e9}]
    for name, device in (("cpu", "cpu"), ("a100", "NVIDIA A100")):
        write(tmp_path / f"{name}.json", {"device": {"name": device, "memory_bytes": 10**9}, "levels": levels})
    ended = pipeplan("solve", "--cluster", "dgx-h100", "--batch-size", "8", *arguments)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(f"error: {sentence}") and ended.err.count("\n") == 1


@given(st.integers(1, 2**20), st.none() | st.integers(1, 2**20))
def test_microbatches_are_the_powers_of_two_that_divide_the_batch(batch_size: int, length: int | None) -> None:
    sizes = microbatch_sizes(batch_size, length, None)
    most = max(LEAST_SAMPLES, MOST_TOKENS // (length or USUAL_LENGTH))
    assert sizes == tuple(size for size in (2**power for power in range(21)) if batch_size % size == 0 and size <= most)
    assert sizes[0] == 1
    assert microbatch_sizes(batch_size, length, 3) == (3,)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, Ended]:
    """A place where the question was asked once, and how that ended."""
    place = Place(tmp_path_factory.mktemp("once"))
    return place, place.solve(*LONG)


@pytest.fixture
def asked_once(once: tuple[Place, Ended]) -> list[Path]:
    """What the cache holds once the question was asked."""
    place, ended = once
    assert ended.status == 0, ended.err
    assert parse(Profile, place.kept[0].read_text()).estimated
    return place.kept


def fill(place: Place, kept: list[Path]) -> None:
    """Gives the place a copy of a cache."""
    folder = place.cache / "pipeplan" / "profiles"
    folder.mkdir(parents=True)
    for path in kept:
        (folder / path.name).write_bytes(path.read_bytes())


def assert_profiler_started(ended: Ended) -> None:
    """It did, and its torch ended it."""
    assert ended.status == 1
    assert ended.err == "error: the profiler: RuntimeError: the profiler was started\n"


def test_how_far_the_profiler_is_is_shown_and_is_no_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "estimating hf:config.json: 3 of 8 steps, now microbatches of 8 (5 s)"
    lines = f"print({line!r}, 'error: model: must be a better one', sep='\\n', file=sys.stderr)"
    (place.broken / "torch" / "__init__.py").write_text(f"import os, sys\n{lines}\nsys.stderr.flush()\nos._exit(2)\n")
    silent = place.solve(*ASKED, "--no-cache", broken=True)
    assert (silent.status, silent.err) == (2, "error: model: must be a better one\n")
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = place.solve(*ASKED, "--no-cache", broken=True)
    assert "estimating hf:config.json on a100-80gb: 3 of 8 steps, now microbatches of 8" in shown.err


@pytest.mark.campaign
def test_another_engine_gets_the_forms_that_it_can_have(place: Place) -> None:
    asked = ("--sequence-length", "128", "--dtype", "bfloat16", "--optimizer", "adamw", "--engine", "megatron")
    plan = plan_of(place.solve(*ASKED, *asked, "--json"))
    assert plan["engine"] == "megatron" and plan["estimated"] is True
    assert plan["tensor"] * plan["pipeline"] * plan["data"] * plan["context"] <= 16
    instead = {each["instead"] for each in plan["choices"] if each["degree"] == "tensor"}
    assert instead | {str(plan["tensor"])} == {"1", "2"}, "two heads can be shared by two devices, and no more"
    fixed = plan_of(place.solve(*ASKED, *asked, "--tensor", "2", "--json"))
    assert (fixed["tensor"], fixed["sequence_parallel"]) == (2, True)
    refused = place.solve(*ASKED, *asked, "--tensor", "4", "--json")
    assert refused.status == 2
    assert "--tensor: must divide" in refused.err
