"""Fusion: the kernels of a program that computes elementwise operations together, as torch.compile does.

Operations between matrix products that work element by element, or row by row, become one kernel. It reads each result
of other kernels once, and writes the results that others need. The backward recomputes, from their inputs, results that
only such kernels need; these are not kept (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section
3, within a kernel).

    forward   x W1 | add, norm | W2 | act, mul | W3        kept: the sum, and the results of W2, norm and mul
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from worker_agent.profiler.operations import DeviceOperation, Sizes, Traffic


@dataclass(slots=True)
class _Group:
    """Operations of one pass that are one kernel; a product is a group of its own."""

    members: list[Traffic] = field(default_factory=list)
    _reads: dict[int, int] | None = field(default=None, init=False)

    @property
    def fuses(self) -> bool:
        return self.members[0].fuses

    @property
    def made(self) -> Sizes:
        return {each: size for member in self.members for each, size in member.writes.items()}

    def reads(self) -> dict[int, int]:
        """Its inputs from other kernels, by storage."""
        if self._reads is None:
            made: set[int] = set()
            found: dict[int, int] = {}
            for member in self.members:
                for each, size in member.reads.items():
                    if each not in made:
                        found[each] = max(size, found.get(each, 0))
                made |= member.writes.keys()
            self._reads = found
        return self._reads

    def precede(self, group: "_Group") -> None:
        """Takes the operations of an earlier group."""
        self.members[:0] = group.members
        self._reads = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """Both passes. `dropped` are saved storages that the backward does not need, `added` further ones that it needs.

    `workspace_bytes` is the peak of the results that kernels pass to each other within a pass.
    """

    forward: tuple[DeviceOperation, ...]
    backward: tuple[DeviceOperation, ...]
    dropped: frozenset[int]
    added: Sizes
    workspace_bytes: int

    def held(self, saved: Sizes) -> dict[int, int]:
        """The saved storages that the backward keeps."""
        return {each: size for each, size in saved.items() if each not in self.dropped} | dict(self.added)


def fused(forward: Sequence[Traffic], backward: Sequence[Traffic], *, saved: Sizes, sent: Collection[int]) -> Fused:
    """A block's passes. `saved` are storages that its graph keeps, `sent` those of its outputs, inputs and weights."""
    backward = _added_inside(backward, sent)
    read_later = {each for member in backward for each in member.reads}
    kept = set(sent) | (set(saved) - read_later)  # of these, those not sent move to peers and back
    first, second = _groups(forward, kept), _groups(backward, kept)
    others = (group for group in second if not group.fuses)
    taken = {each for group in (*first, *others) for each in group.reads()}
    sources: dict[int, dict[int, int]] = {}  # each result's inputs, of all its writers
    for member in (member for group in first if group.fuses for member in group.members):
        for each in member.writes:
            sources.setdefault(each, {}).update(member.reads)
    dropped = sources.keys() - taken - kept
    again = [_again(group, sources, dropped) for group in second]
    needed = {each: size for reads in again for each, size in reads.items()}
    made = {each for member in forward for each in member.writes}
    added = {each: needed[each] for each in (needed.keys() & made) - set(saved) - set(sent)}
    written = taken | needed.keys() | kept | (set(saved) - dropped)
    left = {each: size for each, size in saved.items() if each not in dropped and each not in sent} | added
    reads = [group.reads() for group in first]
    return Fused(
        forward=tuple(_kernel(group, group.reads(), written) for group in first),
        backward=tuple(
            _kernel(group, reads, {each for other in again for each in other} | set(sent))
            for group, reads in zip(second, again, strict=True)
        ),
        dropped=frozenset(dropped & set(saved)),
        added=added,
        workspace_bytes=max(
            _workspace_bytes(first, reads, {}, held={*sent, *left}), _workspace_bytes(second, again, left, held=sent)
        ),
    )


