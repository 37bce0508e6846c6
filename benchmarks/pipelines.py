"""Our executor beside torch.distributed.pipelining and the ceiling: `python -m benchmarks.pipelines [CONTENDER...]`.

Torch's schedules run twice: as they are by default, and lean, without the work that a careful user switches off.
"""

import argparse
from collections.abc import Sequence
from statistics import median

from benchmarks.idle import busy_cores, watched_others
from benchmarks.turns import Found, ratio, take_turns
from benchmarks.workload import (
    CEILING,
    MICROBATCH_SIZE,
    MICROBATCHES,
    OURS,
    PEER,
    RANKS,
    ROUNDS,
    STARTS,
    THEIRS,
    WORKLOADS,
)

MIB = 2**20


def main(
    chosen: Sequence[str] = (),
    microbatches: int = MICROBATCHES,
    rounds: int = ROUNDS,
    starts: int = STARTS,
    workload: str = "gpt2",
) -> None:
    """Prints a table: medians over the rounds, and ratios to the peer, round by round."""
    samples = MICROBATCH_SIZE * WORKLOADS[workload].microbatches_a_round
    busy = busy_cores()
    names = [name for name in (*OURS, *THEIRS, CEILING) if not chosen or name in (*chosen, PEER)]
    commands = {name: _command(name, workload, microbatches, rounds) for name in names}
    with watched_others() as others:
        found = take_turns(commands, ranks=RANKS, rounds=rounds, starts=starts)
    work = f"{starts} times {rounds} rounds of {samples} samples each, in turn, {microbatches} microbatches a batch"
    print(f"{workload}: {work}; {busy:.2f} cores were busy before, others had {others[0]:.2f} in use meanwhile\n")
    print(f"| | samples/s | of {PEER} | CPU ms a sample | of {PEER} | peak resident MiB by rank | of {PEER} |")
    print("|---|---|---|---|---|---|---|")
    for name, own in found.items():
        _show(name, samples, own, found[PEER])
    print()
    for name, peer in COMPARED:
        if name in found and peer in found:
            print(f"{name} over {peer}: {_compared(found[name], found[peer])}")


def _command(name: str, workload: str, microbatches: int, rounds: int) -> tuple[str, ...]:
    """A contender's module and its arguments: what one imports is not in another's resident memory."""
    if name in OURS:
        return "benchmarks.pipelines_ours", name, workload, str(microbatches), str(rounds)
    if name in THEIRS:
        return "benchmarks.pipelines_torch", name, workload, str(microbatches)
    return "benchmarks.pipelines_alone", workload, str(microbatches)


COMPARED = (
    ("pipeplan pipedream-2bw", "pipeplan 1f1b"),
    ("pipeplan pipedream-2bw", CEILING),
    ("pipeplan 1f1b, 2BP", "pipeplan 1f1b"),
    ("pipeplan 1f1b", "torch Schedule1F1B, lean"),
    ("pipeplan pipedream-2bw", "torch Schedule1F1B, lean"),
    ("pipeplan 1f1b, 2BP", "torch Schedule1F1B, lean"),
    *(
        (ours, f"torch {theirs}{kind}")
        for ours, theirs in (
            ("pipeplan gpipe", "ScheduleGPipe"),
            ("pipeplan 1f1b-interleaved", "ScheduleInterleaved1F1B"),
            ("pipeplan zb-h1", "ScheduleInterleavedZeroBubble"),
            ("pipeplan zb-h1", "ScheduleZBVZeroBubble"),
        )
        for kind in ("", ", lean")
    ),
)
"""The pairs that are compared besides those with the peer."""


def _compared(own: Found, peer: Found) -> str:
    """Samples a second with the spread over the rounds, processor time and the larger resident memory, as ratios."""
    faster = sorted(b / a for a, b in zip(own.wall_s, peer.wall_s, strict=True))
    spread = f"{faster[0]:.3f} to {faster[-1]:.3f}"
    resident = max(own.resident_bytes) / max(peer.resident_bytes)
    processor = ratio(own.processor_s, peer.processor_s)
    return f"{median(faster):.3f} ({spread}) of its samples/s, {processor:.3f} of its CPU, {resident:.3f} of its memory"


def _show(name: str, samples: int, own: Found, peer: Found) -> None:
    processor_ms = 1e3 * median(own.processor_s) / samples
    resident = " / ".join(f"{size / MIB:.0f}" for size in own.resident_bytes)
    cells = (
        f"{samples / median(own.wall_s):.1f}",
        f"{ratio(peer.wall_s, own.wall_s):.3f}",
        f"{processor_ms:.1f}",
        f"{ratio(own.processor_s, peer.processor_s):.3f}",
        resident,
        f"{max(own.resident_bytes) / max(peer.resident_bytes):.3f}",
    )
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    known = [*OURS, *THEIRS, CEILING]
    listed = f"beside the peer; all by default: {'; '.join(known)}"
    parser.add_argument("contenders", nargs="*", choices=[*known, []], metavar="CONTENDER", help=listed)
    whole = [count for count in range(1, 49) if all(w.microbatches_a_round % count == 0 for w in WORKLOADS.values())]
    parser.add_argument("--workload", default="gpt2", choices=WORKLOADS)
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES, choices=whole, help="of a batch")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--starts", type=int, default=STARTS)
    arguments = parser.parse_args()
    main(arguments.contenders, arguments.microbatches, arguments.rounds, arguments.starts, arguments.workload)
