"""Token files: token numbers that a tokenizer has written, as the sequences of a language model.

    .bin      numbers of type `dtype` one after the other, as nanoGPT writes them. An .idx of the same name, as
              Megatron-LM writes it, has the dtype and the documents' ends
    .npy      an array of whole numbers: one row of them, or a row a document
    .jsonl    an object a line, whose `field` is a document's list of numbers (`json_lines`)
    .parquet, .arrow   a column `field` of lists of numbers, a row a document (`arrow_files`)

Files of numbers are mapped into memory: only what a microbatch needs is read. B sequences of S tokens.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeplan.errors import InvalidInputError, require, require_count
from worker_agent.models import arrow_files
from worker_agent.models.batches import IGNORED
from worker_agent.models.json_lines import read_lines
from worker_agent.models.samples import Samples

DTYPES = ("uint8", "uint16", "uint32", "int16", "int32", "int64")
"""Of the tokens in a .bin, which are little-endian."""

SUFFIXES = (".bin", ".npy", ".jsonl", *arrow_files.SUFFIXES)

Row = NDArray[Any] | arrow_files.TokenColumn
"""Tokens in a row, of which slices are read."""

INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEADER = np.dtype([("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
_INDEX_DTYPES = {1: "uint8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""The header of Megatron-LM's .idx after the magic, and the dtypes of tokens by their codes."""


