"""Estimated profiles beside measured iterations of A100s: `python -m benchmarks.analytic`.

The measurements are vTrain's (benchmarks/data, with their licence): GPT models on one node of up to 8 A100s, tensor
parallelism 1, replicas of pipelines with 1F1B and a flush. Every row is predicted from the model's shape, a datasheet
and the node's links alone: blocks counted on fake tensors, timed by the roofline, planned as the row says, its streams
played. The datasheet's three efficiencies are fitted to the iterations of two of the models; the others are predicted.

The measured program recomputed every layer. The defaults of a datasheet were fitted as if it had kept its activations,
because that fits best, and are to be fitted anew (docs/benchmarks.md).
"""

import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import Final

from pipeplan.costs.estimate import estimate
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.plan import ClosedForm, Stage, Worker
from pipeplan.documents.profile import Profile
from pipeplan.documents.stage_costs import StageCosts
from pipeplan.planners.complete import Decision, complete
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.protocol.jobs import ProfileTask
from worker_agent.profiler.analytic import ModelCounts, count_model, estimate_cluster, profile_of
from worker_agent.profiler.datasheets import find_datasheet
from worker_agent.profiler.job import ProfileJob

FILE = Path(__file__).parent / "data" / "vtrain-a100-single-node.csv"
SHEET = find_datasheet("a100-80gb")
OPTIMIZER: Final = "adam"
DTYPE: Final = "float16"
VOCABULARY = 50304
"""GPT-2's, as Megatron rounds it up to a multiple of 128."""

FITTED_MODELS = frozenset({(1024, 24), (2048, 12)})
"""(hidden size, layers) of the models to whose iterations efficiencies are fitted."""

ATTENTIONS = {"eager": "plain attention", "sdpa": "fused attention"}

