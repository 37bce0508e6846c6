"""Token files: what is read of them is what is in them, once, and bad ones are one sentence."""

import json
import os
import struct
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeplan.documents.names import parse_spec
from pipeplan.errors import InvalidInputError
from pipeplan.protocol.jobs import allows
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import train
from tests.worker_agent.runtime.test_executor import RATE, SEED, STEPS, checkpoint_weights, distance
from worker_agent.agent.settings import BUILT_IN
from worker_agent.models.batches import IGNORED
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.samples import Samples
from worker_agent.models.token_files import INDEX_MAGIC, tokens
from worker_agent.runtime.job import RunJob

VOCABULARY = 1000
Documents = list[list[int]]

documents = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=12), min_size=1, max_size=6)


def write_index(path: Path, sizes: list[int], *, code: int = 8) -> None:
    header = INDEX_MAGIC + struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1)
    starts = np.cumsum([0, *sizes])[:-1] * 2
    path.write_bytes(header + np.array(sizes, "<i4").tobytes() + starts.astype("<i8").tobytes())


def write(folder: Path, written: Documents, form: str) -> Path:
    row = np.array([token for document in written for token in document], dtype=np.uint16)
    path = folder / f"train.{form.partition('+')[0]}"
    match form:
        case "jsonl":
            path.write_text("".join(json.dumps({"input_ids": document, "id": 1}) + "\n" for document in written))
        case "npy":
            np.save(path, row)
        case _:
            path.write_bytes(row.astype("<u2").tobytes())
    if form == "bin+idx":
        write_index(path.with_suffix(".idx"), [len(document) for document in written])
    return path


def opened(path: Path, *, size: int = 1, seed: int = 0, **options: Any) -> Samples:
    return tokens(path=str(path), vocabulary=VOCABULARY, microbatch_size=size, seed=seed, **options)


