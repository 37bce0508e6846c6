"""PipeDream's graph.txt becomes a profile."""

from pathlib import Path

import pytest

from pipeplan.documents.files import read
from pipeplan.documents.profile import Device, Model, Profile
from pipeplan.errors import InvalidInputError
from pipeplan.imports.pipedream_graph import import_pipedream_graph
from tests.pipeplan.cli.commands import PROFILES, cluster_document, pipeplan, write


def line(name: str, description: str = "Conv", *, size: str = "8.0") -> str:
    """A node of 1 ms forward, 2 ms backward and 4 bytes of weights."""
    times = "forward_compute_time=1.000, backward_compute_time=2.000"
    return f"{name} -- {description} -- {times}, activation_size={size}, parameter_size=4.000"


def imported(*lines: str, single_tensor: bool = False, microbatch_size: int | None = 3) -> Profile:
    return import_pipedream_graph(
        "\n".join(lines),
        microbatch_size=microbatch_size,
        model=Model(name="m"),
        device=Device(name="d", memory_bytes=1),
        dtype="float32",
        single_tensor=single_tensor,
    )


def names(profile: Profile) -> list[str]:
    return [block.name for block in profile.blocks]


def test_a_chain_is_kept_node_by_node_in_seconds_and_bytes() -> None:
    profile = imported(line("n2"), line("n1", "Linear(3, 4)", size="6.0"), "\tn1 -- n2")
    assert names(profile) == ["n1 Linear", "n2 Conv"]
    first, second = (block.measurements[0] for block in profile.blocks)
    assert (first.forward_s, first.backward_s, profile.blocks[0].weight_bytes) == (0.001, 0.002, 4)
    assert (first.input_bytes, first.output_bytes, first.activation_bytes) == (0, 6, 6)
    assert (second.input_bytes, second.output_bytes) == (6, 8)
    assert first.microbatch_size == 3


def test_the_data_loader_is_no_block_and_its_time_is_not_the_devices() -> None:
    profile = imported(line("n0", "Input", size="5.0"), line("n1"), "\tn0 -- n1")
    assert names(profile) == ["n1 Conv"]
    measured = profile.blocks[0].measurements[0]
    assert (measured.forward_s, measured.input_bytes, measured.activation_bytes) == (0.001, 5, 8)


RESIDUAL = ("\ta -- b", "\tb -- c", "\tc -- d", "\tb -- d", "\td -- e")
"""
a - b -+- c -+- d - e
       +-----+
"""


def test_a_graph_keeps_its_nodes_and_what_they_read() -> None:
    profile = imported(*(line(name) for name in "edcba"), *RESIDUAL)
    assert names(profile) == ["a Conv", "b Conv", "c Conv", "d Conv", "e Conv"]
    assert profile.edges == ((0, 1), (1, 2), (1, 3), (2, 3), (3, 4))
    assert [block.measurements[0].input_bytes for block in profile.blocks] == [0, 8, 8, 16, 8]


def test_of_single_tensors_a_residual_connection_is_one_block() -> None:
    profile = imported(*(line(name) for name in "abcde"), *RESIDUAL, single_tensor=True)
    assert names(profile) == ["a Conv", "b Conv", "c Conv..d Conv", "e Conv"]
    assert profile.edges is None
    assert profile.blocks[2].measurements[0].forward_s == 0.002
    assert profile.blocks[2].measurements[0].activation_bytes == 16
    assert profile.blocks[2].measurements[0].input_bytes == 8


def test_a_side_input_stands_right_before_its_reader() -> None:
    """An encoder is not glued to the decoder by the decoder's own embedding."""
    edges = ["\tenc1 -- enc2", "\tenc2 -- dec", "\temb -- dec", "\tin -- emb"]
    lines = (line("emb"), line("in", "Input1"), line("enc1"), line("enc2"), line("dec"), *edges)
    assert names(imported(*lines)) == ["enc1 Conv", "enc2 Conv", "emb Conv", "dec Conv"]
    assert names(imported(*lines, single_tensor=True)) == ["enc1 Conv", "enc2 Conv", "emb Conv..dec Conv"]


def test_an_unread_output_stays_right_after_its_producer() -> None:
    edges = ["\ta -- b", "\ta -- loose", "\tb -- c"]
    lines = (*(line(name) for name in ("a", "b", "loose", "c")), *edges)
    assert names(imported(*lines)) == ["a Conv", "loose Conv", "b Conv", "c Conv"]
    chain = imported(*lines, single_tensor=True)
    assert names(chain) == ["a Conv..loose Conv", "b Conv", "c Conv"]
    assert chain.blocks[0].measurements[0].activation_bytes == 16
    assert chain.blocks[0].weight_bytes == 8


def test_an_item_that_nobody_reads_is_left_out_but_one_that_is_read_stays() -> None:
    nodes = (line("a"), line("i", "__getitem__(0)"), line("j", "__getitem__(1)"), line("b"))
    profile = imported(*nodes, "\ta -- i", "\ta -- j", "\ti -- b")
    assert names(profile) == ["a Conv", "i __getitem__", "b Conv"]


