"""Report: errors of time and memory by source, and the regret of choosing by prediction."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean

from benchmarks.truth.counted import count_rows
from benchmarks.truth.planned import Planned, taken, usable_bytes
from benchmarks.truth.rows import GIB, Row, by_source
from pipeplan.documents.accuracy import IterationErrors


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is predicted of a row. Errors are relative, above 0 where more was predicted than measured.

    Of what a row does not say, the
    fastest was taken that fits, or the fastest where nothing fits.
    """

    row: Row
    microbatch: int
    virtual_stages: int
    predicted_s: float
    memory_gib: float
    reserved_gib: float
    usable_gib: float

    @property
    def error(self) -> float:
        """Of the seconds."""
        return self.predicted_s / self.row.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Of the bytes that the allocator holds, where they are published."""
        return None if self.row.memory_gib is None else self.reserved_gib / self.row.memory_gib - 1

    def document(self) -> dict[str, object]:
        """As JSON has it: the row's columns, then what is predicted."""
        return {
            **asdict(self.row),
            "engine": self.row.program.engine,
            "microbatch_taken": self.microbatch,
            "virtual_stages_taken": self.virtual_stages,
            "measured_s": self.row.seconds,
            "predicted_s": self.predicted_s,
            "error": self.error,
            "memory_used_gib": self.memory_gib,
            "memory_predicted_gib": self.reserved_gib,
            "memory_error": self.memory_error,
            "fits": self.memory_gib <= self.usable_gib,
        }


def predictions(rows: Sequence[Row]) -> list[Prediction]:
    """One for each row, in their order. Raises InvalidInputError for degrees that do not divide what they share."""
    found = []
    for row, plays in zip(rows, Planned(count_rows(rows), rows).plays(), strict=True):
        choice = taken(row, plays)
        held_bytes = plays[choice].held_bytes
        found.append(
            Prediction(
                row=row,
                microbatch=choice[0],
                virtual_stages=choice[1],
                predicted_s=plays[choice].seconds,
                memory_gib=held_bytes / GIB,
                reserved_gib=held_bytes * (1 + row.program.reserve) / GIB,
                usable_gib=usable_bytes(row) / GIB,
            )
        )
    return found


def regrets(found: Sequence[Prediction]) -> list[float]:
    """For each group of several rows: how much longer the predicted best takes than the measured best."""
    groups: dict[tuple[object, ...], list[Prediction]] = {}
    for each in found:
        groups.setdefault(each.row.group, []).append(each)
    several = [group for group in groups.values() if len(group) > 1]
    return [
        min(group, key=lambda each: each.predicted_s).row.seconds / min(each.row.seconds for each in group) - 1
        for group in several
    ]


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def document(found: Sequence[Prediction]) -> dict[str, object]:
    """All of it as JSON has it."""
    sources = []
    for source, rows in by_source([each.row for each in found]).items():
        of_source = [each for each in found if each.row.source == source]
        lost = regrets(of_source)
        memory = [abs(each.memory_error) for each in of_source if each.memory_error is not None]
        sources.append(
            {
                "source": source,
                "rows": len(rows),
                "mean_error": mean(abs(each.error) for each in of_source),
                "worst_error": max((each.error for each in of_source), key=abs),
                "mean_signed_error": mean(each.error for each in of_source),
                "mean_regret": _mean(lost),
                "worst_regret": max(lost, default=None),
                "memory_mean_error": _mean(memory),
                "not_fitting": sum(each.memory_gib > each.usable_gib for each in of_source),
            }
        )
    return {"sources": sources, "rows": [each.document() for each in found]}


def iteration_errors(found: Sequence[Prediction]) -> list[IterationErrors]:
    """By generation of GPUs and engine, as answers name them."""
    groups: dict[tuple[str, str], list[float]] = {}
    for each in found:
        key = each.row.gpu.partition("-")[0].upper(), each.row.program.engine
        groups.setdefault(key, []).append(abs(each.error))
    return [
        IterationErrors(generation=generation, engine=engine, rows=len(errors), error=round(mean(errors), 3))
        for (generation, engine), errors in sorted(groups.items())
    ]


def print_tables(found: Sequence[Prediction]) -> None:
    """Errors by source, and the rows that are said not to fit."""
    print("| source | rows | mean error | signed | worst | regret | memory |")
    print("|---|---|---|---|---|---|---|")
    for source, rows in by_source([each.row for each in found]).items():
        of_source = [each for each in found if each.row.source == source]
        worst = max((each.error for each in of_source), key=abs)
        memory = _mean([abs(each.memory_error) for each in of_source if each.memory_error is not None])
        cells = [
            source,
            str(len(rows)),
            f"{mean(abs(each.error) for each in of_source):.1%}",
            f"{mean(each.error for each in of_source):+.1%}",
            f"{worst:+.1%}",
            _percent(_mean(regrets(of_source))),
            _percent(memory),
        ]
        print(f"| {' | '.join(cells)} |")
    print("\nof documents/accuracy.py:")
    print("\n".join(f"  {errors}" for errors in iteration_errors(found)))
    misfits = [each for each in found if each.memory_gib > each.usable_gib]
    print(f"\n{len(found) - len(misfits)} of {len(found)} rows, all of which ran, are said to fit")
    for each in misfits:
        row = each.row
        print(
            f"  not: {row.source} {row.model} on {row.gpus} {row.gpu}, sequence {row.sequence_length}, microbatch "
            f"{each.microbatch}: {each.memory_gib:.1f} of {each.usable_gib:.1f} GiB"
        )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
