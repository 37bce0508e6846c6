"""Our executor beside torch.distributed.pipelining and the ceiling: `python -m benchmarks.pipelines [CONTENDER...]`."""

import argparse
from collections.abc import Sequence
from statistics import median

from benchmarks.idle import busy_cores
from benchmarks.turns import Found, ratio, take_turns
from benchmarks.workload import (
    CEILING,
    MICROBATCH_SIZE,
    MICROBATCHES,
    MICROBATCHES_A_ROUND,
    OURS,
    PEER,
    RANKS,
    ROUNDS,
    STARTS,
    THEIRS,
)

SAMPLES = MICROBATCH_SIZE * MICROBATCHES_A_ROUND
MIB = 2**20


def main(
    chosen: Sequence[str] = (), microbatches: int = MICROBATCHES, rounds: int = ROUNDS, starts: int = STARTS
) -> None:
    """Prints a table: medians over the rounds, and ratios to the peer, round by round."""
    busy = busy_cores()
    names = [name for name in (*OURS, *THEIRS, CEILING) if not chosen or name in (*chosen, PEER)]
    commands = {name: ("benchmarks.pipelines_rank", name, str(microbatches), str(rounds)) for name in names}
    found = take_turns(commands, ranks=RANKS, rounds=rounds, starts=starts)
    work = f"{starts} times {rounds} rounds of {SAMPLES} samples each, in turn, {microbatches} microbatches a batch"
    print(f"{work}; {busy:.2f} cores were busy before\n")
    print(f"| | samples/s | of {PEER} | CPU ms a sample | of {PEER} | peak resident MiB by rank | of {PEER} |")
    print("|---|---|---|---|---|---|---|")
    for name, own in found.items():
        _show(name, own, found[PEER])
    print()
    for name, peer in COMPARED:
        if name in found and peer in found:
            print(f"{name} over {peer}: {ratio(found[peer].wall_s, found[name].wall_s):.3f}")


COMPARED = (
    ("pipeplan pipedream-2bw", "pipeplan 1f1b"),
    ("pipeplan pipedream-2bw", CEILING),
    ("pipeplan 1f1b, 2BP", "pipeplan 1f1b"),
    ("pipeplan 1f1b-interleaved", "torch ScheduleInterleaved1F1B"),
    ("pipeplan zb-h1", "torch ScheduleInterleavedZeroBubble"),
    ("pipeplan zb-h1", "torch ScheduleZBVZeroBubble"),
    ("pipeplan gpipe", "torch ScheduleGPipe"),
)
"""Whose samples a second are compared, beside those with the peer."""


def _show(name: str, own: Found, peer: Found) -> None:
    processor_ms = 1e3 * median(own.processor_s) / SAMPLES
    resident = " / ".join(f"{size / MIB:.0f}" for size in own.resident_bytes)
    cells = (
        f"{SAMPLES / median(own.wall_s):.1f}",
        f"{ratio(peer.wall_s, own.wall_s):.3f}",
        f"{processor_ms:.1f}",
        f"{ratio(own.processor_s, peer.processor_s):.3f}",
        resident,
        f"{max(own.resident_bytes) / max(peer.resident_bytes):.3f}",
    )
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contenders", nargs="*", help="beside the peer; all by default")
    whole = [count for count in range(1, MICROBATCHES_A_ROUND + 1) if MICROBATCHES_A_ROUND % count == 0]
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES, choices=whole, help="of a batch")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--starts", type=int, default=STARTS)
    arguments = parser.parse_args()
    main(arguments.contenders, arguments.microbatches, arguments.rounds, arguments.starts)
