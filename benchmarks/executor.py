"""What the executor adds to the modules' own work, an instruction: `python -m benchmarks.executor`.

Three stages of tiny blocks, in processes that send to each other over gloo; the middle one is looked at, which receives
and sends in both directions. Times are processor time of the thread that executes, so that waiting does not count. What
the same blocks, loss and optimizer take when they are called in a plain loop is subtracted: the rest is the executor's
own, with its bookkeeping, its recording and its calls of the transfers.
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

from torch.distributed.launcher.api import elastic_launch

from benchmarks.executor_rank import BATCHES, BLOCKS, CASES, MICROBATCHES, MIDDLE, STAGES, Figures
from benchmarks.idle import busy_cores
from worker_agent.torchrun import one_node


def main() -> None:
    """Prints a table for every number of blocks: medians by kind of instruction, and the mean over the stream."""
    print(
        f"{STAGES} stages, {BATCHES} batches of {MICROBATCHES} microbatches; {busy_cores():.2f} cores were busy before"
    )
    for blocks in BLOCKS:
        print(f"\n| µs an instruction, {blocks} linear layer{'s' * (blocks > 1)} a stage | {' | '.join(CASES)} |")
        print(f"|---|{'---|' * len(CASES)}")
        _show([_measure(case, blocks) for case in CASES])


def _measure(case: str, blocks: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        command = ("-m", "benchmarks.executor_rank", case, str(blocks), folder)
        elastic_launch(one_node(STAGES), sys.executable)(*command)
        return Figures(**json.loads(Path(folder, f"{MIDDLE}.json").read_text()))


def _show(cases: list[Figures]) -> None:
    for kind in dict.fromkeys(kind for figures in cases for kind in figures.taken_us):
        print(f"| {kind} | {' | '.join(_cell(figures, kind) for figures in cases)} |")
    means = [mean(own for kind, numbers in f.taken_us.items() for own in _own(f, kind, numbers)) for f in cases]
    print(f"| all, the mean | {' | '.join(f'{own_us:.0f}' for own_us in means)} |", flush=True)


def _own(figures: Figures, kind: str, taken_us: list[float]) -> list[float]:
    """Without the largest hundredth: what the machine does in between."""
    kept = sorted(taken_us)[: max(len(taken_us) * 99 // 100, 1)]
    return [taken - figures.work_us.get(kind, 0.0) for taken in kept]


def _cell(figures: Figures, kind: str) -> str:
    if kind not in figures.taken_us:
        return ""
    taken_us, work_us = median(figures.taken_us[kind]), figures.work_us.get(kind, 0.0)
    return f"{taken_us - work_us:.0f} (of {taken_us:.0f})" if work_us else f"{taken_us:.0f}"


if __name__ == "__main__":
    main()