def rows(samples: Samples) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Inputs and targets of every sample, in the order in which they are read, for microbatches of one."""
    return [(tuple(i[0].tolist()), tuple(t[0].tolist())) for i, t in (samples[k] for k in range(len(samples)))]


@given(documents, st.integers(1, 5), st.integers(0, 3), st.sampled_from(["bin", "bin+idx", "npy", "jsonl"]))
def test_packed_windows_are_the_files_tokens_in_a_row(written: Documents, length: int, seed: int, form: str) -> None:
    row = [token for document in written for token in document]
    expected = Counter(
        (tuple(row[k : k + length]), tuple(row[k + 1 : k + length + 1])) for k in range(0, len(row) - length, length)
    )
    with TemporaryDirectory() as folder:
        path = write(Path(folder), written, form)
        dtype = "uint16" if form == "bin" else None
        if not expected:
            with pytest.raises(InvalidInputError, match=r"^data\.path: must "):
                opened(path, sequence_length=length, dtype=dtype)
            return
        assert Counter(rows(opened(path, sequence_length=length, dtype=dtype, seed=seed))) == expected


@given(documents, st.integers(1, 5), st.sampled_from(["bin+idx", "jsonl"]))
def test_padded_windows_predict_every_token_of_every_document_once(written: Documents, length: int, form: str) -> None:
    expected: Counter[Any] = Counter()
    for document in written:
        for k in range(0, len(document) - 1, length):
            inputs, targets = document[k : k + length], document[k + 1 : k + length + 1]
            missing = length - len(targets)
            expected[
                (*inputs[: len(targets)], *[7] * missing),
                (*targets, *[IGNORED] * missing),
            ] += 1
    with TemporaryDirectory() as folder:
        path = write(Path(folder), written, form)
        if not expected:
            with pytest.raises(InvalidInputError, match=r"^data\.path: must "):
                opened(path, sequence_length=length, padded=True)
            return
        assert Counter(rows(opened(path, sequence_length=length, padded=True, pad=7))) == expected


def test_rows_of_an_array_are_documents(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(12, dtype=np.int32).reshape(3, 4))
    found = rows(opened(tmp_path / "rows.npy", sequence_length=3, padded=True))
    assert sorted(found) == [((k, k + 1, k + 2), (k + 1, k + 2, k + 3)) for k in (0, 4, 8)]


def test_a_folders_files_are_read_without_windows_across_them(tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.arange(10, 17))
    np.save(tmp_path / "a.npy", np.arange(5))
    (tmp_path / "notes.txt").write_text("no tokens")
    found = rows(opened(tmp_path, sequence_length=2))
    assert sorted(inputs for inputs, _ in found) == [(0, 1), (2, 3), (10, 11), (12, 13), (14, 15)]


def test_the_seed_gives_the_order_and_nothing_else_does(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(41))
    path = tmp_path / "t.npy"
    first = rows(opened(path, sequence_length=2, seed=3))
    assert rows(opened(path, sequence_length=2, seed=3)) == first
    assert rows(opened(path, sequence_length=2, seed=4)) != first
    larger = opened(path, sequence_length=2, seed=3, size=5)
    assert [tuple(row) for k in range(len(larger)) for row in larger[k][0].tolist()] == [inputs for inputs, _ in first]


def test_any_microbatch_can_be_read_first_as_a_resumed_run_does(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(41))
    spec = (
        f"worker_agent.models.token_files:tokens?path={quote(str(tmp_path / 't.npy'))}&vocabulary=99&sequence_length=2"
    )
    source = open_data(spec, microbatch_size=2, seed=3)
    everything = [source.microbatch(k)[0] for k in range(30)]
    for k in (17, 4, 29):
        fresh, expected = open_data(spec, microbatch_size=2, seed=3).microbatch(k)[0], everything[k]
        assert isinstance(fresh, Tensor) and isinstance(expected, Tensor) and torch.equal(fresh, expected)


@pytest.mark.parametrize(
    ("form", "options", "sentence"),
    [
        ("bin", {}, "data.dtype: must be given for a .bin without an .idx: one of uint8, uint16, "),
        ("bin", {"dtype": "float32"}, "data.dtype: must be one of uint8, uint16, uint32, int16, int32, int64, got"),
        ("bin", {"dtype": "int64"}, "data.dtype: must divide the 22 bytes of .*/train.bin into whole tokens, got 'int"),
        ("bin", {"dtype": "uint16", "padded": True}, "data.padded: must have documents to be padded: "),
        (
            "bin+idx",
            {"dtype": "int32"},
            "data.dtype: must be left out, or be that of .*/train.idx, which is uint16, got",
        ),
        ("npy", {"dtype": "int32"}, "data.dtype: must be left out, or be that of .*/train.npy, which is uint16, got"),
        ("npy", {"sequence_length": 11}, "data.path: must hold a sequence of 11 tokens and the token that follows it"),
        ("npy", {"sequence_length": 0}, "data.sequence_length: must be a whole number of at least 1, got 0"),
        ("npy", {"pad": VOCABULARY}, "data.pad: must be below the vocabulary of 1000, got 1000"),
        ("jsonl", {"field": "text"}, "data.path: must hold an object with a list of token numbers as 'text' in every"),
    ],
)
def test_options_that_do_not_fit_a_file_are_refused(
    form: str, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = write(tmp_path, [list(range(11))], form)
    with pytest.raises(InvalidInputError, match=sentence):
        opened(path, **{"sequence_length": 2, **options})


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("t.npy", b"", "data.path: must name files that are not empty, got '.*/t.npy'"),
        ("t.npy", b"not an array", "data.path: must be an array that numpy wrote "),
        (
            "t.jsonl",
            b'{"input_ids": [1, 2, 3]}\n{"input_ids": [1, 2',
            "data.path: must hold JSON in every line, got .*line 2",
        ),
        (
            "t.jsonl",
            b'{"input_ids": [1, 2.5]}',
            "data.path: must hold an object with a list of token numbers .* line 1",
        ),
        (
            "t.jsonl",
            b'{"input_ids": [1, 2], "labels": [1, 2]}\n{"input_ids": [3, 4]}',
            "data.path: must have 'labels' in every line or in none, got .* line 2",
        ),
        (
            "t.jsonl",
            b'{"input_ids": [1, 2], "labels": [1]}',
            "data.path: must have lists of one length in a line: 'input_ids' and 'labels' of .* line 1, got .*2.*1",
        ),
        (
            "t.jsonl",
            b'{"input_ids": [1, 2], "labels": "none"}',
            "data.path: must hold an object with a list of numbers as 'labels' in every line, got .* line 1",
        ),
        ("t.jsonl", b'{"input_ids": []}', "data.path: must name files that hold tokens, got '.*/t.jsonl'"),
        ("t.txt", b"1 2 3", "data.path: must end with one of .bin, .npy, .jsonl, .parquet, .arrow, got '.*/t.txt'"),
    ],
)
def test_bad_files_are_one_sentence(name: str, content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInputError, match=sentence):
        opened(tmp_path / name, sequence_length=2)


def test_lines_have_labels_and_masks_as_columns_do(tmp_path: Path) -> None:
    """Labels of lines were once left out without a word, and the loss counted what they exclude."""
    path = tmp_path / "t.jsonl"
    lines: list[dict[str, Any]] = [
        {"input_ids": [1, 2, 3], "labels": [IGNORED, 2, 3], "attention_mask": [1, 1, 1]},
        {"input_ids": [0, 4, 5, 6, 7], "labels": [IGNORED, IGNORED, 9, 8, 7], "attention_mask": [0, 1, 1, 1, True]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    found = rows(opened(path, sequence_length=3, padded=True, pad=0))
    assert Counter(found) == Counter([((1, 2, 0), (2, 3, IGNORED)), ((4, 5, 6), (9, 8, 7))])


def test_arrays_of_other_things_are_refused(tmp_path: Path) -> None:
    for array, rule in (
        (np.ones(9), "must hold whole numbers"),
        (np.ones((2, 2, 2), int), "must hold one row, or a row"),
    ):
        np.save(tmp_path / "t.npy", array)
        with pytest.raises(InvalidInputError, match=rule):
            opened(tmp_path / "t.npy", sequence_length=2)
    with pytest.raises(InvalidInputError, match=r"must name a file or a folder that exists, got '.*gone\.npy'"):
        opened(tmp_path / "gone.npy")
    with pytest.raises(InvalidInputError, match=r"must be a folder with files \.bin, \.npy, \.jsonl"):
        (tmp_path / "empty").mkdir()
        opened(tmp_path / "empty")


def test_an_index_must_be_of_its_file(tmp_path: Path) -> None:
    path = write(tmp_path, [[1, 2, 3], [4, 5, 6]], "bin+idx")
    index = path.with_suffix(".idx")
    whole = index.read_bytes()
    for content, rule in (
        (b"MMAP" + whole[4:], "must have an .idx that Megatron-LM wrote"),
        (whole[:30], "must have an .idx that Megatron-LM wrote"),
        (whole[:36], "must have an .idx that holds the sizes of its 2 sequences"),
    ):
        index.write_bytes(content)
        with pytest.raises(InvalidInputError, match=rule):
            opened(path, sequence_length=2)
    write_index(index, [3, 4])
    with pytest.raises(InvalidInputError, match=r"must hold as many tokens as its \.idx says, 7, got '.*of 6'"):
        opened(path, sequence_length=2)
    write_index(index, [3, 3], code=7)
    with pytest.raises(InvalidInputError, match=r"must have an \.idx of whole numbers"):
        opened(path, sequence_length=2)


def test_a_token_out_of_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.array([1, 2, 3, 1000, 5]))
    samples = opened(tmp_path / "t.npy", sequence_length=4)
    with pytest.raises(InvalidInputError) as caught:
        samples[0]
    rule = f"must hold tokens from 0 to below the vocabulary of 1000: token 3 of {tmp_path}/t.npy, got 1000"
    assert str(caught.value) == f"data.vocabulary: {rule}"


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npy"
    np.save(path, np.arange(9))
    samples = opened(path, sequence_length=2)
    samples[0]
    os.utime(path, ns=(1, 1))
    with pytest.raises(InvalidInputError, match=r"data\.path: must not change while a run reads it, got '.*/t\.npy'"):
        samples[1]
    path.unlink()
    with pytest.raises(InvalidInputError, match="must not change while a run reads it"):
        samples[2]


def test_no_agent_reads_files_unless_its_operator_allows_it() -> None:
    """Presets are allowed everywhere; what takes a path is none."""
    spec = parse_spec("worker_agent.models.token_files:tokens?path=/etc/hosts&vocabulary=9", field="data")
    assert not spec.is_built_in and not allows(BUILT_IN, spec.target)


@pytest.mark.campaign
def test_replicas_train_on_a_file_as_one_process_does(tmp_path: Path) -> None:
    """Two replicas of two stages: each reads the microbatches that are its own."""
    np.save(tmp_path / "t.npy", np.random.default_rng(0).integers(0, 20, 400).astype(np.uint16))
    data = (
        f"worker_agent.models.token_files:tokens?path={quote(str(tmp_path / 't.npy'))}&vocabulary=20&sequence_length=6"
    )
    model = "preset:awd_lm?vocabulary=20&embedding=8&hidden=12&sequence_length=6&dropout=0"
    plan = make_plan("1f1b", (0, 2, 5), replicas=2)
    job = RunJob(
        plan=plan,
        model=model,
        data=data,
        steps=STEPS,
        checkpoint_every=STEPS,
        seed=SEED,
        learning_rate=RATE,
        out=str(tmp_path / "out"),
        device="cpu",
    )
    run_ranks(job)
    expected = train(plan, model, data, steps=STEPS, seed=SEED, learning_rate=RATE)
    assert distance(checkpoint_weights(tmp_path / "out", STEPS), expected) < 1e-11


def test_padded_windows_bring_a_mask_to_a_model_that_takes_it_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [5, 6, 7]}\n{"input_ids": [8, 9, 10, 11, 12]}\n')
    data = f"worker_agent.models.token_files:tokens?path={path}&vocabulary=50&sequence_length=4&padded=true"
    form = build_model("hf:gpt2?n_layer=1&n_embd=8&n_head=2&vocab_size=50", seed=0, empty=True).batches
    given: Any = open_data(data, microbatch_size=2, seed=0, form=form).microbatch(0)
    (numbers, mask, *_), targets = given
    assert mask.tolist() == (targets != IGNORED).long().tolist() and 0 < int(mask.sum()) < mask.numel()
    plain, same = open_data(data, microbatch_size=2, seed=0).microbatch(0)
    assert isinstance(plain, Tensor) and isinstance(same, Tensor)
    assert torch.equal(plain, numbers) and torch.equal(same, targets)
