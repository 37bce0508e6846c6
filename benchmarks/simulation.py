"""How long generating, playing and reading instruction streams takes: `python -m benchmarks.simulation`."""

import time
from collections.abc import Callable
from dataclasses import replace

from pipeplan.documents.stage_costs import StageCosts
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.program import Program
from pipeplan.programs.timeline import Timeline, throughput_samples_per_s
from pipeplan.schedules.registry import build
from pipeplan.simulation.play import simulate

ROUNDS = 3
LINKS = StageCosts(
    microbatch_size=1,
    forward_s=1.0,
    backward_s=2.0,
    backward_input_s=1.0,
    backward_weight_s=1.0,
    activation_transfer_s=0.1,
    gradient_transfer_s=0.1,
)
PORTS = replace(LINKS, activation_port_devices=1, gradient_port_devices=1)


def main() -> None:
    """Prints a table: the best of some rounds."""
    print("| 1F1B | instructions | streams, s | play, s | figures, s | µs an instruction |\n|---|---|---|---|---|---|")
    for stages, microbatches in ((16, 64), (64, 256), (1000, 300)):
        for name, costs in (("own links", LINKS), ("ports", PORTS)):
            _row(f"{stages} stages, {microbatches} microbatches, {name}", stages, microbatches, costs)


def _row(name: str, stages: int, microbatches: int, costs: StageCosts) -> None:
    program = _program(stages, microbatches)
    timeline = _timeline(program, costs)
    count = sum(len(stream.instructions) for stream in program.streams)
    streams_s = _best_s(lambda: _program(stages, microbatches))
    play_s = _best_s(lambda: _timeline(program, costs))
    figures_s = _best_s(lambda: _figures(timeline))
    each_us = 1e6 * (streams_s + play_s + figures_s) / count
    print(f"| {name} | {count:,} | {streams_s:.3f} | {play_s:.3f} | {figures_s:.3f} | {each_us:.2f} |", flush=True)


def _program(stages: int, microbatches: int) -> Program:
    return build("1f1b", Pipeline(replicas=(1,) * stages, microbatches=microbatches))


def _timeline(program: Program, costs: StageCosts) -> Timeline:
    return simulate(program, [costs] * program.pipeline.depth)


def _figures(timeline: Timeline) -> tuple[float, float, int]:
    peak_bytes = max(lane.peak_memory_bytes for lane in timeline.lanes)
    return timeline.bubble_fraction, throughput_samples_per_s(timeline), peak_bytes


def _best_s(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)


if __name__ == "__main__":
    main()
