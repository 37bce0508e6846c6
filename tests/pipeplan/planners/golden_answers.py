"""Golden answers: what the planners answer, kept to compare a change of the planners with.

`python -m tests.pipeplan.planners.golden_answers --compare` plans every row of `tests/golden/planners.json` again. It
prints each difference, the number of identical answers, the least and the mean ratio of the rates, and the processor
seconds. It exits with 1 if an answer is worse than the tests allow. `--write` renews the rows; a row without an answer
is a problem to add. Losses add up where answers are renewed after each of several changes. `--only TEXT` takes the rows
whose name contains the text, `--quick` those of `make test`; `--processes 2` plans two at a time.

The tests allow more than the command reports. A rate is at least `LEAST` of the golden one, and the mean `LEAST_MEAN`.
An upper bound is no lower than a known rate. A plan fits its devices. Where no plan fits, the reason stays. Another
plan, other bytes and other seconds are no fault.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from math import isclose
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeplan.costs.memory import rank_bytes
from pipeplan.documents.certificate import PROVEN_GAP, Certificate
from pipeplan.documents.files import parse
from pipeplan.documents.identity import canonical_json, content_id, text_id
from pipeplan.documents.plan import FIRST_VERSION, Answer, Plan
from pipeplan.errors import PipeplanError
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.solve import solve
from tests.pipeplan.planners.golden_problems import built, problem_id

GOLDEN = Path(__file__).parents[2] / "golden" / "planners.json"
LEAST, LEAST_MEAN = 0.995, 0.9995
"""Of the golden rates: of each, and on average."""

BY_CLOSED_FORM = ("paper", "release")
"""The semantics whose plans are compared by their closed form."""

DIGITS = 16
"""Of an id: enough to tell a few hundred plans apart."""

DECIDED = (
    *("order", "chunks", "microbatch_size", "microbatches", "split_backward", "split_backward_half_way"),
    *("schedule", "placement", "form", "sharding", "replicate", "offload", "recompute_modules", "graphs"),
)
"""A plan's fields that a planner decides, besides the stages."""

RESTRICTING = {
    *("microbatch_size", "schedule", "stages", "chunks", "recompute", "synchronous"),
    *("tensor", "data", "expert", "sharding"),
    *("cuts", "forced_cuts", "forbidden_cuts"),
}
"""Options that fix or forbid part of a plan, and change no price."""

AUTO_CONTAINS = ("auto", "pipedream-2bw", "gpipe", "exact")
"""The planners whose plans a bound of auto covers: it names no mixtures of replicas, which are PipeDream's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenAnswer:
    """What counts of an answer.

    - `samples_per_s`: what the planner compares plans by: the play, or the closed form; None where no plan fits.
    - `bound_samples_per_s`: no plan of the searched space is faster, whatever its stages are; None without a proof.
    - `rank_bytes`: the most that a worker of any rank holds. `fits`: whether each fits its device.
    - `shape`, `plan_id`: the plan's schedule and degrees, and the id of what it decides. `document_id` is that of the
      whole answer: its figures to the last bit, the certificate, the alternatives and the words.
    - `reason`, `missing_bytes`: where no plan fits, the first rule, and what its nearest miss lacks; or the refusal.
    """

    samples_per_s: float | None = None
    bound_samples_per_s: float | None = None
    proven: bool = False
    rank_bytes: int = 0
    fits: bool = True
    shape: str = ""
    plan_id: str = ""
    document_id: str = ""
    reason: str = ""
    missing_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRow:
    """A planner's answer to a problem, which `builder` makes of the arguments and options.

    `is_quick`: `make test` plans it too. `processor_s` is for information.
    """

    planner: str
    builder: str
    arguments: dict[str, Any]
    options: dict[str, Any]
    is_quick: bool = False
    problem_id: str = ""
    answer: GoldenAnswer = GoldenAnswer()
    processor_s: float = 0.0

    @property
    def name(self) -> str:
        """The row in words, such as `auto: mid_size seed=10083, stages=6`."""
        given, fixed = (
            " ".join(f"{key}={value}" for key, value in each.items()) for each in (self.arguments, self.options)
        )
        return f"{self.planner}: {self.builder} {given}" + (f", {fixed}" if fixed else "")

    @property
    def problem(self) -> PlanningProblem:
        """The problem, built again."""
        return built(self.builder, self.arguments, self.options)


def read_rows() -> list[GoldenRow]:
    """All rows of the file."""
    return [parse(GoldenRow, row) for row in json.loads(GOLDEN.read_text())["rows"]]


def write_rows(rows: Iterable[GoldenRow]) -> None:
    """Writes the file, a row a line."""
    lines = ",\n".join(f"    {json.dumps(_written(row))}" for row in rows)
    source = (
        "tests/pipeplan/planners/golden_answers.py: the planners' own answers, renewed by --write; no paper's figures"
    )
    GOLDEN.write_text(f'{{\n  "source": {json.dumps(source)},\n  "rows": [\n{lines}\n  ]\n}}\n')


def _written(row: GoldenRow) -> dict[str, Any]:
    """The row's values, without those at their default."""
    values: dict[str, Any] = {"planner": row.planner, "builder": row.builder, "arguments": row.arguments}
    values |= {"options": row.options, "is_quick": row.is_quick, "problem_id": row.problem_id}
    counted = {field.name: getattr(row.answer, field.name) for field in fields(GoldenAnswer)}
    values["answer"] = {
        field.name: counted[field.name] for field in fields(GoldenAnswer) if counted[field.name] != field.default
    }
    return values | {"processor_s": round(row.processor_s, 2)}


