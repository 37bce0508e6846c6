"""DualPipeV: DeepSeek's DualPipe (DeepSeek-V3 Technical Report, 2024, section 3.2.1), cut in half by Sea AI Lab (2025).

In DualPipe microbatches come from both ends of a pipeline that holds the model twice. Cut in half, p ranks hold it
once, in a V: rank r has the stages r and 2p - 1 - r. In the middle of a batch a forward of one stage is paired with a
backward of the other: the messages of one are in transit during the other.

rank 0   F1 F2 F3   F1.1 I1.1 W1.1 F2.1 F4 I2.1 W2.1 F3.1 I1 W1 I3.1 W3.1 F4.1 I2 W2 I4.1 W4.1 I3 W3 I4 W4 U1 U1.1
rank 1      F1 F1.1 F2 F2.1 F3 I1.1 W1.1 F3.1 I1 W1 F4 I2.1 W2.1 F4.1 I2 W2 I3.1 W3.1 I3 W3 I4.1 I4 W4.1 W4 U1 U1.1
"""

from collections.abc import Iterator

from pipeplan.documents.plan import Worker
from pipeplan.errors import require
from pipeplan.programs.instructions import Instruction
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.v_turns import F0, F1, I0, I1, W0, W1, Turn, batch_in_turn


class DualPipeV(Schedule):
    """Forwards of one stage paired with backwards of the other, on ranks with two stages in a V."""

    name = "dual-pipe-v"
    source = "DeepSeek-V3 Technical Report, 2024, section 3.2.1, cut in half"
    flushes = True
    splits_backward = True
    chunked = True
    v_shaped = True
    microbatch_a_stage = True

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """Batch t runs on version t. A rank keeps 2p + 1 microbatches of a stage.

        With F, I and W seconds for a stage's forward, gradient of the input and of the weights, and B = I + W, the
        bubble is at most DualPipe's (p - 1)(F + 2B - 3W): here a gradient of the input leaves before that of the
        weights is computed, and forward and backward follow each other. Raises InvalidInputError unless m >= 2p.
        """
        rule = f"must be at least the number of stages ({pipeline.depth}) for dual-pipe-v"
        require(pipeline.microbatches >= pipeline.depth, "microbatches", rule, pipeline.microbatches)
        for batch in pipeline.batch_range():
            numbers = pipeline.microbatches_of(worker, batch)
            yield from batch_in_turn(_turns(pipeline.span, worker.stage, len(numbers)), numbers, batch)

    def idle_steps(self, *, ranks: int, chunks: int) -> float:
        """DualPipe's bubble if F, I and W are equal: a sixth of a step for each rank after the first."""
        del chunks
        return (ranks - 1) / 6


def _turns(ranks: int, rank: int, microbatches: int) -> Iterator[Turn]:
    """DualPipe's eight steps."""
    after = ranks - 1 - rank
    yield from [F0] * (2 * after)
    yield from [F0, F1] * (rank + 1)
    yield from [I1, W1, F1] * after
    yield from [F0, I1, W1, F1, I0, W0] * (microbatches - ranks - after)
    yield from [I1, W1, F1, I0, W0] * after
    # In the last backwards, the weights' gradients of the second half wait, because other ranks wait for the inputs'.
    backwards = [(I1, W1), (I0, W0)] * (rank + 1)
    yield from (turn for backward in backwards[: rank + 1] for turn in backward)
    yield from (gradient for gradient, _ in backwards[rank + 1 :])
    waiting = [weights for _, weights in backwards[rank + 1 :]] + [W0] * after
    for weights in waiting[:after]:
        yield weights
        yield I0
    yield from waiting[after:]
