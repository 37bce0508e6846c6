"""Wrong input of every kind: one sentence that names field, rule and value, and exit status 2."""

import json
from pathlib import Path
from typing import Annotated

import pytest
import typer

from pipeplan.cli.console import GroupedCommand, run_command
from pipeplan.errors import (
    ConflictError,
    ForbiddenError,
    InFlightError,
    InvalidInputError,
    NotFoundError,
    PipeplanError,
    PreconditionFailedError,
    ServiceError,
    SolverError,
    TooManyRequestsError,
    UnauthorizedError,
    UnavailableError,
    shown,
)
from tests.pipeplan.cli.commands import Ended, cluster_document, pipeplan, profile_document, write

SOLVE = ("--planner", "gpipe", "--batch-size", "4")
STAGES = ("--schedule", "1f1b", "--microbatches", "8")


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    profile = write(tmp_path / "profile.json", profile_document(4))
    cluster = write(tmp_path / "cluster.json", cluster_document())
    return ("--profile", str(profile), "--cluster", str(cluster))


def refused(ended: Ended, sentence: str) -> None:
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(f"error: {sentence}")
    assert ended.err.count("\n") == 1


def with_profile(folder: Path, content: bytes) -> Ended:
    (folder / "profile.json").write_bytes(content)
    cluster = write(folder / "cluster.json", cluster_document())
    return pipeplan("solve", "--profile", folder / "profile.json", "--cluster", cluster, *SOLVE)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (bytes(range(256)), "--profile: must be a text file, and this one is not in UTF-8, got "),
        (b"", "{}: document: must be a JSON document, and is empty, got ''"),
        (b"[1]", "{}: document: must be an object, got [1]"),
        (b'{"a": %s}' % (b"9" * 5000), "{}: document: Invalid JSON: number out of range"),
        (
            json.dumps(cluster_document()).encode(),
            "{}: document: must be a profile, and this is a cluster: it has levels, got ['device', 'levels']",
        ),
        (b'{"stages": []}', "{}: document: must be a profile, and this is a plan: it has stages, got ['stages']"),
        (b"{}", "{}: model: is required (and 3 more)\n"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_with_what_is_wrong(tmp_path: Path, content: bytes, sentence: str) -> None:
    refused(with_profile(tmp_path, content), sentence.format(tmp_path / "profile.json"))


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    cluster = write(tmp_path / "cluster.json", cluster_document())
    for path, reason in ((tmp_path / "none", "there is none of this name"), (tmp_path, "this is a folder")):
        ended = pipeplan("solve", "--profile", path, "--cluster", cluster, *SOLVE)
        refused(ended, f"--profile: must be a file that can be read: {reason}, got {shown(str(path))}")


@pytest.mark.parametrize(
    ("field", "named"), [("recorded", "--record"), ("cluster_id", "--cluster"), ("cluster", "--cluster"), ("x", "x")]
)
def test_an_option_is_named_as_it_is_typed(field: str, named: str) -> None:
    """`--record` was refused as recorded_batches, which the command line does not know."""
    app = typer.Typer()

    @app.command(cls=GroupedCommand)
    def command(recorded: Annotated[int, typer.Option("--record")] = 0, cluster: str = "") -> None:
        raise InvalidInputError(field, "must hold", recorded)

    with pytest.raises(InvalidInputError) as caught:
        app(args=[], standalone_mode=False)
    assert str(caught.value) == f"{named}: must hold, got 0"


def test_a_value_that_is_no_number_is_named(files: tuple[str, ...]) -> None:
    ended = pipeplan("solve", *files, "--planner", "gpipe", "--batch-size", "abc")
    refused(ended, "Invalid value for '--batch-size': ")
    assert ", got 'abc' (" in ended.err
    huge = pipeplan("solve", *files, "--planner", "gpipe", "--batch-size", "9" * 5000)
    refused(huge, "Invalid value for '--batch-size': ")
    assert len(huge.err) < 300


@pytest.mark.parametrize("planner", ["pipedream-2bw", "auto"])
def test_a_recomputation_that_drowns_all_times_is_refused(files: tuple[str, ...], planner: str) -> None:
    """A throughput of a time that was rounded to 0 ended in a traceback."""
    asked = ("solve", *files, "--planner", planner, "--batch-size", "4", "--recompute-factor")
    refused(pipeplan(*asked, "1e24"), "--recompute-factor: must be at most 1000, got 1e+24")
    if planner == "pipedream-2bw":
        assert pipeplan(*asked, "1000").status == 0


def test_a_recomputation_that_saves_time_is_refused(files: tuple[str, ...]) -> None:
    """It was accepted, and plans counted stages with recomputation as faster than without."""
    asked = ("solve", *files, "--planner", "gpipe", "--batch-size", "4", "--recompute-factor")
    rule = "--recompute-factor: must be at least 1, because recomputation only adds work, got 0.5"
    refused(pipeplan(*asked, "0.5"), rule)
    assert pipeplan(*asked, "1").status == 0


def test_choices_that_would_not_be_shown_are_refused(files: tuple[str, ...]) -> None:
    """--explain had no effect for our runtime, nor with --json, and said nothing of it."""
    asked = ("solve", *files, "--planner", "gpipe", "--batch-size", "4", "--explain")
    refused(pipeplan(*asked), "--explain: is for the degrees of another engine: name it with --engine")
    with_json = (*asked, "--engine", "megatron", "--json")
    refused(pipeplan(*with_json), "--explain: must be left out with --json: the document has the choices")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--stages", "99999999999"),
            "--stages: must make at most 2000000 instructions with microbatches, batches, chunks",
        ),
        (
            ("--stages", "4", "--batches", "9999999"),
            "--batches: must make at most 2000000 instructions with microbatches",
        ),
        (("--stages", "-1"), "--stages: must be a whole number of at least 1, got -1"),
    ],
)
def test_a_simulation_that_is_too_large_names_what_makes_it_so(arguments: tuple[str, ...], sentence: str) -> None:
    """So many stages ended in a MemoryError."""
    refused(pipeplan("simulate", *STAGES, *arguments), sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--schedule", "naive"), "--schedule: must leave open data-parallel without recomputation at depth 1, or at"),
        (
            ("--recompute", "--depths", "1"),
            "--schedule: must leave open data-parallel without recomputation at depth 1",
        ),
        (("--microbatch-size", "7"), "--microbatch-size: must be one of the measured sizes [1, 2]"),
        (("--straight",), "--straight: is not an option of the planner pipedream-2bw, got True"),
        (("--stages", "2"), "--stages: is what this question varies: its depths, got 2"),
        (("--depths", ",".join(["1"] * 65)), "--depths: must name at most 64 depths, got 65"),
    ],
)
def test_largest_refuses_what_no_size_can_be_asked_with(
    files: tuple[str, ...], arguments: tuple[str, ...], sentence: str
) -> None:
    """They were rows of a table, and an exit status that says that nothing fits."""
    refused(pipeplan("largest", *files, "--batch-size", "4", *arguments), sentence)


