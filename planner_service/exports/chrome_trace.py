"""Chrome trace: the predicted timeline for chrome://tracing and Perfetto."""

from planner_service.core.predict import predict
from planner_service.core.trace import chrome_trace
from planner_service.exports.source import Source

BATCHES = 2


def write(source: Source) -> str:
    """The trace of the first batches."""
    return chrome_trace({"predicted": predict(source.plan, batches=BATCHES)})
