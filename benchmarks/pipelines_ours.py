"""One process of a contender of `benchmarks.pipelines`: our executor."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.turns import Turn
from benchmarks.workload import LEARNING_RATE, OURS, WORKLOADS, Ours, Workload, plan_for
from pipeplan.programs.instructions import Instruction, Update
from pipeplan.simulation.predict import program_of
from worker_agent.engine.devices import place_process
from worker_agent.models.chain import build_model
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.rank import Rank
from worker_agent.runtime.status import StatusWriter


class Gate(StatusWriter):
    """A rank's status, which waits for its turn before its stream, and again after every number of batches."""

    def __init__(self, path: Path, instructions: Sequence[Instruction], turn: Turn, batches: int) -> None:
        super().__init__(path)
        last = {i.version: index for index, i in enumerate(instructions) if isinstance(i, Update)}
        self._stops = {0} | {last[version] + 1 for version in last if version % batches == 0}
        self._turn = turn

    def at(self, instruction: int) -> None:
        """The rank starts this instruction of its stream."""
        if instruction in self._stops:
            self._turn.take()
        super().at(instruction)


def ours(contender: Ours, work: Workload, turn: Turn, device: torch.device, microbatches: int, rounds: int) -> None:
    """Our executor under one of our schedules. A round ends with an update, not with an empty pipeline."""
    with tempfile.TemporaryDirectory() as folder:
        batches = work.batches_a_round(microbatches)
        steps = batches * (rounds + 1)
        job = RunJob(
            plan=plan_for(contender, microbatches, work),
            model=work.model,
            data=work.data,
            steps=steps,
            learning_rate=LEARNING_RATE,
            out=folder,
            device="cpu",
        )
        program = program_of(job.plan, batches=steps)
        rank = Rank(job, program, build_model(work.model, seed=job.seed), turn.rank, device)
        rank.execute(Gate(Path(folder) / "status", rank.stream.instructions, turn, batches))
    turn.take()


def main(name: str, workload: str, microbatches: int, rounds: int) -> None:
    """Works in turn with the other contenders until there is no more to do."""
    turn = Turn()
    device = place_process("cpu", turn.rank, turn.ranks)
    ours(OURS[name], WORKLOADS[workload], turn, device, microbatches, rounds)
    turn.end()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
