"""Formats: seconds, bytes, rates and moments, as people read them."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any

from pipeplan.documents.calibration import Calibration, Term
from pipeplan.documents.certificate import Certificate
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.coordinates import GROUPS, group_of
from pipeplan.documents.degrees import DegreeChoice
from pipeplan.documents.files import answer_document
from pipeplan.documents.forms import AXES
from pipeplan.documents.plan import Alternative, Answer, Infeasible, Plan
from pipeplan.documents.profile import Profile
from pipeplan.documents.stage_memory import StageMemory
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import Options
from pipeplan.simulation.predict import updates_late
from pipeplan.simulation.report import Compared, Missed, RankReport

NONE = "–"

TermRow = tuple[str, str, str, str, str]
"""A term of a calibration: its name, its value in the profile, the corrected one, the spread, how many observations."""

_POWER = re.compile(r"(\d(?:\.\d+)?e\+\d\d)(?= samples/s)")
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_RATES = ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))
_AGES = ((31_557_600, "year"), (86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))
_SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))


def seconds(value_s: float | None) -> str:
    """`1.25 s`, `12.5 ms`, `80 µs`; less than a nanosecond is `0 s`, which rounding leaves."""
    if value_s is None:
        return NONE
    for unit_s, name in _TIMES:
        if abs(value_s) >= unit_s:
            return f"{_number(value_s / unit_s)} {name}"
    return "0 s" if abs(value_s) < 1e-9 else f"{_number(value_s / 1e-6)} µs"


def size(value_bytes: float | None) -> str:
    """`1.5 GiB`, `12 MiB`, `100 B`."""
    if value_bytes is None:
        return NONE
    for unit_bytes, name in _SIZES:
        if abs(value_bytes) >= unit_bytes:
            return f"{_number(value_bytes / unit_bytes)} {name}"
    return f"{_number(value_bytes)} B"


def all_seconds(values_s: Sequence[float]) -> tuple[str, ...]:
    """The values in the unit of the largest, to compare them: `0.5 ms`, `12.5 ms`."""
    return _in_one_unit(values_s, _TIMES)


def all_sizes(values_bytes: Sequence[float]) -> tuple[str, ...]:
    """The values in the unit of the largest: `0.25 GiB`, `12 GiB`."""
    return _in_one_unit(values_bytes, (*_SIZES, (1.0, "B")))


def _in_one_unit(values: Sequence[float], units: Sequence[tuple[float, str]]) -> tuple[str, ...]:
    unit, name = next((one for one in units if max(values) >= one[0]), units[-1])
    least = 1e-3 * unit
    return tuple(f"under 0.001 {name}" if 0 < value < least else f"{_number(value / unit)} {name}" for value in values)


def rate(value: float | None) -> str:
    """`1,250 samples/s`."""
    return NONE if value is None else f"{_number(value)} samples/s"


def four_digits(value: float) -> str:
    """`76,885`, `7,253`, `86.13`: at least four digits, and no power of ten in what people read."""
    return f"{value:,.0f}" if abs(value) >= 9999.5 else f"{value:,.4g}"


def spelled_out(reason: str) -> str:
    """A reason as a plan holds it, with its rates written out: `slower: 75,890 samples/s` of `7.589e+04 samples/s`."""
    return _POWER.sub(lambda found: four_digits(float(found[1])), reason)


def price(value: float | None) -> str:
    """The rate of a plan's streams; `closed form only` of a plan whose streams were not played."""
    return "closed form only" if value is None else rate(value)


def price_of(other: Alternative) -> str:
    """`1,250 samples/s`; `1,250 samples/s in closed form` of a configuration whose streams were not played."""
    if other.throughput_samples_per_s is not None or other.closed_form_samples_per_s is None:
        return rate(other.throughput_samples_per_s)
    return f"{rate(other.closed_form_samples_per_s)} in closed form"