@pytest.mark.campaign
def test_largest_looks_only_at_the_recomputation_that_is_asked_for(files: tuple[str, ...]) -> None:
    asked = ("largest", *files, "--batch-size", "4", "--depths", "2", "--json")
    for flag, recompute in (("--recompute", True), ("--no-recompute", False)):
        sizes = pipeplan(*asked, flag).document["sizes"]
        assert {size["recompute"] for size in sizes} == {recompute}


def test_sweep_refuses_a_batch_size_of_0_even_where_it_is_varied(files: tuple[str, ...]) -> None:
    ended = pipeplan("sweep", *files, "--over", "batch-size=4", "--batch-size", "0")
    refused(ended, "--batch-size: must be a whole number of at least 1, got 0")


def test_an_imported_model_cannot_have_an_empty_name(tmp_path: Path) -> None:
    graph = tmp_path / "graph.txt"
    graph.write_text("garbage\n", encoding="utf-8")
    asked = ("--format", "pipedream-graph", "-o", tmp_path / "out.json", "--model-name", "")
    refused(pipeplan("profile", "import", graph, *asked), "--model-name: must not be empty, got ''")


def test_a_number_that_cannot_be_written_out_can_still_be_refused() -> None:
    assert str(InvalidInputError("size", "must be small", 10**5000)) == (
        "size: must be small, got a number of too many digits"
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidInputError("size", "must be small", 7), 2),
        (NotFoundError("there is no plan"), 4),
        (ConflictError("it is in use"), 5),
        (InFlightError("it is being made"), 5),
        (UnauthorizedError("no token"), 5),
        (ForbiddenError("not with this token"), 5),
        (TooManyRequestsError("too often"), 5),
        (ServiceError("nobody answers"), 6),
        (UnavailableError("not now"), 6),
        (PreconditionFailedError("it was changed"), 7),
        (SolverError("it crashed"), 1),
    ],
)
def test_every_kind_of_error_has_its_exit_status(
    error: PipeplanError, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command(fail)
    assert ended.value.code == status
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        ("memory_bytes", "memory_gb", "device.memory_gb: is not a known key: memory_bytes is meant, in the unit"),
        ("bandwidth_bytes_per_s", "bandwidth_gb_per_s", "levels.0.bandwidth_gb_per_s: is not a known key: bandwidth_"),
        (
            "bandwidth_bytes_per_s",
            "bandwidth",
            "levels.0.bandwidth: is not a known key: bandwidth_bytes_per_s is meant, in",
        ),
        ("levels", "level", "level: is not a known key: levels is meant"),
    ],
)
def test_a_misspelt_key_names_the_one_that_is_meant(tmp_path: Path, right: str, wrong: str, sentence: str) -> None:
    profile = write(tmp_path / "profile.json", profile_document(4))
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps(cluster_document()).replace(f'"{right}"', f'"{wrong}"'))
    refused(pipeplan("solve", "--profile", profile, "--cluster", cluster, *SOLVE), f"{cluster}: {sentence}")