def planned(row: GoldenRow) -> GoldenRow:
    """The row with the answer of today's planner, and its seconds."""
    problem = row.problem
    started_s = time.process_time()
    try:
        found = summary(solve(row.planner, problem), problem)
    except PipeplanError as error:
        found = GoldenAnswer(reason=f"refused: {error}")
    taken_s = time.process_time() - started_s
    return replace(row, problem_id=problem_id(problem), answer=found, processor_s=taken_s)


def summary(answer: Answer, problem: PlanningProblem) -> GoldenAnswer:
    """What counts of the answer."""
    if not isinstance(answer, Plan):
        first = answer.reasons[0]
        document = content_id(answer)[:DIGITS]
        return GoldenAnswer(reason=first.rule, missing_bytes=first.missing_bytes, document_id=document)
    played = answer.throughput_samples_per_s
    is_played = played is not None and problem.options.semantics not in BY_CLOSED_FORM
    rate = played if is_played and played is not None else answer.closed_form.throughput_samples_per_s
    proof = answer.certificate
    shape = f"{answer.schedule} {answer.depth}x{answer.width or 'mixed'} mb{answer.microbatch_size}"
    degrees = {name: value for name, value in answer.degrees.items() if value not in (1, None, False)}
    shape += "".join(
        f" {name}={degrees[name]}" for name in ("tensor", "context", "expert", "virtual_stages") if name in degrees
    )
    return GoldenAnswer(
        samples_per_s=rate,
        bound_samples_per_s=None if proof is None else _upper_bound(proof, rate, is_played),
        proven=proof is not None and proof.proven,
        rank_bytes=max(rank_bytes(answer)),
        fits=_fits(answer, problem),
        shape=f"{shape}, recompute {answer.recomputes}",
        plan_id=text_id(_decisions(answer))[:DIGITS],
        document_id=content_id(replace(answer, planner_version=FIRST_VERSION))[:DIGITS],
    )


def _upper_bound(proof: Certificate, rate: float, is_played: bool) -> float | None:
    """The certificate's bound as a rate; None where it is of closed forms and the rate of a play, or vice versa."""
    least_s = proof.bound if proof.bound_of_all is None else proof.bound_of_all
    same_kind = proof.quantity.endswith("played") == is_played
    return rate * proof.value / least_s if same_kind and least_s > 0 else None


def _fits(plan: Plan, problem: PlanningProblem) -> bool:
    """Whether every stage, and every rank of one type of devices, fits; the release does not look at memory."""
    if problem.options.semantics == "release":
        return True
    sizes = {device.name: device.usable_bytes for device in problem.cluster.types}
    if len(sizes) > 1:
        return all(stage.memory_bytes <= sizes[stage.device or ""] for stage in plan.stages)
    return max(rank_bytes(plan)) <= min(sizes.values())


def _decisions(plan: Plan) -> str:
    """What a plan decides, as text: without figures, which another order of sums rounds differently."""
    stages = [(each.start, each.stop, each.replicas, each.recomputes, each.device) for each in plan.stages]
    return canonical_json([stages, *(getattr(plan, name) for name in DECIDED)])


def faults(golden: GoldenRow, now: GoldenRow, known: float = 0.0) -> Iterator[str]:
    """What is worse than a test allows. `known`: the highest rate that is known of the problem."""
    before, after = golden.answer, now.answer
    if golden.problem_id != now.problem_id:
        yield f"the problem is another one: {golden.problem_id}, now {now.problem_id}"
    if before.samples_per_s is None or after.samples_per_s is None:
        if before.reason != after.reason:
            yield f"{_in_words(before)}; now {_in_words(after)}"
        return
    if after.samples_per_s < LEAST * before.samples_per_s:
        yield f"{after.samples_per_s / before.samples_per_s:.5f} of {before.samples_per_s:.6g} samples/s"
    if not after.fits:
        yield f"{after.rank_bytes:,} bytes a worker do not fit"
    bound = after.bound_samples_per_s
    if bound is not None and bound * (1 + PROVEN_GAP) < max(after.samples_per_s, before.samples_per_s, known):
        yield f"no bound: {bound:.6g} is below the known {max(after.samples_per_s, before.samples_per_s, known):.6g}"