GRID = (
    (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    (10e-6, 20e-6, 30e-6, 40e-6, 50e-6, 60e-6),
)
STEPS = (0.2, 0.1, 0.05, 0.02)

Efficiencies = tuple[float, float, float]
"""Of compute, of memory, and seconds a launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured configuration."""

    devices: int
    batch_size: int
    microbatch_size: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    width: int
    depth: int
    iteration_s: float

    @property
    def microbatches(self) -> int:
        """A batch's, on one replica of the pipeline."""
        return self.batch_size // self.width // self.microbatch_size

    @property
    def model(self) -> tuple[int, int]:
        """Which of the models it is."""
        return self.hidden, self.layers


def read_rows() -> list[Row]:
    """The file's rows, in its order."""
    with FILE.open(newline="") as lines:
        next(reader := csv.reader(lines))
        return [_row(fields) for fields in reader]


def _row(fields: Sequence[str]) -> Row:
    devices, batch, micro, hidden, heads, layers, sequence, _, width, depth = (int(field) for field in fields[:10])
    return Row(
        devices=devices,
        batch_size=batch,
        microbatch_size=micro,
        hidden=hidden,
        heads=heads,
        layers=layers,
        sequence=sequence,
        width=width,
        depth=depth,
        iteration_s=float(fields[10]) / 1e3,
    )


@cache
def counts_of(hidden: int, layers: int, heads: int, sequence: int, attention: str) -> ModelCounts:
    """What the model does at every microbatch size of the file. GELU is one kernel, as Megatron's fused one."""
    shape = f"n_embd={hidden}&n_layer={layers}&n_head={heads}&n_positions={sequence}&vocab_size={VOCABULARY}"
    task = ProfileTask(
        model=f"hf:gpt2?{shape}&attn_implementation={attention}&activation_function=gelu",
        data=f"worker_agent.models.text:random_tokens?vocab_size={VOCABULARY}&sequence_length={sequence}",
        microbatch_sizes=(1, 2, 4, 8),
        dtype=DTYPE,
        optimizer=OPTIMIZER,
    )
    return count_model(ProfileJob(task=task), gpu=True)


class Predictor:
    """Predicts rows with one set of efficiencies, under one assumption of how the measured program was built."""

    def __init__(self, efficiencies: Efficiencies, *, attention: str, recompute: bool) -> None:
        compute, memory, launch_s = efficiencies
        self._sheet = replace(SHEET, compute_efficiency=compute, memory_efficiency=memory, launch_s=launch_s)
        self._attention = attention
        self._recompute = recompute
        self._profiles: dict[tuple[int, int, int, int], Profile] = {}

    def iteration_s(self, row: Row) -> float:
        """The time between batches when the row's plan is played."""
        stages, placement = self._layout(row)
        decision = Decision(
            planner="given",
            cost_model="given",
            stages=stages,
            placement=placement,
            schedule="1f1b" if row.depth > 1 else "data-parallel",
            microbatch_size=row.microbatch_size,
            microbatches=row.microbatches,
            batch_size=row.batch_size,
            closed_form=ClosedForm(time_per_microbatch_s=0.0, throughput_samples_per_s=0.0, bubble_fraction=0.0),
            optimal_in_flight=row.depth,
            configurations_considered=1,
        )
        problem = PlanningProblem(
            profile=self._profile(row),
            cluster=self._cluster(row),
            batch_size=row.batch_size,
            options=Options(optimizer=OPTIMIZER),
        )
        simulated = complete(problem, decision).simulated
        if simulated is None:
            raise ValueError(f"too long to be played: {row}")
        return row.batch_size / simulated.throughput_samples_per_s

    def quick_s(self, row: Row) -> float:
        """The same in closed form, without transfers that compute does not hide: what is fitted by."""
        stages, placement = self._layout(row)
        costs = estimate(
            self._profile(row),
            self._cluster(row),
            stages,
            placement,
            microbatch_size=row.microbatch_size,
            optimizer=OPTIMIZER,
        )
        work_s = [stage.forward_s + stage.backward_s + self._again_s(stage) for stage in costs]
        ending_s = max(stage.reduce_s + stage.update_s for stage in costs)
        return sum(work_s) + (row.microbatches - 1) * max(work_s) + ending_s

    def _again_s(self, stage: StageCosts) -> float:
        return stage.recompute_s if self._recompute else 0.0

    def _profile(self, row: Row) -> Profile:
        key = (row.hidden, row.layers, row.heads, row.sequence)
        if key not in self._profiles:
            self._profiles[key] = profile_of(counts_of(*key, self._attention), self._sheet, OPTIMIZER)
        return self._profiles[key]

    def _cluster(self, row: Row) -> Cluster:
        return estimate_cluster(self._sheet, row.devices)

    def _layout(self, row: Row) -> tuple[tuple[Stage, ...], tuple[Worker, ...]]:
        """Equal layers a stage; the embedding is with the first, the head with the last."""
        cuts = [0, *(1 + k * row.layers // row.depth for k in range(1, row.depth)), row.layers + 2]
        stages = tuple(
            Stage(start=start, stop=stop, replicas=row.width, recompute=self._recompute)
            for start, stop in pairwise(cuts)
        )
        return stages, tuple(Worker(stage=s, replica=r) for r in range(row.width) for s in range(row.depth))


def fit(rows: Sequence[Row], *, attention: str, recompute: bool) -> Efficiencies:
    """The efficiencies of the least mean error: the best of a grid, then ever smaller steps around it."""

    def error(efficiencies: Efficiencies) -> float:
        predictor = Predictor(efficiencies, attention=attention, recompute=recompute)
        return mean(abs(predictor.quick_s(row) / row.iteration_s - 1) for row in rows)

    best: Efficiencies = min(product(*GRID), key=error)
    for step in STEPS:
        while (better := min(_around(best, step), key=error)) != best:
            best = better
    return best


def _around(center: Efficiencies, step: float) -> Iterator[Efficiencies]:
    """The centre first, so that nothing that is as good replaces it."""
    yield center
    compute, memory, launch_s = center
    for factor in (1 - step, 1 + step):
        yield min(compute * factor, 1.0), memory, launch_s
        yield compute, min(memory * factor, 1.0), launch_s
        yield compute, memory, launch_s * factor


def errors(rows: Iterable[Row], predictor: Predictor) -> list[float]:
    """Every row's relative error, positive where more was predicted than measured."""
    return [predictor.iteration_s(row) / row.iteration_s - 1 for row in rows]


def regrets(rows: Iterable[Row], predictor: Predictor) -> list[float]:
    """For each model, number of devices and batch: how much slower the predicted best is than the measured best."""
    cases: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        cases[row.model, row.devices, row.batch_size].append(row)
    chosen = [(min(case, key=predictor.iteration_s), min(r.iteration_s for r in case)) for case in cases.values()]
    return [row.iteration_s / best_s - 1 for row, best_s in chosen]


def main() -> None:
    """Prints what each assumption can reach, and how the fitted and the default efficiencies predict."""
    rows = read_rows()
    fitted = [row for row in rows if row.model in FITTED_MODELS]
    others = [row for row in rows if row.model not in FITTED_MODELS]
    print(f"{len(fitted)} iterations fitted, {len(others)} predicted\n")
    print("| the program is taken to have | compute | memory | launch | fitted | others |\n|---|---|---|---|---|---|")
    for attention, recompute in product(ATTENTIONS, (False, True)):
        best = fit(fitted, attention=attention, recompute=recompute)
        predictor = Predictor(best, attention=attention, recompute=recompute)
        found = [mean(map(abs, errors(part, predictor))) for part in (fitted, others)]
        name = f"{ATTENTIONS[attention]}, {'' if recompute else 'no '}recomputation"
        shares = f"{best[0]:.2f} | {best[1]:.2f} | {1e6 * best[2]:.0f} µs"
        print(f"| {name} | {shares} | {found[0]:.1%} | {found[1]:.1%} |", flush=True)
    _print_defaults(rows)


def _print_defaults(rows: Sequence[Row]) -> None:
    defaults = (SHEET.compute_efficiency, SHEET.memory_efficiency, SHEET.launch_s)
    predictor = Predictor(defaults, attention="eager", recompute=False)
    print("\nWith the defaults of a datasheet:\n")
    print("| hidden x layers | iterations | mean error | mean of the differences | largest |\n|---|---|---|---|---|")
    for model in [*sorted({row.model for row in rows}), None]:
        found = errors([row for row in rows if model in (None, row.model)], predictor)
        name = "all" if model is None else "{} x {}".format(*model)
        largest = max(found, key=abs)
        print(f"| {name} | {len(found)} | {mean(map(abs, found)):.1%} | {mean(found):+.1%} | {largest:+.1%} |")
    lost = regrets(rows, predictor)
    hits = sum(regret == 0 for regret in lost)
    print(f"\nThe predicted best of {len(lost)} choices is the measured best in {hits}; regret {mean(lost):.1%} on")
    print(f"average, {max(lost):.1%} at most.")


if __name__ == "__main__":
    main()
