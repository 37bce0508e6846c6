"""Report: errors of time and memory by source, and the regret of choosing by prediction."""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import mean

from benchmarks.truth.predictions import Prediction
from benchmarks.truth.rows import Row
from pipeplan.documents.accuracy import IterationErrors

Found = Sequence[tuple[Row, Prediction | Exception]]
"""Every row with its prediction, or with why there is none."""

HEADINGS = ("", "rows", "no answer", "clean", "mean error", "signed", "median", "worst", "regret", "memory", "fit")


def regrets(found: Sequence[Prediction]) -> list[float]:
    """For each group of several clean rows: how much longer the predicted best takes than the measured best."""
    groups: dict[tuple[object, ...], list[Prediction]] = {}
    for each in found:
        if each.error is not None:
            groups.setdefault(each.row.group, []).append(each)
    return [
        (min(group, key=lambda each: each.seconds).row.seconds or 0) / min(each.row.seconds or 0 for each in group) - 1
        for group in groups.values()
        if len(group) > 1
    ]


def figures(found: Found) -> dict[str, float | int | None]:
    """The figures of these rows, by what they are; None where nothing can be compared."""
    predicted = [each for _, each in found if isinstance(each, Prediction)]
    errors = [each.error for each in predicted if each.error is not None]
    lost = regrets(predicted)
    memory = [each.memory_error for each in predicted if each.memory_error is not None]
    ran = [each.fits for each in predicted if each.row.seconds is not None]
    ended = [not each.fits for each in predicted if each.row.seconds is None]
    return {
        "rows": len(found),
        "no_answer": len(found) - len(predicted),
        "clean": len(errors),
        "mean_error": _mean([abs(each) for each in errors]),
        "mean_signed_error": _mean(errors),
        "median_error": sorted(map(abs, errors))[len(errors) // 2] if errors else None,
        "worst_error": max(errors, key=abs, default=None),
        "mean_regret": _mean(lost),
        "memory_mean_error": _mean([abs(each) for each in memory]),
        "memory_mean_signed_error": _mean(memory),
        "ran_and_fit": sum(ran),
        "ran": len(ran),
        "out_of_memory_and_do_not_fit": sum(ended),
        "out_of_memory": len(ended),
    }


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def _kind_of(row: Row) -> str:
    gpu = "Blackwell" if row.gpu.startswith(("b", "gb")) else row.gpu[:4].upper()
    return f"{gpu}, {'mixtures' if _is_mixture(row) else 'dense'}"


def _is_mixture(row: Row) -> bool:
    return any(word in row.spec for word in ("moe", "oss", "experts"))


GROUPINGS: tuple[tuple[str, Callable[[Row], object]], ...] = (
    ("source and GPU", lambda row: f"{row.source}, {row.gpu[:4].upper()}"),
    ("GPU", _kind_of),
    ("tensor degree", lambda row: f"{row.gpu[:4].upper()}, tensor {row.options.tensor}"),
)


def document(found: Found) -> dict[str, object]:
    """All of it as JSON has it."""
    return {
        **{name: {key: figures(rows) for key, rows in _grouped(found, of)} for name, of in GROUPINGS},
        "rows": [
            {**asdict(row), **({"error": str(each)} if isinstance(each, Exception) else _predicted(each))}
            for row, each in found
        ],
    }


def _predicted(each: Prediction) -> dict[str, object]:
    return {
        "microbatch_taken": each.plan.microbatch_size,
        "virtual_stages_taken": each.plan.chunks,
        "predicted_s": each.seconds,
        "seconds_error": each.error,
        "memory_predicted_gib": each.memory_gib,
        "memory_error": each.memory_error,
        "fits": each.fits,
    }


def iteration_errors(found: Found) -> list[IterationErrors]:
    """Of clean rows, by generation of GPUs, engine, and dense models or mixtures, as answers name them."""
    groups: dict[tuple[str, str, bool], list[float]] = {}
    for row, each in found:
        if isinstance(each, Prediction) and each.error is not None:
            generation = next(part for part in re.split(r"[^a-z0-9]+", row.gpu.lower()) if part)
            key = generation.upper(), row.program.engine, _is_mixture(row)
            groups.setdefault(key, []).append(abs(each.error))
    return [
        IterationErrors(generation=gpu, engine=engine, mixture=mixture, rows=len(errors), error=round(mean(errors), 3))
        for (gpu, engine, mixture), errors in sorted(groups.items())
    ]


def _grouped(found: Found, of: Callable[[Row], object]) -> list[tuple[str, list[tuple[Row, Prediction | Exception]]]]:
    groups: dict[str, list[tuple[Row, Prediction | Exception]]] = {}
    for row, each in found:
        groups.setdefault(str(of(row)), []).append((row, each))
    return list(groups.items())


def print_tables(found: Found) -> None:
    """Figures by source, by GPU and by tensor degree; and the rows without an answer."""
    for name, of in GROUPINGS:
        print(f"\n| {' | '.join((name, *HEADINGS[1:]))} |\n|{'---|' * len(HEADINGS)}")
        for key, rows in _grouped(found, of):
            known = figures(rows)
            percents = ("mean_error", "mean_signed_error", "median_error", "worst_error", "mean_regret")
            fit = f"{known['ran_and_fit']} of {known['ran']}"
            if known["out_of_memory"]:
                fit += f"; not {known['out_of_memory_and_do_not_fit']} of {known['out_of_memory']}"
            cells = [key, *(str(known[count]) for count in ("rows", "no_answer", "clean"))]
            cells += [_percent(known[each], signed="error" in each and each != "mean_error") for each in percents]
            print(f"| {' | '.join([*cells, _percent(known['memory_mean_signed_error'], signed=True), fit])} |")
    print("\nof documents/accuracy.py:")
    print("\n".join(f"  {errors}" for errors in iteration_errors(found)))
    for row, each in found:
        if isinstance(each, Exception):
            print(f"  no answer: {row.source} {row.model} on {row.gpus} {row.gpu}: {each}")


def _percent(value: float | None, *, signed: bool = False) -> str:
    return "" if value is None else f"{value:{'+' if signed else ''}.1%}"
