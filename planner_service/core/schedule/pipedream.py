"""PipeDream (2018, sections 3.3 and 3.4): 1F1B without a flush, an update after every minibatch, stashed weights.

stage 0   F1 F2 F3          B1 U1 F4@1 B2 U2 F5@2 ...
stage 1      F1 F2    B1 U1 F3@1 B2 U2 F4@2 ...
stage 2         F1 B1 U1 F2@1 B2 U2 ...
"""

from collections.abc import Iterator

from planner_service.core.plan import Worker
from planner_service.core.schedule.instructions import Backward, Forward, Instruction, Update
from planner_service.core.schedule.one_f_one_b import alternate
from planner_service.core.schedule.pipeline import Pipeline


def pipedream(pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
    """A minibatch runs, forward and backward, on the newest version that its forward found on this stage.

    In a straight pipeline of n stages minibatch t runs on version t - n on the input stage and t - 1 on the output
    stage (t and stages from 1, no less than 0): w(t+1) = w(t) - lr grad f(w1(t-n+1), ..., wn(t)). A stage of r
    replicas makes one version of r minibatches.
    """
    replicas = pipeline.replicas[worker.stage]
    limit = pipeline.in_flight_limit(worker.stage)
    numbers = [k for batch in pipeline.batch_range() for k in pipeline.microbatches_of(worker, batch)]
    for k, forward in alternate(numbers, limit):
        updates_before = (k - 1) // replicas
        version = max(updates_before - (limit - 1), 0)
        if forward:
            yield Forward(k, version)
        else:
            yield Backward(k, version)
            yield Update(updates_before + 1)
