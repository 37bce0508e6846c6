"""Arrow files: tokens in columns of lists, as Hugging Face datasets and other tools write them.

    .parquet    read a row group at a time
    .arrow      mapped into memory: an IPC stream, as `datasets` writes it, or an IPC file
    a folder    that `datasets.save_to_disk` wrote: its state.json names the .arrow files

A row is a document: a list of tokens, and where the columns are there a list of `labels` and one of `attention_mask`.
Tokens whose mask is 0 are padding, and are left out. Groups that had to be decoded stay in memory up to KEPT_BYTES.
"""

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.errors import InvalidInputError, MissingDependencyError, require

SUFFIXES = (".parquet", ".arrow")

LABELS, MASK = "labels", "attention_mask"

KEPT_BYTES = 2**28
"""The upper bound on a file's decoded groups in memory. The newest group stays even if it is larger."""

_FILE_MAGIC = b"ARROW1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGroup:
    """Some rows: their tokens one after another, the tokens' labels if there are any, and each row's length."""

    tokens: NDArray[Any]
    labels: NDArray[Any] | None
    sizes: NDArray[np.int64]

    @property
    def kept_bytes(self) -> int:
        """The bytes that it takes in memory, or of a mapped file."""
        return self.tokens.nbytes + self.sizes.nbytes + (0 if self.labels is None else self.labels.nbytes)