def _in_words(answer: GoldenAnswer) -> str:
    return answer.reason or ("no answer" if answer.samples_per_s is None else f"{answer.samples_per_s:.6g} samples/s")


def ratio(golden: GoldenRow, now: GoldenRow) -> float | None:
    """The rate now as a share of the golden one; None where no plan fits."""
    before, after = golden.answer.samples_per_s, now.answer.samples_per_s
    return None if before is None or after is None else after / before


def known_rates(rows: Sequence[GoldenRow]) -> Mapping[str, float]:
    """By a row's name, the highest rate of the rows whose plans are in its space."""
    best: dict[str, float] = {}
    for row, other in product(rows, rows):
        if _contains(row, other):
            best[row.name] = max(best.get(row.name, 0.0), other.answer.samples_per_s or 0.0)
    return best


def _contains(row: GoldenRow, other: GoldenRow) -> bool:
    """Whether every plan of the other row's space is in the row's: it has more options, and they only fix or forbid."""
    planners = AUTO_CONTAINS if row.planner == "auto" else (row.planner,)
    same = (row.builder, row.arguments) == (other.builder, other.arguments) and other.planner in planners
    more = {name for name in other.options if name not in row.options}
    return same and row.options.items() <= other.options.items() and more <= RESTRICTING


def differences(golden: GoldenRow, now: GoldenRow) -> str:
    """The fields that changed, with both values."""
    before, after = asdict(golden.answer), asdict(now.answer)
    changed = {name for name in before if not _equal(before[name], after[name])}
    return "; ".join(f"{name} {before[name]} -> {after[name]}" for name in before if name in changed)


def _equal(before: object, after: object) -> bool:
    if isinstance(before, float) and isinstance(after, float):
        return isclose(before, after, rel_tol=1e-12)
    return before == after


def every_row(rows: Sequence[GoldenRow], processes: int) -> Iterator[GoldenRow]:
    """The rows, planned again, in order."""
    if processes == 1:
        yield from map(planned, rows)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(planned, rows)


def compare(rows: Sequence[GoldenRow], processes: int) -> bool:
    """Prints what differs, and the totals; returns whether a test would pass."""
    known, answered, fine = known_rates(rows), list[GoldenRow](), True
    for golden, now in zip(rows, every_row(rows, processes), strict=True):
        answered.append(now)
        changed, worse = differences(golden, now), list(faults(golden, now, known.get(golden.name, 0.0)))
        if changed or worse:
            print(f"{golden.name}: {changed}", *(f"\n    FAULT: {fault}" for fault in worse), flush=True)
        fine = fine and not worse
    pairs = list(zip(rows, answered, strict=True))
    same = sum(not differences(*pair) for pair in pairs)
    same_plans = sum(golden.answer.plan_id == now.answer.plan_id for golden, now in pairs)
    print(f"of {len(rows)} answers {same} are identical, {same_plans} in what they decide")
    taken_s, before_s = (sum(row.processor_s for row in each) for each in (answered, rows))
    print(f"{taken_s:.0f} processor seconds, {before_s:.0f} before")
    ratios = [share for share in (ratio(*pair) for pair in pairs) if share is not None]
    if ratios:
        print(f"rates: at least {min(ratios):.6f} of the golden ones, on average {fmean(ratios):.6f}")
    return fine and (not ratios or fmean(ratios) >= LEAST_MEAN)


def renew(rows: Sequence[GoldenRow], chosen: Callable[[GoldenRow], bool], processes: int) -> None:
    """Plans the chosen rows again and writes the file."""
    picked = [row for row in rows if chosen(row)]
    renewed = {row.name: row for row in every_row(picked, processes)}
    write_rows(renewed.get(row.name, row) for row in rows)
    print(f"{len(renewed)} rows written, {sum(row.processor_s for row in renewed.values()):.0f} processor seconds")


def _is_chosen(only: str, quick: bool, row: GoldenRow) -> bool:
    return only in row.name and (row.is_quick or not quick)


def main() -> None:
    """Reads the options, and compares or writes."""
    parser = argparse.ArgumentParser(description="what the planners answer, beside the golden answers")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--compare", action="store_true", help="print what differs; exit status 1 if any is worse")
    action.add_argument("--write", action="store_true", help="write today's answers")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--quick", action="store_true", help="rows of `make test`")
    parser.add_argument("--processes", type=int, default=1, help="rows planned at a time")
    asked = parser.parse_args()
    rows, chosen = read_rows(), partial(_is_chosen, asked.only, asked.quick)
    if asked.write:
        renew(rows, chosen, asked.processes)
    elif not compare([row for row in rows if chosen(row)], asked.processes):
        sys.exit(1)


if __name__ == "__main__":
    main()
