"""Pairs: two profiles side by side, block by block, at a microbatch size that both were measured at.

Blocks are matched by their names, which are unique in a profile. A block that only one profile has gets a row of its
own.
"""

from dataclasses import dataclass

from pipeplan.documents.alike import alike
from pipeplan.documents.files import parse
from pipeplan.documents.profile import Profile
from pipeplan.errors import require
from pipeplan.formats import NONE, seconds, size, times

MOST_ROWS = 300
"""Rows in the table of a pair."""

Quantities = tuple[float, ...]
"""Of a block: forward_s, backward_s, weight_bytes, activation_bytes, output_bytes."""

LABELS = ("Forward", "Backward", "Weights", "Activations", "Output")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedCell:
    """A quantity of both: the second as a multiple of the first, and both values."""

    label: str
    ratio: str
    values: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRow:
    """A block, or several in a row that are equal in both. `only` is the one profile that has it: 1 or 2."""

    name: str
    blocks: int
    only: int | None
    cells: tuple[PairedCell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePair:
    """The page's content for two profiles; `totals` are over the blocks that both have."""

    names: tuple[str, str]
    microbatch_size: int
    sizes: tuple[int, ...]
    totals: tuple[PairedCell, ...]
    rows: tuple[PairedRow, ...]
    hidden_rows: int


def pair_of(wanted: str, contents: tuple[str, str]) -> ProfilePair:
    """The pair of the profiles in the texts. Raises InvalidInputError for a size that one of them does not have.

    The parser's process imports this by its name.
    """
    first, second = (parse(Profile, content) for content in contents)
    sizes = tuple(sorted(set(first.microbatch_sizes) & set(second.microbatch_sizes)))
    rule = f"must share a size that was measured: {first.microbatch_sizes} and {second.microbatch_sizes} do not"
    require(len(sizes) > 0, "profile", rule, first.model.name)
    rule = f"must be one that both were measured at: {', '.join(map(str, sizes))}"
    require(wanted in ("", *map(str, sizes)), "microbatch_size", rule, wanted)
    microbatch_size = int(wanted) if wanted else sizes[-1]

    a, b = (
        {
            block.name: (at.forward_s, at.backward_s, block.weight_bytes, at.activation_bytes, at.output_bytes)
            for block, at in ((block, block.at(microbatch_size)) for block in each.blocks)
        }
        for each in (first, second)
    )
    pairs = [(name, a.get(name), b.get(name)) for name in a | b]
    shared = a.keys() & b.keys()
    sums = [tuple(map(sum, zip(*(each[name] for name in shared), strict=True))) for each in (a, b)]
    runs = list(alike([name for name, _, _ in pairs], [(a, b) for _, a, b in pairs]))
    rows = [
        PairedRow(
            name=name,
            blocks=stop - start,
            only=2 if pairs[start][1] is None else 1 if pairs[start][2] is None else None,
            cells=_cells(pairs[start][1], pairs[start][2]),
        )
        for start, stop, name in runs
    ]
    named = [f"{profile.model.name} on {profile.device.name}" for profile in (first, second)]
    return ProfilePair(
        names=(named[0], named[1]),
        microbatch_size=microbatch_size,
        sizes=sizes,
        totals=_cells(*sums) if shared else (),
        rows=tuple(rows[:MOST_ROWS]),
        hidden_rows=max(0, len(rows) - MOST_ROWS),
    )


def _cells(first: Quantities | None, second: Quantities | None) -> tuple[PairedCell, ...]:
    cells = []
    for place, label in enumerate(LABELS):
        a, b = (None if side is None else side[place] for side in (first, second))
        shown = seconds if place < 2 else size
        ratio = times(b / a) if a and b is not None else times(1) if a == b == 0 else NONE
        cells.append(PairedCell(label=label, ratio=ratio, values=f"{shown(a)}, {shown(b)}"))
    return tuple(cells)
