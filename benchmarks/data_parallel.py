"""Our data parallelism beside torch's DistributedDataParallel: `python -m benchmarks.data_parallel`.

Two processes, the same model and data; a batch's gradients are exchanged while its last microbatch is in the backward.
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from torch.distributed.launcher.api import elastic_launch

from benchmarks.data_parallel_rank import BATCHES, MICROBATCHES, PEER, REPLICAS, ROUNDS
from benchmarks.idle import watched_others
from benchmarks.workload import MICROBATCH_SIZE
from worker_agent.engine.torchrun import one_node


def main() -> None:
    """Prints a table: medians over the rounds, and ratios to the peer, round by round."""
    with tempfile.TemporaryDirectory() as folder:
        with watched_others() as others:
            elastic_launch(one_node(REPLICAS), sys.executable)("-m", "benchmarks.data_parallel_rank", folder)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(REPLICAS)]
    samples = MICROBATCH_SIZE * MICROBATCHES * REPLICAS * (BATCHES - 1)
    print(f"{ROUNDS} rounds of {samples} samples each, in turn; others kept {others[0]:.2f} cores busy meanwhile\n")
    print(f"| | samples/s | of {PEER} |\n|---|---|---|")
    wall_s = {name: [max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}
    for name, seconds in wall_s.items():
        ratio = median(peer / own for own, peer in zip(seconds, wall_s[PEER], strict=True))
        print(f"| {name} | {samples / median(seconds):.1f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