def scheme(each: Alternative) -> str:
    """`1f1b`; `1f1b, tensor 2, optimizer sharded` of what another engine shares out."""
    parts = [f"{axis} {getattr(each.form, axis)}" for axis in AXES if getattr(each.form, axis) > 1]
    parts += ["expert tensor 1"] if each.form.expert_tensor else []
    parts += [f"{each.chunks} stages a rank"] if each.chunks > 1 else []
    parts += [f"{each.sharding} sharded"] if each.sharding != "none" else []
    parts += [f"in {each.replicate} groups each"] if each.replicate > 1 else []
    parts += ["graphs"] if each.graphs else []
    parts += ["all-to-all overlapped"] if each.a2a_overlap else []
    part = f" of {each.offload_share:.0%} of the layers" * (each.offload_share < 1)
    parts += [f"offload {each.offload}{part}"] if each.offload != "none" else []
    return ", ".join((each.schedule, *parts))


def in_order(choices: Sequence[DegreeChoice]) -> list[DegreeChoice]:
    """The choices degree by degree, and the numbers of each from the least on: documents have 16 before 2."""
    degrees = [each.degree for each in choices]

    def key(each: DegreeChoice) -> tuple[int, int, str]:
        return degrees.index(each.degree), int(each.instead) if each.instead.isdecimal() else 0, each.instead

    return sorted(choices, key=key)


UNSTEADY = 0.15
"""The spread of a rank's compute (`RankReport.compute_spread`) from which on a run is said to be unsteady."""


def why_missed(throughput: Compared, found: Missed, ranks: Sequence[RankReport] = ()) -> str:
    """How far a run was from its prediction, and what each cause adds, which sums to the difference.

    Of unsteady ranks the worst is named.
    """
    causes = [("compute", found.compute), ("link", found.link), ("bubble", found.waiting)]
    if found.other_programs is not None:
        causes.append(("other programs", found.other_programs))
    if found.checkpoints:
        causes.append(("checkpoints", found.checkpoints))
    largest_first = sorted(causes, key=lambda each: -abs(each[1]))
    least = 1e-4 * throughput.predicted
    seen = [(name, part if abs(part) >= least else 0.0) for name, part in largest_first]
    parts = ", ".join(f"{name} {'-' if part < 0 else '+'}{_number(abs(part))}" for name, part in seen)
    how = "slower" if throughput.measured < throughput.predicted else "faster"
    sentences = [
        f"The run was {percent(abs(throughput.error))} {how} than predicted: "
        f"{_number(throughput.measured)} samples/s, not {_number(throughput.predicted)}.",
        f"By cause, in samples/s: {parts}.",
    ]
    if found.checkpoints == min(part for _, part in causes) < 0:
        sentences.append("Write checkpoints less often.")
    if found.other_programs is None:
        sentences.append("These parts include the time that other programs took.")
    elif found.other_programs == min(part for _, part in causes) < 0:
        sentences.append("Before you calibrate, run it again without the other programs.")
    spread, rank = max(((each.compute_spread or 0.0, each.rank) for each in ranks), default=(0.0, 0))
    if spread >= UNSTEADY:
        sentences.append(
            f"The run was not steady: on rank {rank} the compute of a batch took {percent(spread)} longer in the "
            "slowest eighth than in the fastest."
        )
    return " ".join(sentences)


