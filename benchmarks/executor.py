"""What the executor adds to an instruction: `python -m benchmarks.executor`.

Three stages of tiny blocks, in processes that send to each other over gloo; the middle one is looked at, which receives
and sends in both directions. Beside it stands a loop by hand in the same processes: the same order, the same torch and
gloo calls, and nothing else. Times are processor time of the thread that executes, so that waiting does not count.
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from torch.distributed.launcher.api import elastic_launch

from benchmarks.executor_rank import BATCHES, BLOCKS, CASES, MICROBATCHES, MIDDLE, STAGES, Figures
from benchmarks.idle import busy_cores
from worker_agent.engine.torchrun import one_node


def main() -> None:
    """Prints a table for every number of blocks: medians by kind of instruction, and the mean over the stream."""
    print(
        f"{STAGES} stages, {BATCHES} batches of {MICROBATCHES} microbatches; {busy_cores():.2f} cores were busy before"
    )
    for blocks in BLOCKS:
        print(f"\n| µs by hand, in the executor; {blocks} linear layers a stage | {' | '.join(CASES)} |")
        print(f"|---|{'---|' * len(CASES)}")
        _show([_measure(case, blocks) for case in CASES])


def _measure(case: str, blocks: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        command = ("-m", "benchmarks.executor_rank", case, str(blocks), folder)
        elastic_launch(one_node(STAGES), sys.executable)(*command)
        return Figures(**json.loads(Path(folder, f"{MIDDLE}.json").read_text()))


def _show(cases: list[Figures]) -> None:
    for kind in dict.fromkeys(kind for figures in cases for kind in (*figures.taken_us, *figures.by_hand_us)):
        print(f"| {kind} | {' | '.join(_cell(figures, kind) for figures in cases)} |")
    added = [(_whole(f.taken_us) - _whole(f.by_hand_us)) / sum(map(len, f.taken_us.values())) for f in cases]
    print(f"| added, the mean | {' | '.join(f'{each_us:.0f}' for each_us in added)} |", flush=True)


def _whole(taken_us: dict[str, list[float]]) -> float:
    """All instructions together; one that the machine held up counts as its kind's median."""
    return sum(len(numbers) * median(numbers) for numbers in taken_us.values())


def _cell(figures: Figures, kind: str) -> str:
    pair = [figures.by_hand_us.get(kind), figures.taken_us.get(kind)]
    return ", ".join("-" if numbers is None else f"{median(numbers):.0f}" for numbers in pair)


if __name__ == "__main__":
    main()