def made_again(
    forward: Sequence[Traffic], discarded: Collection[int], *, held: Collection[int]
) -> tuple[DeviceOperation, ...]:
    """The kernels of the forward that recompute discarded storages from the `held` ones."""
    makers: dict[int, list[int]] = {}
    for place, member in enumerate(forward):
        for each in member.writes:
            makers.setdefault(each, []).append(place)
    open_, seen, places = list(discarded), set[int](), set[int]()
    while open_:
        each = open_.pop()
        if each not in seen and each not in held:
            seen.add(each)
            places.update(makers.get(each, ()))
            open_ += (source for place in makers.get(each, ()) for source in forward[place].reads)
    groups = _groups([forward[place] for place in sorted(places)], discarded)
    needed = {each for group in groups for each in group.reads()} | set(discarded)
    return tuple(_kernel(group, group.reads(), needed) for group in groups)


def _added_inside(backward: Sequence[Traffic], sent: Collection[int]) -> list[Traffic]:
    """The pass with gradients of weights added up inside the products that make them, and not by operations on top."""
    maker = {each: place for place, member in enumerate(backward) if not member.fuses for each in member.writes}
    readers = Counter(each for member in backward for each in member.reads)
    found: dict[int, Traffic | None] = dict(enumerate(backward))
    for place, member in enumerate(backward):
        target = member.writes.keys() & member.reads.keys() & set(sent)
        source = member.reads.keys() - target
        made = {maker[each] for each in source if each in maker and readers[each] == 1}
        product = found.get(next(iter(made), -1))
        if member.fuses and len(target) == len(source) == len(made) == 1 and product and product.operation.flops:
            moved_bytes = product.operation.moved_bytes + sum(member.writes.values())
            operation = replace(product.operation, moved_bytes=moved_bytes)
            reads = {**product.reads, **{each: member.reads[each] for each in target}}
            found[made.pop()] = replace(product, operation=operation, reads=reads, writes=member.writes)
            found[place] = None
    return [member for member in found.values() if member is not None]


def _workspace_bytes(groups: Sequence[_Group], reads: Sequence[Sizes], left: Sizes, *, held: Collection[int]) -> int:
    """The peak bytes of results that one kernel writes and a later one reads. The last reader of a storage `left` by
    the previous pass frees it; `held` storages outlive the pass.
    """
    last = {each: place for place, taken in enumerate(reads) for each in taken}
    ending = Counter[int]()
    for each, size in left.items():
        ending[last.get(each, 0)] += size
    now = peak = 0
    for place, group in enumerate(groups):
        for each, size in group.made.items():
            if last.get(each, 0) > place and each not in held:
                now += size
                ending[last[each]] += size
        peak = max(peak, now)
        now -= ending[place]
    return peak


def _groups(pass_: Sequence[Traffic], sent: Collection[int]) -> list[_Group]:
    """Neighbours are one; so is a group all of whose results only one later group of its kind takes."""
    groups: list[_Group] = []
    for each in pass_:
        if each.fuses and groups and groups[-1].fuses:
            groups[-1].members.append(each)
        else:
            groups.append(_Group([each]))
    for place in reversed(range(len(groups))):
        group = groups[place]
        made = group.made.keys()
        takers = [other for other in groups[place + 1 :] if made & other.reads().keys()]
        if group.fuses and len(takers) == 1 and takers[0].fuses and not made & set(sent):
            takers[0].precede(group)
            del groups[place]
    return groups


def _again(group: _Group, sources: Mapping[int, Sizes], dropped: Collection[int]) -> dict[int, int]:
    """The inputs of a kernel of the backward that recomputes dropped storages."""
    found: dict[int, int] = {}
    open_, seen = list(group.reads().items()), set[int]()  # a result of many steps is made again once
    while open_:
        each, size = open_.pop()
        if each not in dropped:
            found[each] = max(size, found.get(each, 0))
        elif each not in seen:
            seen.add(each)
            open_ += sources[each].items()
    return found


def _kernel(group: _Group, reads: Sizes, needed: Collection[int]) -> DeviceOperation:
    if not group.fuses:
        return group.members[0].operation
    written = sum(size for each, size in group.made.items() if each in needed or each in reads)
    operation = group.members[0].operation
    return replace(operation, name="fused", flops=0, moved_bytes=sum(reads.values()) + written, sizes=None)