def calibration_terms(found: Calibration, profile: Profile, cluster: Cluster) -> Iterator[TermRow]:
    """The terms that a calibration corrects."""
    known = profile.overheads
    for name, factors in (
        ("forward, by block", found.forward),
        ("backward, by block", found.backward),
        ("backward's first half, by block", found.backward_input),
        ("backward's second half, by block", found.backward_weight),
    ):
        if factors is not None:
            values = f"{min(factors.values):.3f} to {max(factors.values):.3f}"
            yield name, "1", values, percent(factors.spread), str(factors.observations)
    yield from _term("forward without a graph", known.forward_without_graph, found.forward_without_graph)
    yield from _term("recomputed forward", known.recompute, found.recompute)
    yield from _term("backward after its forward", known.backward_after_forward, found.backward_after_forward)
    yield from _term("µs an instruction", known.instruction_s, found.instruction_s, 1e6)
    yield from _term("µs a message, a MB", known.message_s_per_byte, found.message_s_per_byte, 1e12)
    yield from _term("µs an update, a MB", known.update_s_per_byte, found.update_s_per_byte, 1e12)
    yield from _term("µs a weight version, a MB", known.version_s_per_byte, found.version_s_per_byte, 1e12)
    yield from _term("gradient exchange", known.exchange_factor, found.exchange_factor)
    yield from _term("activation bytes", 1.0, found.activation_factor)
    for terms in found.levels:
        before, after = (
            f"{level.bandwidth_bytes_per_s / 1e9:.3g} GB/s, {level.latency_s * 1e6:.3g} µs"
            for level in (cluster.levels[terms.level], terms)
        )
        yield f"network level {terms.level}", before, after, "", str(terms.observations)
    if found.context_bytes is not None:
        held, spread = size(round(found.context_bytes.value)), size(round(found.context_bytes.spread))
        before = size(profile.device.context_bytes)
        yield "beside the tensors", before, held, spread, str(found.context_bytes.observations)
    yield from _term("allocator's reserve", profile.device.allocator_reserve, found.allocator_reserve)


def _term(name: str, known: float, term: Term | None, scale: float = 1.0) -> Iterator[TermRow]:
    if term is not None:
        before, after, spread = (_number(value * scale) for value in (known, term.value, term.spread))
        yield name, before, after, spread, str(term.observations)


def percent(value: float | None) -> str:
    """`12.5 %` of a fraction."""
    return NONE if value is None else f"{100 * value:,.1f} %"


def change(value: float | None) -> str:
    """`+3.2 %`: a relative error with its sign."""
    return NONE if value is None or value in (float("inf"), float("-inf")) else f"{100 * value:+,.1f} %"


def times(factor: float) -> str:
    """`1.32 ×`."""
    return f"{factor:.3g} ×"


def bandwidth(value_bytes_per_s: float) -> str:
    """`25 GB/s`: networks count in powers of ten."""
    for unit, name in _RATES:
        if value_bytes_per_s >= unit:
            return f"{_number(value_bytes_per_s / unit)} {name}"
    return f"{_number(value_bytes_per_s)} B/s"


def shape(depth: int, width: int | None) -> str:
    """`4 × 2`: stages and replicas of each, `4 × mixed` where stages have different numbers of them."""
    return f"{depth:,} × {width:,}" if width else f"{depth:,} × mixed"


def off(measured: float | None, predicted: float | None) -> str:
    """`-3.2 %`: how far what was measured is from what was predicted."""
    return change(measured / predicted - 1) if predicted and measured is not None else NONE


def count(value: int | None) -> str:
    """`12,800`."""
    return NONE if value is None else f"{value:,}"


def several(value: int, what: str) -> str:
    """`1 stage`, `4 stages`."""
    return f"{value:,} {what}{'' if value == 1 else 's'}"


def moment(value: datetime) -> str:
    """`2026-11-20 21:03:40 UTC`."""
    return value.strftime("%Y-%m-%d %H:%M:%S UTC")


def minute(value: datetime) -> str:
    """`2026-11-20 21:03`, in UTC: for lists."""
    return value.strftime("%Y-%m-%d %H:%M")


