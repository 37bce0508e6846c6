"""Measurements of memory alone, for tests that look at no times."""

from pipeplan.documents.measurement import Measurement
from worker_agent.profiler.block_memory import BlockMemory


def measurement_of(memory: BlockMemory, microbatch_size: int) -> Measurement:
    """What a profile holds of a block whose memory was measured; a forward takes 1 s, a backward 2 s."""
    return Measurement(
        microbatch_size=microbatch_size,
        forward_s=1.0,
        backward_s=2.0,
        input_bytes=memory.input_bytes,
        output_bytes=memory.output_bytes,
        activation_bytes=memory.activation_bytes,
        shared_bytes=memory.shared_bytes,
        kept_output_bytes=memory.kept_output_bytes,
        passed_bytes=memory.passed_bytes,
    )
