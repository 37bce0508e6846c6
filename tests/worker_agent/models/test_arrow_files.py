"""Arrow files: the batches of Parquet files and saved datasets are those of other files with the same tokens."""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeplan.errors import InvalidInputError, MissingDependencyError
from tests.worker_agent.models.test_token_files import VOCABULARY, Documents, documents, opened, write
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.test_executor import RATE, SEED, checkpoint_weights
from worker_agent.models import arrow_files
from worker_agent.models.batches import IGNORED
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.samples import Samples
from worker_agent.runtime.job import RunJob

FORMS = ("parquet", "stream", "file", "saved")


def write_table(folder: Path, columns: dict[str, Any], form: str, *, group: int = 2) -> Path:
    """Columns as one file, or as a folder of two, of groups of some rows."""
    table = pa.table(columns)
    if form == "parquet":
        pq.write_table(table, folder / "train.parquet", row_group_size=group)
        return folder / "train.parquet"
    if form == "saved":
        return write_saved(folder / "saved", table, group)
    make = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with make(str(folder / "train.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=group)
    return folder / "train.arrow"


def write_saved(folder: Path, table: Any, group: int) -> Path:
    """What `datasets.save_to_disk` writes, as one file."""
    folder.mkdir()
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=group)
    (folder / "dataset_info.json").write_text('{"features": {}}')
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_indices_data_files": None, "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def lists(rows: Documents, kind: Any = None) -> Any:
    return pa.array(rows, pa.list_(kind or pa.int32()))


def batches(samples: Samples) -> list[tuple[Any, Tensor]]:
    return [samples[k] for k in range(len(samples))]


def same(one: Samples, other: Samples) -> bool:
    pairs = list(zip(batches(one), batches(other), strict=True))
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


@given(documents, st.integers(1, 5), st.booleans(), st.sampled_from(FORMS), st.integers(1, 4))
def test_batches_are_those_of_other_files_with_the_same_tokens(
    written: Documents, length: int, padded: bool, form: str, group: int
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        usual = write(folder, written, "jsonl" if padded else "npy")
        path = write_table(folder, {"input_ids": lists(written)}, form, group=group)
        options: dict[str, Any] = {"sequence_length": length, "padded": padded, "size": 3, "seed": 1}
        try:
            expected = opened(usual, **options)
        except InvalidInputError:
            with pytest.raises(InvalidInputError, match=r"^data\.path: must "):
                opened(path, **options)
            return
        assert same(opened(path, **options), expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.large_list(pa.uint16()), pa.list_(pa.int8(), 3)], ids=["long", "large", "fixed"]
)
def test_lists_of_every_kind_are_read(form: str, kind: Any, tmp_path: Path) -> None:
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    np.save(tmp_path / "rows.npy", np.array(rows))
    path = write_table(tmp_path, {"input_ids": pa.array(rows, kind), "text": ["a", "b", "c"]}, form)
    for padded in (False, True):
        expected = opened(tmp_path / "rows.npy", sequence_length=2, padded=padded)
        assert same(opened(path, sequence_length=2, padded=padded), expected)


@pytest.mark.parametrize("form", FORMS)
def test_what_the_mask_leaves_out_is_not_read(form: str, tmp_path: Path) -> None:
    """As if the dataset had not been padded."""
    rows = [[1, 2, 3, 0], [0, 0, 5, 6], [7, 8, 9, 10]]
    masks = [[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]]
    bare = write(tmp_path, [[1, 2, 3], [5, 6], [7, 8, 9, 10]], "jsonl")
    path = write_table(tmp_path, {"input_ids": lists(rows), "attention_mask": lists(masks, pa.int8())}, form)
    for padded in (False, True):
        options = {"sequence_length": 3, "padded": padded}
        assert same(opened(path, **options), opened(bare, **options))


@pytest.mark.parametrize("form", FORMS)
def test_labels_are_the_targets_in_the_place_before_them(form: str, tmp_path: Path) -> None:
    columns = {"input_ids": lists([[1, 2, 3], [4, 5, 6, 7]]), "labels": lists([[IGNORED, 2, 3], [IGNORED, 9, 8, 7]])}
    path = write_table(tmp_path, columns, form)
    padded = dict(zip(*(each.tolist() for each in rows_of(opened(path, sequence_length=3, padded=True))), strict=True))
    assert padded == {(1, 2, 0): (2, 3, IGNORED), (4, 5, 6): (9, 8, 7)}
    inputs, targets = rows_of(opened(path, sequence_length=6))
    assert inputs.tolist() == [(1, 2, 3, 4, 5, 6)] and targets.tolist() == [(2, 3, IGNORED, 9, 8, 7)]


class Rows(list[tuple[int, ...]]):
    """Rows of a batch."""

    def tolist(self) -> list[tuple[int, ...]]:
        return list(self)


def rows_of(samples: Samples) -> tuple[Rows, Rows]:
    """All inputs and all targets, in the order in which they are read."""
    read = batches(samples)
    return Rows(tuple(i[0].tolist()) for i, _ in read), Rows(tuple(t[0].tolist()) for _, t in read)


def test_a_model_by_name_gets_the_mask_of_what_is_there_and_not_of_what_is_predicted(tmp_path: Path) -> None:
    columns = {"input_ids": lists([[1, 2, 3], [4, 5, 6, 7, 8]]), "labels": lists([[IGNORED, 2, 3], [IGNORED] * 5])}
    path = write_table(tmp_path, columns, "parquet")
    data = f"worker_agent.models.token_files:tokens?path={path}&vocabulary=50&sequence_length=4&padded=true"
    form = build_model("hf:gpt2?n_layer=1&n_embd=8&n_head=2&vocab_size=50", seed=0, empty=True).batches
    given: Any = open_data(data, microbatch_size=2, seed=0, form=form).microbatch(0)
    (_, mask, *_), targets = given
    assert sorted(mask.sum(dim=1).tolist()) == [2, 4]
    assert sorted((targets != IGNORED).sum(dim=1).tolist()) == [0, 2]


def test_groups_that_do_not_fit_are_read_again(tmp_path: Path) -> None:
    rows = [list(range(k, k + 20)) for k in range(0, 400, 20)]
    path = write_table(tmp_path, {"input_ids": lists(rows)}, "parquet")
    column, _, _ = arrow_files.open_columns(path, "input_ids", kept_bytes=500)
    cache: Any = getattr(column.load, "__self__")  # noqa: B009
    for start in range(0, 390, 9):
        assert column[start : start + 9].tolist() == list(range(start, start + 9))
        assert 1 <= len(cache.kept) <= 2


@pytest.mark.parametrize(
    ("columns", "options", "sentence"),
    [
        (
            {"tokens": lists([[1, 2]])},
            {},
            "data.field: must have a column 'input_ids', as `field` says; it has tokens: ",
        ),
        (
            {"input_ids": [1, 2, 3]},
            {},
            "data.field: must be a column of lists of whole numbers: 'input_ids' of .*int64",
        ),
        ({"input_ids": [[1.5]]}, {}, "data.field: must be a column of lists of whole numbers: .* got 'list<.*double"),
        ({"input_ids": ["a"]}, {}, "data.field: must be a column of lists of whole numbers: .* got 'string'"),
        (
            {"input_ids": [[1, 2], None]},
            {},
            "data.path: must have a list of whole numbers in every row: column 'input_i",
        ),
        ({"input_ids": [[1, None]]}, {}, "data.path: must have a list of whole numbers in every row: .* '1 missing'"),
        (
            {"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3]]},
            {},
            "data.path: must have lists of one length in a row: row 1 of group 0 of .* {'input_ids': 2, 'labels': 1}",
        ),
        ({"input_ids": lists([])}, {}, "data.path: must name files that hold tokens, got '"),
        ({"input_ids": lists([[1, 2, 3]])}, {"dtype": "int32"}, "data.dtype: must be left out for files whose columns"),
        (
            {"input_ids": lists([[1, VOCABULARY, 3]])},
            {},
            "data.vocabulary: must hold tokens from 0 .*: token 1 of .*1000",
        ),
        (
            {"input_ids": [[1, 2, 3]], "labels": [[1, -1, 3]]},
            {},
            "data.vocabulary: must hold labels from 0 to below the vocabulary of 1000: label 1 of .*, got -1",
        ),
    ],
)
@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_columns_that_do_not_fit_are_one_sentence(
    form: str, columns: dict[str, Any], options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = write_table(tmp_path, columns, form)
    with pytest.raises(InvalidInputError, match=sentence):
        batches(opened(path, **{"sequence_length": 2, **options}))


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
@pytest.mark.parametrize(
    ("content", "rule"), [(b"", "must name files that are not empty"), (b"no", "that Arrow reads")]
)
def test_files_of_other_kinds_are_one_sentence(name: str, content: bytes, rule: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInputError, match=rf"data\.path: .*{rule}.*, got '.*/{name}'"):
        opened(tmp_path / name, sequence_length=2)


def test_a_file_that_ends_too_early_is_one_sentence(tmp_path: Path) -> None:
    for form in ("parquet", "stream", "file"):
        path = write_table(tmp_path, {"input_ids": lists([[1, 2, 3]] * 50)}, form, group=5)
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(InvalidInputError, match=r"data\.path: must be a file that Arrow reads"):
            opened(path, sequence_length=2)


def test_a_saved_dataset_must_be_one_split_and_whole(tmp_path: Path) -> None:
    saved = write_table(tmp_path, {"input_ids": lists([[1, 2, 3]])}, "saved")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InvalidInputError, match=r"must name one split of the dataset: .*/train, .*/test, got"):
        opened(tmp_path, sequence_length=2)
    (saved / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(InvalidInputError, match=r"must hold every file that .*state\.json names, got 'data-00000-of"):
        opened(saved, sequence_length=2)
    for state, rule in (("{", "hold JSON"), ("[]", "hold a JSON object"), ("{}", "have a state.json that names")):
        (saved / "state.json").write_text(state)
        with pytest.raises(InvalidInputError, match=rf"data\.path: must {rule}"):
            opened(saved, sequence_length=2)


def test_shards_in_a_folder_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number in (1, 0):
        pq.write_table(
            pa.table({"input_ids": lists([[5 * number + k for k in range(5)]])}), tmp_path / f"{number}.parquet"
        )
    inputs, _ = rows_of(opened(tmp_path, sequence_length=2))
    assert sorted(inputs) == [(0, 1), (2, 3), (5, 6), (7, 8)]


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_changes_while_it_is_read_is_refused(form: str, tmp_path: Path) -> None:
    path = write_table(tmp_path, {"input_ids": lists([[1, 2, 3]] * 5)}, form)
    samples = opened(path, sequence_length=2)
    samples[0]
    os.utime(next(path.glob("*.arrow")) if path.is_dir() else path, ns=(1, 1))
    with pytest.raises(InvalidInputError, match=r"data\.path: must not change while a run reads it"):
        samples[1]


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_table(tmp_path, {"input_ids": lists([[1, 2, 3]])}, "parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match=r"\.parquet files need pyarrow: pip install 'pipeplan\[data\]'"):
        opened(path, sequence_length=2)


def test_a_run_on_a_saved_dataset_is_that_on_an_array(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 20, (40, 7))
    np.save(tmp_path / "rows.npy", rows)
    saved = write_table(tmp_path, {"input_ids": lists(rows.tolist())}, "saved", group=6)
    plan = make_plan("1f1b", (0, 2, 5))
    weights = []
    for number, path in enumerate((saved, tmp_path / "rows.npy")):
        data = f"worker_agent.models.token_files:tokens?path={quote(str(path))}&vocabulary=20&sequence_length=6"
        job = RunJob(
            plan=plan,
            model="preset:awd_lm?vocabulary=20&embedding=8&hidden=12&sequence_length=6&dropout=0",
            data=data,
            steps=2,
            checkpoint_every=2,
            seed=SEED,
            learning_rate=RATE,
            out=str(tmp_path / f"out{number}"),
            device="cpu",
        )
        run_ranks(job)
        weights.append(checkpoint_weights(tmp_path / f"out{number}", 2))
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