def tokens(
    *,
    path: str,
    vocabulary: int,
    microbatch_size: int,
    seed: int,
    sequence_length: int = 1024,
    dtype: str | None = None,
    field: str = "input_ids",
    padded: bool = False,
    pad: int = 0,
    named_inputs: bool = False,
) -> Samples:
    """Inputs (B, S) and the tokens that follow them (B, S), from a file or from all token files of a folder.

    The targets are the labels instead where a file has some: IGNORED, or a token.

    Packed (the default), a file's documents are one row of tokens, and a sample is a window of it; what is left at a
    file's end is too short for one. With `padded` a window ends where its document ends: `pad` fills its inputs and
    IGNORED its targets, and with `named_inputs` an attention mask says where tokens are. Windows do not overlap but for
    the token that one predicts and the next one reads. The seed gives their order, which is the same in every pass.

    Raises InvalidInputError for a path, a file or a token that breaks a rule, and for a file that has changed since.
    """
    require_count("data.sequence_length", sequence_length)
    require_count("data.vocabulary", vocabulary)
    require_count("data.pad", pad, at_least=0)
    require(pad < vocabulary, "data.pad", f"must be below the vocabulary of {vocabulary}", pad)
    require(dtype is None or dtype in DTYPES, "data.dtype", f"must be one of {', '.join(DTYPES)}", dtype)
    files = [_opened(each, dtype, field) for each in _files(Path(path))]
    parts = [FileWindows(file, length=sequence_length, padded=padded) for file in files]
    ends = list(accumulate(part.count for part in parts))
    rule = f"must hold a sequence of {sequence_length} tokens and the token that follows it"
    require(ends[-1] > 0, "data.path", "must hold a document of at least 2 tokens" if padded else rule, path)
    order = torch.randperm(ends[-1], generator=torch.Generator().manual_seed(seed)).numpy()

    def read(numbers: Tensor) -> tuple[Any, Tensor]:
        inputs = np.full((len(numbers), sequence_length), pad, dtype=np.int64)
        targets = np.full((len(numbers), sequence_length), IGNORED, dtype=np.int64)
        mask = torch.zeros((len(numbers), sequence_length), dtype=torch.int64)
        for row, number in enumerate(order[numbers.numpy()].tolist()):
            part = bisect_right(ends, number)
            window, labels = parts[part].window(number - (ends[part - 1] if part else 0), vocabulary)
            inputs[row, : len(window) - 1] = window[:-1]
            targets[row, : len(window) - 1] = labels[1:]
            mask[row, : len(window) - 1] = 1
        if padded and named_inputs:
            return {"input_ids": torch.from_numpy(inputs), "attention_mask": mask}, torch.from_numpy(targets)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    return Samples(read, count=ends[-1], microbatch_size=microbatch_size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFile:
    """A file's tokens in one row, and how many each of its documents has; `documents` is None where it has none.

    `labels` are what is to be predicted, at the places of the tokens; None where the tokens themselves are.
    `state` is the file's size and time of change when it was opened.
    """

    path: Path
    tokens: Row
    documents: NDArray[np.int64] | None
    state: tuple[int, int]
    labels: Row | None = None

    def unchanged(self) -> bool:
        """Whether the file is there, and is as it was when it was opened."""
        try:
            return _state(self.path) == self.state
        except OSError:
            return False


class FileWindows:
    """A file's windows of `length` tokens and the one that follows; padded ones may be shorter."""

    def __init__(self, file: TokenFile, *, length: int, padded: bool) -> None:
        rule = "must have documents to be padded: lists in columns or lines, an .npy of rows, or a .bin with its .idx"
        require(not padded or file.documents is not None, "data.padded", rule, str(file.path))
        sizes = file.documents if padded and file.documents is not None else np.array([len(file.tokens)])
        counts = np.maximum(sizes - 1, 0) + (length - 1 if padded else 0)
        self._file = file
        self._length = length
        self._stops = np.cumsum(sizes)
        self._starts = self._stops - sizes
        self._ends = np.cumsum(counts // length)
        self.count = int(self._ends[-1])

    def window(self, number: int, vocabulary: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """A window's tokens and labels.

        Raises InvalidInputError if one is not in the vocabulary, or if the file has changed.
        """
        file = self._file
        require(file.unchanged(), "data.path", "must not change while a run reads it", str(file.path))
        document = int(np.searchsorted(self._ends, number, side="right"))
        within = number - (int(self._ends[document - 1]) if document else 0)
        start = int(self._starts[document]) + within * self._length
        places = slice(start, min(start + self._length + 1, int(self._stops[document])))
        found = file.tokens[places]
        self._require_known("token", found, start, vocabulary)
        if file.labels is None:
            return found, found
        labels = file.labels[places]
        self._require_known("label", np.where(labels == IGNORED, 0, labels), start, vocabulary)
        return found, labels

    def _require_known(self, what: str, found: NDArray[Any], start: int, vocabulary: int) -> None:
        """Raises InvalidInputError for a number that is not in the vocabulary, with its place in the file."""
        strange = np.flatnonzero((found < 0) | (found >= vocabulary))
        if len(strange):
            place = int(strange[0])
            path = self._file.path
            rule = f"must hold {what}s from 0 to below the vocabulary of {vocabulary}: {what} {start + place} of {path}"
            raise InvalidInputError("data.vocabulary", rule, int(found[place]))


def _files(path: Path) -> list[Path]:
    """The file, or a folder's token files in the order of their names."""
    require(path.exists(), "data.path", "must name a file or a folder that exists", str(path))
    if path.is_dir():
        saved = arrow_files.saved_files(path)
        found = saved if saved is not None else sorted(each for each in path.iterdir() if each.suffix in SUFFIXES)
        require(len(found) > 0, "data.path", f"must be a folder with files {', '.join(SUFFIXES)}", str(path))
        return found
    require(path.suffix in SUFFIXES, "data.path", f"must end with one of {', '.join(SUFFIXES)}", str(path))
    return [path]


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _opened(path: Path, dtype: str | None, field: str) -> TokenFile:
    """The file's tokens. Raises InvalidInputError for a file that is empty, cannot be read or is not of its kind."""
    try:
        state = _state(path)
        require(state[0] > 0, "data.path", "must name files that are not empty", str(path))
        documents: NDArray[np.int64] | None
        tokens: Row
        labels: Row | None = None
        if path.suffix == ".jsonl":
            tokens, labels, documents = read_lines(path, field)
        elif path.suffix in arrow_files.SUFFIXES:
            rule = "must be left out for files whose columns say it"
            require(dtype is None, "data.dtype", f"{rule}, as {path}", dtype)
            tokens, labels, documents = arrow_files.open_columns(path, field)
        elif path.suffix == ".npy":
            tokens, documents = read_array(path, dtype)
        else:
            tokens, documents = read_numbers(path, dtype, state[0])
    except OSError as error:
        raise InvalidInputError("data.path", f"must be readable ({error.strerror})", str(path)) from error
    require(len(tokens) > 0, "data.path", "must name files that hold tokens", str(path))
    return TokenFile(path=path, tokens=tokens, documents=documents, state=state, labels=labels)


def read_array(path: Path, dtype: str | None) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
    """An .npy's tokens, and its rows as documents."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise InvalidInputError("data.path", f"must be an array that numpy wrote ({error})", str(path)) from error
    require(found.dtype.kind in "iu", "data.path", "must hold whole numbers", f"{path} of {found.dtype}")
    require(found.ndim in (1, 2), "data.path", "must hold one row, or a row a document", f"{path} of {found.shape}")
    rule = f"must be left out, or be that of {path}, which is {found.dtype}"
    require(dtype in (None, found.dtype.name), "data.dtype", rule, dtype)
    documents = np.full(found.shape[0], found.shape[1], dtype=np.int64) if found.ndim == 2 else None
    return found.reshape(-1), documents


def read_numbers(path: Path, dtype: str | None, size: int) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
    """A .bin's tokens, and its documents if it has an .idx."""
    index = path.with_suffix(".idx")
    documents = None
    if index.exists():
        named, documents = read_index(index)
        require(
            dtype in (None, named), "data.dtype", f"must be left out, or be that of {index}, which is {named}", dtype
        )
        dtype = named
    rule = f"must be given for a .bin without an .idx: one of {', '.join(DTYPES)}"
    kind = np.dtype(dtype or "V").newbyteorder("<")
    require(dtype is not None, "data.dtype", rule, dtype)
    whole = size % kind.itemsize == 0
    require(whole, "data.dtype", f"must divide the {size} bytes of {path} into whole tokens", dtype)
    tokens = np.memmap(path, dtype=kind, mode="r")
    rule = f"must hold as many tokens as its .idx says, {0 if documents is None else documents.sum()}"
    fits = documents is None or int(documents.sum()) == len(tokens)
    require(fits, "data.path", rule, f"{path} of {len(tokens)}")
    return tokens, documents


def read_index(path: Path) -> tuple[str, NDArray[np.int64]]:
    """The dtype of the tokens and the sizes of the documents in Megatron-LM's .idx; a sequence is a document here."""
    content = path.read_bytes()
    start = len(INDEX_MAGIC) + _INDEX_HEADER.itemsize
    fits = content.startswith(INDEX_MAGIC) and len(content) >= start
    require(fits, "data.path", "must have an .idx that Megatron-LM wrote", str(path))
    header = np.frombuffer(content, dtype=_INDEX_HEADER, count=1, offset=len(INDEX_MAGIC))[0]
    code, sequences = int(header["dtype"]), int(header["sequences"])
    require(code in _INDEX_DTYPES, "data.path", "must have an .idx of whole numbers", f"{path} of dtype {code}")
    rule = f"must have an .idx that holds the sizes of its {sequences} sequences"
    require(len(content) >= start + 4 * sequences, "data.path", rule, f"{path} of {len(content)} bytes")
    return _INDEX_DTYPES[code], np.frombuffer(content, "<i4", sequences, start).astype(np.int64)