def test_an_input_counts_with_the_first_block_that_reads_it() -> None:
    lines = (line("in", "Input", size="5.0"), line("a"), line("b"), "\tin -- a", "\tin -- b", "\ta -- b")
    assert [block.measurements[0].input_bytes for block in imported(*lines).blocks] == [5, 8]


def test_an_edge_that_is_there_twice_counts_once() -> None:
    assert imported(line("a"), line("b"), "\ta -- b", "\ta -- b").edges == ((0, 1),)


def test_several_tensors_of_one_output_are_summed() -> None:
    assert imported(line("a", size="[6.0; 1.0; 2.0]")).blocks[0].measurements[0].output_bytes == 9


def test_the_stages_of_a_partitioned_graph_are_left_aside() -> None:
    assert names(imported(line("a") + " -- stage_id=3")) == ["a Conv"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["nonsense"], "line 1: must be `name -- description -- times and sizes`, got 'nonsense'"),
        ([line("a"), line("a")], "line 2: must not define a node twice, got 'a'"),
        ([line("a"), "\ta -- b"], "line 2: must name a node that the file defines, got 'b'"),
        ([line("a"), "\ta"], "line 2: must be `node -- node` where it is indented"),
        ([line("a"), "\ta -- a"], "line 2: must join two nodes"),
        ([line("a", size="nan")], "line 1: activation_size must be a finite number of at least 0, got 'nan'"),
        ([line("a", size="-1")], "line 1: activation_size must be a finite number of at least 0, got '-1'"),
        ([line("a", size="x")], "line 1: activation_size must be a finite number of at least 0, got 'x'"),
        ([line("a") + ", colour=3"], "line 1: must be one of forward_compute_time"),
        (["a -- b -- forward_compute_time=1"], "line 1: must give backward_compute_time"),
        (
            [line("a"), line("b"), "\ta -- b", "\tb -- a"],
            "line 1: must not be on a cycle, or downstream of one, got 'a'",
        ),
        (["", "  "], "file: must hold at least one node"),
        ([line("a", "Input")], "file: must hold at least one node besides its inputs, got 'a'"),
    ],
)
def test_a_malformed_line_is_named_with_rule_and_value(lines: list[str], message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        imported(*lines)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("name", "nodes", "blocks"), [("vgg16", 40, 39), ("resnet50", 176, 39), ("gnmt", 37, 10)])
def test_the_public_profiles_import_with_all_their_weights(name: str, nodes: int, blocks: int) -> None:
    text = (PROFILES / f"{name}.graph.txt").read_text(encoding="utf-8")
    profile, chain = imported(*text.splitlines()), imported(*text.splitlines(), single_tensor=True)
    assert (len(profile.blocks), len(chain.blocks)) == (nodes, blocks)
    weights = sum(float(part.split("parameter_size=")[1]) for part in text.splitlines() if "parameter_size" in part)
    assert profile.weight_bytes == chain.weight_bytes == weights


@pytest.mark.parametrize(("name", "size"), [("vgg16", 128), ("resnet50", 128), ("gnmt", 32)])
def test_the_public_profiles_imply_their_minibatches(name: str, size: int) -> None:
    """Images and sentences; 128 images of 224 x 224 pixels are what the convolutional networks read."""
    text = (PROFILES / f"{name}.graph.txt").read_text(encoding="utf-8")
    assert imported(*text.splitlines(), microbatch_size=None).microbatch_sizes == (size,)
    images = [line for line in text.splitlines() if " -- Input -- " in line]
    assert all(f"activation_size={size * 3 * 224 * 224 * 4}.0" in line for line in images)


def flattened(features: int, size: str, view: str = "View(-1)") -> tuple[str, ...]:
    """Rows of float32 for a linear layer."""
    linear = line("l", f"Linear(in_features={features}, out_features=9, bias=True)")
    return line("v", view, size=size), linear, "\tv -- l"


RECURRENT = line("r", "LSTM(7, 10, num_layers=3, bidirectional=True)", size="[4000.0; 1200.0; 1200.0]")
"""Five sequences: 3 layers x 2 directions x 5 x 10 float32."""


@pytest.mark.parametrize(
    ("lines", "size"),
    [
        (flattened(25, "800.0"), 8),
        (flattened(25, "800.0", "View(25)"), 8),
        ((RECURRENT,), 5),
        ((line("r", "GRU(7, 10)", size="[4000.0; 200.0]"),), 5),
        ((RECURRENT, *flattened(10, "200.0")), 5),
    ],
)
def test_a_file_implies_its_minibatch_where_a_dimension_is_known_to_be_it(lines: tuple[str, ...], size: int) -> None:
    assert imported(*lines, microbatch_size=None).microbatch_sizes == (size,)
    assert imported(*lines, microbatch_size=2).microbatch_sizes == (2,)


