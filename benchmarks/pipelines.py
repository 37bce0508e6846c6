"""Our executor beside torch.distributed.pipelining and the ceiling: `python -m benchmarks.pipelines`."""

import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from torch.distributed.launcher.api import elastic_launch

from benchmarks.idle import busy_cores
from benchmarks.workload import BATCHES, MICROBATCH_SIZE, MICROBATCHES, ROUNDS
from worker_agent.torchrun import one_node

PEER = "torch Schedule1F1B"


def main() -> None:
    """Prints a table: medians over the rounds, and ratios to the peer, round by round."""
    busy = busy_cores()
    with tempfile.TemporaryDirectory() as folder:
        elastic_launch(one_node(2), sys.executable)("-m", "benchmarks.pipelines_rank", folder)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text())["seconds"] for rank in (0, 1)]
    samples = MICROBATCH_SIZE * MICROBATCHES * BATCHES
    print(f"{ROUNDS} rounds of {samples} samples each, in turn; {busy:.2f} cores were busy before\n")
    print(f"| | samples/s | of {PEER} | CPU ms a sample |\n|---|---|---|---|")
    wall_s = {
        name: [max(pair) for pair in zip(*(_column(r[name], 0) for r in ranks), strict=True)] for name in ranks[0]
    }
    for name, seconds in wall_s.items():
        ratio = median(peer / own for own, peer in zip(seconds, wall_s[PEER], strict=True))
        processor_s = sum(median(_column(r[name], 1)) for r in ranks)
        print(f"| {name} | {samples / median(seconds):.1f} | {ratio:.3f} | {1e3 * processor_s / samples:.1f} |")
    flush, two_bw = wall_s["pipeplan 1f1b"], wall_s["pipeplan pipedream-2bw"]
    gain = median(slow / fast for slow, fast in zip(flush, two_bw, strict=True))
    print(f"\n2BW over our own 1f1b: {gain:.3f} (the bubble allows {(MICROBATCHES + 1) / MICROBATCHES:.3f})")


def _column(rows: list[list[float]], index: int) -> list[float]:
    return [row[index] for row in rows]


if __name__ == "__main__":
    main()
