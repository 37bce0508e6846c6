"""The schedules by what they say of themselves, for tests that hold for some of them."""

from pipeplan.schedules.registry import BUILT_IN, schedule_named

SCHEDULES = BUILT_IN
ASP = "data-parallel-asp"
INTERLEAVED = "1f1b-interleaved"
DATA_PARALLEL = frozenset(name for name in BUILT_IN if schedule_named(name).single_stage)
STASHING = frozenset(name for name in BUILT_IN if schedule_named(name).update == "minibatch")
CHUNKED = frozenset(name for name in BUILT_IN if schedule_named(name).chunked)
V_SHAPED = frozenset(name for name in BUILT_IN if schedule_named(name).v_shaped)
FULL = frozenset(name for name in BUILT_IN if schedule_named(name).microbatch_a_stage)
FUSED = frozenset(name for name in BUILT_IN if schedule_named(name).takes_two_bp)


def chunks_of(schedule: str) -> int:
    """The stages of a rank in tests that do not vary them: 2 where a rank can have several."""
    return 2 if schedule_named(schedule).chunked else 1


def microbatches_of(schedule: str, microbatches: int, *, depth: int) -> int:
    """So many microbatches of a batch, or as near to that as the schedule can take on so many stages."""
    if schedule in STASHING:
        return 1
    return max(microbatches, depth) if schedule in FULL else microbatches