@pytest.mark.parametrize(
    ("lines", "implied"),
    [
        ((line("a"),), "does not imply it"),
        (flattened(25, "800.0", "View(-1, 25)"), "does not imply it"),  # rows of several sizes may be one
        ((line("v"), line("l", "Linear(in_features=2, out_features=1, bias=True)")), "does not imply it"),
        (flattened(25, "850.0"), "implies 8.5"),
        (flattened(0, "850.0"), "does not imply it"),
        ((RECURRENT, *flattened(25, "800.0")), "implies 5 and 8"),
    ],
)
def test_a_size_that_the_file_does_not_tell_must_be_given(lines: tuple[str, ...], implied: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        imported(*lines, microbatch_size=None)
    assert str(caught.value) == f"microbatch_size: must be given (--microbatch-size): the file {implied}, got None"


@pytest.mark.parametrize("shape", ["path", "apart"])
def test_a_file_of_very_many_nodes_is_read(shape: str) -> None:
    count = 3_000
    edges = [f"\tn{k} -- n{k + 1}" for k in range(count - 1)] if shape == "path" else []
    profile = imported(*(line(f"n{k}") for k in range(count)), *edges)
    assert len(profile.blocks) == count
    assert len(profile.edges or ()) == len(edges)


def test_an_imported_profile_is_solved_from_its_file(tmp_path: Path) -> None:
    """As the README has it: 128 images are a minibatch."""
    output = tmp_path / "vgg16.json"
    ended = pipeplan("profile", "import", PROFILES / "vgg16.graph.txt", "--format", "pipedream-graph", "-o", output)
    assert (ended.status, ended.out) == (0, "")
    assert "vgg16, 40 blocks, microbatches of 128" in ended.err
    assert read(Profile, output).model.name == "vgg16"
    cluster = write(tmp_path / "cluster.json", cluster_document(4, 10**11))
    solved = pipeplan(
        "solve", "--profile", output, "--cluster", cluster, "--planner", "pipedream", "--batch-size", "128", "--json"
    )
    assert solved.status == 0
    assert sum(stage["replicas"] for stage in solved.document["stages"]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--format", "pipedream-graph", "--cuts", "some"), "--cuts: must be one of any, single-tensor, got 'some'"),
        (("--format", "csv"), "--format: must be one of pipedream-graph, got 'csv'"),
        (("--format", "pipedream-graph", "--microbatch-size", "0"), "--microbatch-size: must be a whole number"),
        (("--format", "pipedream-graph", "--dtype", "int8"), "--dtype: must be one of float64"),
    ],
)
def test_wrong_options_exit_2(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    ended = pipeplan("profile", "import", PROFILES / "gnmt.graph.txt", *arguments, "-o", tmp_path / "p.json")
    assert ended.status == 2
    assert message in ended.err


def test_an_output_that_cannot_be_written_exits_2(tmp_path: Path) -> None:
    graph = PROFILES / "gnmt.graph.txt"
    ended = pipeplan("profile", "import", graph, "--format", "pipedream-graph", "-o", tmp_path / "no" / "p.json")
    assert ended.status == 2
    assert "--output: must be a file that can be written" in ended.err


def test_an_error_names_the_file_and_the_line(tmp_path: Path) -> None:
    graph = tmp_path / "broken.txt"
    graph.write_text(f"{line('a')}\nnonsense\n", encoding="utf-8")
    ended = pipeplan("profile", "import", graph, "--format", "pipedream-graph", "-o", tmp_path / "p.json")
    assert ended.status == 2
    assert f"{graph}, line 2: must be `name -- description -- times and sizes`, got 'nonsense'" in ended.err


def test_the_size_of_a_file_that_does_not_tell_it_is_an_option(tmp_path: Path) -> None:
    graph, output = tmp_path / "graph.txt", tmp_path / "p.json"
    graph.write_text(line("a"), encoding="utf-8")
    asked = ("profile", "import", graph, "--format", "pipedream-graph", "-o", output)
    ended = pipeplan(*asked)
    assert ended.status == 2
    assert f"{graph}, microbatch_size: must be given (--microbatch-size): the file does not imply it" in ended.err
    assert not output.exists()
    assert pipeplan(*asked, "--microbatch-size", "6").status == 0
    assert read(Profile, output).microbatch_sizes == (6,)


def test_a_graph_is_imported_as_a_chain_and_solved_between_branches(tmp_path: Path) -> None:
    machines = cluster_document(4, 10**12)
    machines["levels"][0]["bandwidth_bytes_per_s"] = 1e10
    cluster = write(tmp_path / "cluster.json", machines)
    times = {}
    for cuts in ("any", "single-tensor"):
        output = tmp_path / f"{cuts}.json"
        graph = PROFILES / "gnmt.graph.txt"
        ended = pipeplan("profile", "import", graph, "--format", "pipedream-graph", "--cuts", cuts, "-o", output)
        assert ended.status == 0
        assert (read(Profile, output).edges is None) == (cuts == "single-tensor")
        solved = pipeplan(
            "solve",
            "--profile",
            output,
            "--cluster",
            cluster,
            "--planner",
            "pipedream",
            "--batch-size",
            "32",
            "--json",
            "--semantics",
            "paper",
        )
        assert solved.status == 0
        times[cuts] = solved.document["closed_form"]["time_per_microbatch_s"]
    assert times["any"] < times["single-tensor"]
