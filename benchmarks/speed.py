"""How fast the cores are at the moment: a fixed piece of work on all of them at once.

On a virtual machine that shares its host, the same work takes half as long again from one minute to the next while
nothing else runs here. Figures that are taken minutes apart are compared at the same speed.
"""

import os
import subprocess
import sys
import time

import numpy as np

SPAN_S, WARM_UP_S = 1.5, 0.5
"""How long each core works, and how long before that counts."""

_ROWS, _WIDTH = 512, 192
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def passes_per_s() -> float:
    """How often a second all cores together do the work, while all of them do."""
    command = (sys.executable, "-m", "benchmarks.speed")
    workers = [
        subprocess.Popen((*command, str(core)), stdout=subprocess.PIPE, text=True, env=os.environ | _ONE_THREAD)
        for core in sorted(os.sched_getaffinity(0))
    ]
    return sum(float(worker.communicate()[0]) for worker in workers)


def work(core: int) -> float:
    """Passes a second of one core: a layer's matrix products, and what is done element by element."""
    os.sched_setaffinity(0, {core})
    draw = np.random.default_rng(0)
    tokens = draw.standard_normal((_ROWS, _WIDTH), dtype=np.float32)
    up = draw.standard_normal((_WIDTH, 4 * _WIDTH), dtype=np.float32)
    down = draw.standard_normal((4 * _WIDTH, _WIDTH), dtype=np.float32)

    def passes(span_s: float) -> float:
        start_s, done = time.monotonic(), 0
        while (spent_s := time.monotonic() - start_s) < span_s:
            np.tanh(tokens @ up) @ down
            done += 1
        return done / spent_s

    passes(WARM_UP_S)
    return passes(SPAN_S)


if __name__ == "__main__":
    print(work(int(sys.argv[1])))
