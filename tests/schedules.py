"""The schedules by what they say of themselves, for tests that hold for some of them."""

from pipeplan.schedules.registry import BUILT_IN, schedule_named

SCHEDULES = BUILT_IN
ASP = "data-parallel-asp"
INTERLEAVED = "1f1b-interleaved"
DATA_PARALLEL = frozenset(name for name in BUILT_IN if schedule_named(name).single_stage)
STASHING = frozenset(name for name in BUILT_IN if schedule_named(name).update == "minibatch")
FUSED = frozenset(name for name in BUILT_IN if schedule_named(name).takes_two_bp)