def test_a_bandwidth_that_looks_like_gigabytes_is_warned_of(tmp_path: Path) -> None:
    profile = write(tmp_path / "profile.json", profile_document(4))
    document = cluster_document()
    document["levels"][0]["bandwidth_bytes_per_s"] = 300
    cluster = write(tmp_path / "cluster.json", document)
    ended = pipeplan("solve", "--profile", profile, "--cluster", cluster, *SOLVE)
    place = f"warning: {cluster}: levels.0.bandwidth_bytes_per_s"
    assert f"{place}: 300 bytes a second; 300 GB/s would be 300e9, 300 Gb/s 37.5e9" in ended.err


def test_a_bandwidth_with_its_unit_is_told_the_unit_of_its_name(tmp_path: Path) -> None:
    """The sentence said only that it must be a valid number."""
    profile = write(tmp_path / "profile.json", profile_document(4))
    document = cluster_document()
    document["levels"][0]["bandwidth_bytes_per_s"] = "25 Gb/s"
    cluster = write(tmp_path / "cluster.json", document)
    rule = "levels.0.bandwidth_bytes_per_s: must be a number, in the unit at the end of its name, got '25 Gb/s'"
    refused(pipeplan("solve", "--profile", profile, "--cluster", cluster, *SOLVE), f"{cluster}: {rule}")


def test_a_sweep_over_bandwidths_says_its_unit(files: tuple[str, ...]) -> None:
    ended = pipeplan("sweep", *files, "--over", "bandwidth=25Gb/s", "--batch-size", "8")
    rule = "--over: must be bandwidth= and numbers of bytes a second with commas between them"
    refused(ended, f"{rule}, got 'bandwidth=25Gb/s'")
    ended = pipeplan("sweep", *files, "--over", "bandwidth=25,1e9", "--batch-size", "8")
    assert ended.err == "warning: --over bandwidth: 25 bytes a second; 25 GB/s would be 25e9, 25 Gb/s 3.125e9\n"


def test_a_batch_that_the_microbatch_asked_for_does_not_divide_names_that_one(files: tuple[str, ...]) -> None:
    """The sentence listed all measured sizes, of some of which the batch was a multiple."""
    ended = pipeplan("solve", *files, "--planner", "gpipe", "--batch-size", "3", "--microbatch-size", "2")
    refused(ended, "--batch-size: must be a multiple of the microbatch size: 2, as was asked for, got 3")


def test_a_place_where_nothing_can_be_written_is_refused_before_the_work(
    files: tuple[str, ...], tmp_path: Path
) -> None:
    """A search ended with nothing, because its answer could not be written."""
    rule = "--output: must be a file that can be written: "
    refused(pipeplan("solve", *files, *SOLVE, "-o", tmp_path), f"{rule}this is a folder, got {shown(str(tmp_path))}")
    nowhere = tmp_path / "none" / "plan.json"
    refused(
        pipeplan("solve", *files, *SOLVE, "-o", nowhere), f"{rule}its folder does not exist, got {shown(str(nowhere))}"
    )


def test_a_picture_that_cannot_be_written_names_its_option(tmp_path: Path) -> None:
    unit = ("--stages", "2", "--microbatches", "2", "--forward", "1", "--backward-input", "1", "--backward-weight", "1")
    ended = pipeplan("simulate", "--schedule", "1f1b", *unit, "--svg", tmp_path)
    refused(ended, f"--svg: must be a file that can be written: this is a folder, got {shown(str(tmp_path))}")


def test_what_is_no_runs_folder_is_refused_as_the_option_run(files: tuple[str, ...], tmp_path: Path) -> None:
    rule = "--run: must be the folder of a run, with plan.json, timeline.json and run.json: there is no plan.json"
    refused(pipeplan("calibrate", *files, "--run", tmp_path), f"{rule}, got {shown(str(tmp_path))}")


def test_a_file_to_import_that_does_not_exist_is_named_once(tmp_path: Path) -> None:
    missing = tmp_path / "vgg16.txt"
    ended = pipeplan("profile", "import", missing, "--format", "pipedream-graph", "-o", tmp_path / "P.json")
    refused(ended, f"file: must be a file that can be read: there is none of this name, got {shown(str(missing))}")
