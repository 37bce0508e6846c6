"""ZB-V (Qi et al., Zero Bubble Pipeline Parallelism, 2024, section 6): no rank idles between its first and last work.

A rank holds two stages in a V: of p ranks rank r has the stages r and 2p - 1 - r. With 2 ranks rank 1 has the stages 1
and 2 in a row, and rank 0 has the first stage and the last, where the backward begins.

rank 0   F1 F2 F3   F1.1 I1.1 W1.1 F2.1 I2.1 W2.1 I1 W1 F3.1 I3.1 W3.1 I2 W2   I3 W3   U1 U1.1
rank 1      F1 F1.1 F2 F2.1 I1.1 W1.1 F3 I1 W1 F3.1 I2.1 W2.1 I2 I3.1 I3 W2 W3.1 W3 U1 U1.1
"""

from collections.abc import Iterator

from pipeplan.documents.plan import Worker
from pipeplan.programs.instructions import Instruction
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.v_turns import F0, F1, I0, I1, W0, W1, Turn, batch_in_turn


class ZBV(Schedule):
    """Zero bubble on ranks with two stages in a V."""

    name = "zb-v"
    source = "Qi et al., Zero Bubble Pipeline Parallelism, 2024, section 6"
    flushes = True
    splits_backward = True
    chunked = True
    v_shaped = True

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """Batch t runs on version t. A rank keeps at most 2p microbatches of a stage: as much as 1F1B's first rank.

        Where forward, gradient of the input and of the weights of a stage take a second each, m >= 2p - 1 microbatches
        take 6m + p - 1 seconds: rank r begins after r seconds, and is then busy to its end.
        """
        ranks = pipeline.span
        for batch in pipeline.batch_range():
            numbers = pipeline.microbatches_of(worker, batch)
            turns = _turns(ranks, worker.stage, max(len(numbers), 2 * ranks - 1))
            yield from batch_in_turn(turns, numbers, batch)

    def idle_steps(self, *, ranks: int, chunks: int) -> float:
        """A forward of one stage for each rank after the first: a sixth of a step, where F, I and W are equal."""
        del chunks
        return (ranks - 1) / 6


def _turns(ranks: int, rank: int, microbatches: int) -> Iterator[Turn]:
    """The order of at least 2 ranks - 1 microbatches; with fewer the last turns of each kind are empty."""
    before_end = ranks - rank
    # Fill: forwards of the first stages, of both and, once they return, the first backwards.
    yield from [F0] * (2 * before_end - 1)
    yield from [F1, F0] * rank
    yield from [F1, I1, W1] * before_end
    # As many backwards as forwards on both stages.
    filled = ranks + before_end - 1
    yield from [F0, I0, W0, F1, I1, W1] * (microbatches - filled)
    yield from [I0, W0, F1, I1, W1] * (before_end - 1)
    # Drain: gradients of inputs first, which others wait for.
    yield from [I0, I1] * rank
    yield from [I0, W0] * before_end
    yield from [W1] * rank
    yield from [W0] * rank