def age(value: datetime, now: datetime) -> str:
    """`3 minutes ago`, `in 2 days`: rounded down to whole units."""
    passed_s = (now - value).total_seconds()
    for unit_s, name in _AGES:
        units = int(abs(passed_s) // unit_s)
        if units:
            amount = f"{units:,} {name}{'' if units == 1 else 's'}"
            return f"{amount} ago" if passed_s > 0 else f"in {amount}"
    return "just now"


def clip(name: str, characters: int = 120) -> str:
    """A name as a list can show it: of one that is longer, its head."""
    return name if len(name) <= characters else name[: characters - 1] + "…"


def proven(certificate: Certificate) -> str:
    """`proven optimal to 1e-06: ...`, or `within 2.2 % of the optimum: ...` (`Certificate.optimality`), and of what."""
    found = f"{certificate.optimality}: {certificate.quantity} {certificate.value:.6g}"
    if certificate.proven:
        return f"{found}, and no plan can have less ({certificate.method})"
    bound = certificate.bound if certificate.bound_of_all is None else certificate.bound_of_all
    return f"{found}, and no plan can have less than {bound:.6g} ({certificate.method})"


def synchronous(plan: Plan) -> bool | None:
    """Whether the plan trains as one process does; None where its schedule is not installed here."""
    try:
        return not updates_late(plan)
    except InvalidInputError:
        return None


def training(plan: Plan) -> str:
    """`trains as one process does`, or `updates weights with delay (gradients are up to 3 updates late)`."""
    match synchronous(plan):
        case None:
            return f"whether it trains as one process does is not known: {plan.schedule} is not installed"
        case True:
            return "trains as one process does"
        case False:
            return f"updates weights with delay (gradients are up to {several(updates_late(plan), 'update')} late)"


def spoken_document(answer: Answer) -> dict[str, Any]:
    """An answer's document with what it says of the plan (`documents.files.SAID`); stored documents do without."""
    document = answer_document(answer)
    if isinstance(answer, Infeasible):
        return document
    proof = None if answer.certificate is None else answer.certificate.optimality
    return document | {"synchronous": synchronous(answer), "training": training(answer), "optimality": proof}


def layout(plan: Plan) -> str:
    """Which ranks rank 0 shares something with, by axis: `tensor 0-7; replica 0, 8, ..., 56; pipeline 0, 64`."""
    groups = ((axis, group_of(plan, 0, axis)) for axis in GROUPS)
    return "; ".join(f"{axis} {_ranks(ranks)}" for axis, ranks in groups if len(ranks) > 1) or "one"


def shared_weights(plan: Plan) -> str:
    """The stages that share weights, and the time of the sum before an update: `0, 3 in 4.7 ms`; a dash for none."""
    return "; ".join(f"{', '.join(map(str, each.stages))} in {seconds(each.seconds)}" for each in plan.tied) or NONE


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"


def memory_items(plan: Plan) -> list[tuple[str, list[int]]]:
    """By what it is, the bytes that a worker of every stage holds; what no stage holds is left out."""
    held = [stage.memory or StageMemory() for stage in plan.stages]
    items = [(field.name, [getattr(memory, field.name) for memory in held]) for field in fields(StageMemory)]
    return [(name.replace("_", " "), values) for name, values in items if any(values)]


def given_options(options: Options) -> list[tuple[str, str]]:
    """The options of a request that are not left as they are."""
    given = [(field.name, getattr(options, field.name), field.default) for field in fields(Options)]
    return [(name, str(value)) for name, value, default in given if value != default]


def short(identity: str) -> str:
    """The beginning of an id: enough to tell one from another."""
    return identity[:10]


def _number(value: float) -> str:
    """Three digits at least, no more than are needed."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


FILTERS: dict[str, Callable[..., object]] = {
    "seconds": seconds,
    "size": size,
    "rate": rate,
    "spelled_out": spelled_out,
    "price": price,
    "price_of": price_of,
    "percent": percent,
    "change": change,
    "count": count,
    "moment": moment,
    "minute": minute,
    "short": short,
    "given_options": given_options,
    "off": off,
    "several": several,
    "shared_weights": shared_weights,
    "times": times,
    "bandwidth": bandwidth,
    "age": age,
    "clip": clip,
    "proven": proven,
    "training": training,
    "in_order": in_order,
    "scheme": scheme,
}
