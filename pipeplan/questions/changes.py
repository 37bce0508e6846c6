"""Changes: what differs between two documents, as the lines of a diff.

`~` marks what is different, `+` what is new, `-` what is gone. Blocks are matched by their names. Neighbours with equal
changes share a line, and so do the measurements of a block: a changed model changes every number of every block.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import groupby
from typing import Any

from pipeplan.documents.profile import Block, Profile

_LEFT_ASIDE = ("method", "spread", "forward_spread_s", "backward_spread_s")
"""How a profile was measured, and how steadily: not what it says of the model."""

_MEASURED_BYTES = ("device.memory_bytes", "device.context_bytes", "host.memory_bytes")
"""Bytes that a machine has, as far as others leave them free. All other whole numbers are counted."""

_MEASUREMENTS = "measurements."


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A value that differs, by its path in the document; None where it is not there."""

    path: str
    before: object
    after: object

    @property
    def measured(self) -> bool:
        """Whether two measurements of the same thing give it a little differently: all fractions, and some bytes."""
        return isinstance(self.before, float) or self.path.endswith(_MEASURED_BYTES)

    @property
    def quantity(self) -> str:
        """What it is a value of, whichever measurement it belongs to."""
        return self.path.split(".", 2)[2] if self.path.startswith(_MEASUREMENTS) else self.path

    @property
    def relative(self) -> float | None:
        """The growth as a fraction; None where it has none."""
        before, after = self.before, self.after
        if isinstance(before, int | float) and isinstance(after, int | float) and before:
            return after / before - 1
        return None

    def __str__(self) -> str:
        percent = "" if self.relative is None else f" ({100 * self.relative:+.1f} %)"
        return f"{self.path}: {_shown(self.before)} -> {_shown(self.after)}{percent}"


def differences(
    then: Mapping[str, object], now: Mapping[str, object], *, prefix: str = "", tolerance: float = 0.0
) -> list[str]:
    """A line for each value that differs; of measured ones by more than the tolerance, a fraction."""
    return [f"~ {prefix}{change}" for change in _changes(then, now, tolerance)]


def profile_changes(then: Profile, now: Profile, tolerance: float) -> list[str]:
    """Lines for blocks that are new, gone or different, then for all else."""
    if then == now:
        return []
    before, after = ({block.name: block for block in profile.blocks} for profile in (then, now))
    kept = [[name for name in each if name in before and name in after] for each in (before, after)]
    lines = _block_lines(before, after, tolerance)
    lines += ["~ order of the blocks"] if kept[0] != kept[1] else []
    rest = [{name: value for name, value in flat(each) if not name.startswith("blocks.")} for each in (then, now)]
    return lines + differences(*rest, tolerance=tolerance)


def flat(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """The plain values of a document by their paths; measurements by their microbatch size."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in _LEFT_ASIDE and inner is not None and inner != ():
                yield from flat(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, tuple) and value and is_dataclass(value[0]):
        for index, inner in enumerate(value):
            yield from flat(inner, f"{path}.{getattr(inner, 'microbatch_size', index)}")
    else:
        yield path, value


def _changes(then: Mapping[str, object], now: Mapping[str, object], tolerance: float) -> list[Change]:
    found = []
    for path in [*then, *(path for path in now if path not in then)]:
        change = Change(path=path, before=then.get(path), after=now.get(path))
        near = change.measured and change.relative is not None and abs(change.relative) <= tolerance
        if change.before != change.after and not near:
            found.append(change)
    return found


def _block_lines(before: Mapping[str, Block], after: Mapping[str, Block], tolerance: float) -> list[str]:
    """A line for each run of neighbours that are new, gone, or differ in the same counts."""
    found: list[tuple[str, str, tuple[Change, ...]]] = []
    for name, block in before.items():
        if name not in after:
            found.append((name, f"- {block.weight_bytes} weight_bytes", ()))
            continue
        changes = _changes(dict(flat(block)), dict(flat(after[name])), tolerance)
        counted = [change for change in changes if not change.measured]
        if changes:
            found.append((name, "~ " + "; ".join(str(change) for change in counted), tuple(changes)))
    found += [(name, f"+ {after[name].weight_bytes} weight_bytes", ()) for name in after if name not in before]

    lines = []
    for said, run in groupby(found, key=lambda one: one[1]):
        names, _, changed = zip(*run, strict=True)
        alike = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)} blocks)"
        if said.startswith("~"):
            counted = [change for change in changed[0] if not change.measured]  # those of the others are equal
            measured = [change for changes in changed for change in changes if change.measured]
            said = "~ " + "; ".join((*_by_quantity(counted), *_by_quantity(measured)))
        lines.append(f"{said[0]} {alike}: {said[2:]}")
    return lines


def _by_quantity(changes: Sequence[Change]) -> list[str]:
    """A text for each quantity: its one change, or the range of several."""
    found: dict[str, list[Change]] = {}
    for change in changes:
        found.setdefault(change.quantity, []).append(change)
    return [_range(quantity, alike) for quantity, alike in found.items()]


def _range(quantity: str, changes: Sequence[Change]) -> str:
    relative = [change.relative for change in changes if change.relative is not None]
    if len(changes) == 1 or len(relative) < len(changes):
        more = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
        return f"{changes[0]}{more}"
    ends = [f"{100 * each:+.1f} %" for each in (min(relative), max(relative))]
    return f"{quantity}: {' to '.join(dict.fromkeys(ends))}"


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
