"""Series: columns of numbers and of instructions as few bytes, and back exactly.

What repeats is stored once. An instruction is a template, such as `F%d@%d`, and its numbers; rows are ordered by
template, so that alike stands beside alike; numbers become differences to the one before; then byte planes (all lowest
bytes, all second ones, ...), of which zlib leaves little but the measurements' noise. Every column is packed by itself.
Times are whole nanoseconds, as clocks give them, and beside them by how many steps of a float each differs from that:
none for what was measured, few for what was computed.
The first byte of a chunk says in which of these formats it is; a format, once released, stays readable.
"""

import json
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

FORMAT = 1
LEVEL = 6
NS_PER_S = 10**9
LARGEST_S = 2.0**62 / NS_PER_S

_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,17})(?![0-9])")
"""What int() and str() give back as it stood, and 64 bits hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some rows of a lane in execution order: instructions' texts, moments in seconds, bytes held."""

    instructions: Sequence[str]
    start_s: Floats
    end_s: Floats
    memory_bytes: Integers


def pack_rows(rows: Rows) -> bytes:
    """The rows as a chunk."""
    split = [_split(text) for text in rows.instructions]
    templates = sorted({template for template, _ in split})
    ids = {template: number for number, template in enumerate(templates)}
    kinds = np.array([ids[template] for template, _ in split], dtype=np.int64)
    order = np.argsort(kinds, kind="stable")
    start_ns, end_ns = nanoseconds(rows.start_s), nanoseconds(rows.end_s)
    gaps_ns = start_ns - np.concatenate(([0], end_ns[:-1]))
    return _framed(
        json.dumps(templates).encode(),
        _packed(kinds),
        _packed(_number_steps(split, templates)),
        _packed(gaps_ns[order]),
        _packed((end_ns - start_ns)[order]),
        _packed(_beyond(rows.start_s, start_ns)),
        _packed(_beyond(rows.end_s, end_ns)),
        _packed(_steps(rows.memory_bytes[order])),
    )


def unpack_rows(chunk: bytes) -> Rows:
    """The rows of a chunk."""
    texts, *columns = _unframed(chunk)
    templates: list[str] = json.loads(texts)
    kinds, numbers, gaps_ns, durations_ns, start_steps, end_steps, memory_steps = map(_unpacked, columns)
    place = np.empty(len(kinds), dtype=np.int64)
    place[np.argsort(kinds, kind="stable")] = np.arange(len(kinds))
    durations_ns = durations_ns[place]
    end_ns = np.cumsum(gaps_ns[place] + durations_ns)
    return Rows(
        instructions=_joined(templates, kinds, numbers, place),
        start_s=_seconds(end_ns - durations_ns, start_steps),
        end_s=_seconds(end_ns, end_steps),
        memory_bytes=np.cumsum(memory_steps)[place],
    )


def nanoseconds(moments_s: Floats) -> Integers:
    """The nearest whole nanoseconds; those of moments beyond 64 bits of them are as far as these reach."""
    return np.rint(np.clip(moments_s, -LARGEST_S, LARGEST_S) * NS_PER_S).astype(np.int64)


def pack_floats(values: Sequence[float]) -> bytes:
    """Numbers as a chunk: every bit of them is kept."""
    return _framed(_packed(np.array(values, dtype=np.float64).view(np.int64)))


def unpack_floats(chunk: bytes) -> tuple[float, ...]:
    """The numbers of a chunk."""
    (column,) = _unframed(chunk)
    return tuple(_unpacked(column).view(np.float64).tolist())


def _beyond(moments_s: Floats, whole_ns: Integers) -> Integers:
    return moments_s.view(np.int64) - (whole_ns / NS_PER_S).view(np.int64)


def _seconds(whole_ns: Integers, steps: Integers) -> Floats:
    return ((whole_ns / NS_PER_S).view(np.int64) + steps).view(np.float64)


def _split(text: str) -> tuple[str, list[int]]:
    """The template of a text, in the notation of the operator %, and the numbers in it."""
    return _NUMBER.sub("%d", text.replace("%", "%%")), [int(number) for number in _NUMBER.findall(text)]


def _number_steps(split: Sequence[tuple[str, list[int]]], templates: Sequence[str]) -> Integers:
    """Template by template, and within it number by number: the differences from row to row."""
    numbers: dict[str, list[list[int]]] = {template: [] for template in templates}
    for template, values in split:
        numbers[template].append(values)
    columns = [_steps(column) for rows in numbers.values() for column in np.array(rows, dtype=np.int64).T]
    return np.concatenate(columns) if columns else np.empty(0, dtype=np.int64)


def _joined(templates: Sequence[str], kinds: Integers, number_steps: Integers, place: Integers) -> list[str]:
    """The texts, in execution order."""
    texts: list[str] = []
    read = 0
    for template, rows in zip(templates, np.bincount(kinds, minlength=len(templates)).tolist(), strict=True):
        slots = template.replace("%%", "").count("%d")
        columns = number_steps[read : read + slots * rows].reshape(slots, rows).cumsum(axis=1)
        read += slots * rows
        texts += [template % tuple(row) for row in columns.T.tolist()] if slots else [template % ()] * rows
    return [texts[row] for row in place.tolist()]


def _steps(values: Integers) -> Integers:
    return np.diff(values, prepend=np.int64(0))


def _packed(values: Integers) -> bytes:
    """Byte planes of the numbers, the sign in the lowest bit so that small negative numbers are small."""
    unsigned = ((values << 1) ^ (values >> 63)).astype("<u8")
    return zlib.compress(unsigned.view(np.uint8).reshape(-1, 8).T.tobytes(), LEVEL)


def _unpacked(column: bytes) -> Integers:
    planes = np.frombuffer(zlib.decompress(column), dtype=np.uint8).reshape(8, -1)
    unsigned = np.ascontiguousarray(planes.T).view("<u8").reshape(-1)
    return (unsigned >> np.uint64(1)).astype(np.int64) ^ -(unsigned & np.uint64(1)).astype(np.int64)


def _framed(*columns: bytes) -> bytes:
    lengths = struct.pack(f"<BB{len(columns)}I", FORMAT, len(columns), *(len(column) for column in columns))
    return lengths + b"".join(columns)


def _unframed(chunk: bytes) -> list[bytes]:
    version, count = struct.unpack_from("<BB", chunk)
    if version != FORMAT:
        raise ValueError(f"a chunk of format {version} cannot be read, only {FORMAT}")
    lengths = struct.unpack_from(f"<{count}I", chunk, 2)
    stops = np.cumsum((2 + 4 * count, *lengths)).tolist()
    return [chunk[start:stop] for start, stop in pairwise(stops)]