@dataclass(slots=True, eq=False)
class TokenColumn:
    """A file's tokens as one array, or its labels: groups end at `stops`, and `load` reads one group."""

    stops: Sequence[int]
    load: Callable[[int], TokenGroup]
    labels: bool = False

    def __len__(self) -> int:
        return self.stops[-1] if self.stops else 0

    def __getitem__(self, places: slice) -> NDArray[Any]:
        start, stop, _ = places.indices(len(self))
        found = []
        group = bisect_right(self.stops, start)
        while start < stop:
            first = self.stops[group - 1] if group else 0
            loaded = self.load(group)
            array = loaded.labels if self.labels and loaded.labels is not None else loaded.tokens
            found.append(array[start - first : stop - first])
            start, group = self.stops[group], group + 1
        return found[0] if len(found) == 1 else np.concatenate(found) if found else np.empty(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class GroupCache:
    """Loads groups, and caches those used last."""

    read: Callable[[int], TokenGroup]
    kept_bytes: int
    kept: OrderedDict[int, TokenGroup] = field(default_factory=OrderedDict)

    def load(self, number: int) -> TokenGroup:
        """A group, from the cache or the file."""
        group = self.kept.pop(number, None) or self.read(number)
        self.kept[number] = group
        while len(self.kept) > 1 and sum(each.kept_bytes for each in self.kept.values()) > self.kept_bytes:
            self.kept.popitem(last=False)
        return group


def open_columns(
    path: Path, name: str, *, kept_bytes: int = KEPT_BYTES
) -> tuple[TokenColumn, TokenColumn | None, NDArray[np.int64]]:
    """A file's tokens in the column of this name, its labels if it has some, and the lengths of its documents.

    Every group is read once. Raises InvalidInputError for a file, a column or a row that breaks a rule, and
    MissingDependencyError without pyarrow.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingDependencyError(f"{path.suffix} files need pyarrow: pip install 'pipeplan[data]'") from error
    try:
        schema, count, table = (_parquet if path.suffix == ".parquet" else _arrow)(path)
        rule = f"must have a column {name!r}, as `field` says; it has {', '.join(schema.names) or 'none'}"
        require(name in schema.names, "data.field", f"{rule}: {path}", name)
        columns = [name, *(each for each in (LABELS, MASK) if each in schema.names and each != name)]
        for column in columns:
            _require_lists(path, column, schema.field(column).type)
        read = partial(_read, path, columns, table)
        sizes = [read(number).sizes for number in range(count)]
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInputError("data.path", f"must be a file that Arrow reads ({reason})", str(path)) from error
    stops = list(accumulate(int(each.sum()) for each in sizes))
    cache = GroupCache(read, kept_bytes)
    labels = TokenColumn(stops, cache.load, labels=True) if LABELS in columns else None
    documents = np.concatenate(sizes) if sizes else np.empty(0, dtype=np.int64)
    return TokenColumn(stops, cache.load), labels, documents


def saved_files(folder: Path) -> list[Path] | None:
    """The files of a folder that `datasets.save_to_disk` wrote; None for another folder.

    Raises InvalidInputError for a folder of several splits, and for one whose files are not all there.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _document(folder / "dataset_dict.json").get("splits")
        names = ", ".join(str(folder / str(split)) for split in splits) if isinstance(splits, list) else "its folders"
        raise InvalidInputError("data.path", f"must name one split of the dataset: {names}", str(folder))
    if not (folder / "state.json").is_file():
        return None
    state = _document(folder / "state.json")
    files, indices = state.get("_data_files"), state.get("_indices_data_files")
    rule = "must have a state.json that names its files, as datasets.save_to_disk writes it"
    fits = isinstance(files, list) and all(isinstance(each, dict) for each in files)
    require(fits and not indices, "data.path", rule, str(folder))
    assert isinstance(files, list)
    found = []
    for each in files:
        name = each.get("filename")
        there = isinstance(name, str) and Path(name).name == name and (folder / name).is_file()
        require(there, "data.path", f"must hold every file that {folder / 'state.json'} names", name)
        found.append(folder / name)
    return found


def _document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError("data.path", f"must hold JSON ({error})", str(path)) from error
    require(isinstance(found, dict), "data.path", "must hold a JSON object", str(path))
    return dict(found)


def _parquet(path: Path) -> tuple[Any, int, Callable[[int, list[str]], Any]]:
    """A file's schema, the number of its row groups, and a function that reads columns of one."""
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(path, memory_map=True)
    return (
        file.schema_arrow,
        file.num_row_groups,
        lambda number, columns: file.read_row_group(number, columns=columns, use_threads=False),
    )


def _arrow(path: Path) -> tuple[Any, int, Callable[[int, list[str]], Any]]:
    """The same for an IPC stream or file, with its record batches."""
    import pyarrow as pa

    source = pa.memory_map(str(path))
    magic = source.read(len(_FILE_MAGIC))
    source.seek(0)
    reader = pa.ipc.open_file(source) if magic == _FILE_MAGIC else pa.ipc.open_stream(source)
    table = reader.read_all()
    batches = table.to_batches()
    return table.schema, len(batches), lambda number, columns: pa.Table.from_batches([batches[number].select(columns)])


def _require_lists(path: Path, column: str, kind: Any) -> None:
    import pyarrow.types as types

    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    whole = lists and (types.is_integer(kind.value_type) or (column == MASK and types.is_boolean(kind.value_type)))
    require(whole, "data.field", f"must be a column of lists of whole numbers: {column!r} of {path}", str(kind))


def _read(path: Path, columns: Sequence[str], table: Callable[[int, list[str]], Any], number: int) -> TokenGroup:
    """A group's rows, without masked tokens. Raises InvalidInputError for missing or uneven lists."""
    rows = table(number, list(columns))
    values, sizes = {}, {}
    for column in columns:
        chunks = rows.column(column)
        lists = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()  # the one stays where it is
        flat = lists.flatten()
        missing = lists.null_count + flat.null_count
        rule = f"must have a list of whole numbers in every row: column {column!r} of {path}, group {number}"
        require(missing == 0, "data.path", rule, f"{missing} missing")
        lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
        values[column], sizes[column] = flat.to_numpy(zero_copy_only=False), lengths.astype(np.int64)
        uneven = np.flatnonzero(sizes[column] != sizes[columns[0]])
        if len(uneven):
            row = int(uneven[0])
            rule = f"must have lists of one length in a row: row {row} of group {number} of {path}"
            raise InvalidInputError("data.path", rule, {c: int(sizes[c][row]) for c in (columns[0], column)})
    tokens, labels, lengths = (
        values[columns[0]],
        values.get(LABELS) if columns[0] != LABELS else None,
        sizes[columns[0]],
    )
    if MASK in columns[1:]:
        kept = values[MASK] != 0
        document = np.repeat(np.arange(len(lengths)), lengths)
        lengths = np.bincount(document[kept], minlength=len(lengths)).astype(np.int64)
        tokens, labels = tokens[kept], None if labels is None else labels[kept]
    return TokenGroup(tokens=tokens, labels=labels, sizes=lengths)
