"""PipeDream (2018, sections 3.3 and 3.4): 1F1B without a flush, an update after every minibatch, stashed weights.

stage 0   F1 F2 F3          B1 U1 F4@1 B2 U2 F5@2 ...
stage 1      F1 F2    B1 U1 F3@1 B2 U2 F4@2 ...
stage 2         F1 B1 U1 F2@1 B2 U2 ...

With vertical sync (section 3.3) the order is the same, the versions are those of the input stage:

stage 1      F1 F2    B1 U1 F3 B2 U2 F4@1 ...
stage 2         F1 B1 U1 F2 B2 U2 F3 B3 U3 F4@1 ...
"""

from collections.abc import Iterable, Iterator, Sequence
from math import gcd

from pipeplan.documents.plan import Worker
from pipeplan.programs.instructions import Instruction, backward, forward, update
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.one_f_one_b import woven


class PipeDream(Schedule):
    """1F1B without a flush, an update after every minibatch, weights stashed for the minibatches in flight."""

    name = "pipedream"
    source = "PipeDream 2018, sections 3.3 and 3.4"
    alternates = True
    fills = True
    update = "minibatch"

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """A minibatch runs, forward and backward, on the newest version that its forward found on this stage.

        In a straight pipeline of n stages minibatch t runs on version t - n on the input stage and t - 1 on the output
        stage (t and stages from 1, no less than 0): w(t+1) = w(t) - lr grad f(w1(t-n+1), ..., wn(t)). A stage of r
        replicas makes one version of r minibatches.
        """
        versions = _newest_versions(pipeline, worker.stage, pipeline.numbers_of(worker))
        return _stashing(pipeline, worker, versions)

    def versions_behind(self, pipeline: Pipeline, stage: int) -> int:
        """As many updates as the other minibatches in flight have made."""
        return pipeline.in_flight_limit(stage) - 1

    def updates_late(self, pipeline: Pipeline) -> int:
        """Those that the weights are behind: a minibatch's own update follows those of all minibatches before it."""
        return max(self.versions_behind(pipeline, stage) for stage in range(pipeline.depth))

    def in_flight(self, *, depth: int, stage: int, microbatches: int) -> int:
        """As many as there are stages from this one on (section 3.3)."""
        del microbatches
        return depth - stage

    def weight_versions(self, held: int) -> int:
        """One version for each microbatch in flight."""
        return held

    def gathers_beside(self, *, held: int, microbatches: int) -> bool:
        """No: an update follows each backward."""
        del held, microbatches
        return False

    def keeps_versions(self, replicas: Sequence[int], stage: int) -> bool:
        """If more than one microbatch is in flight."""
        return sum(replicas[stage:]) > replicas[stage]


class VerticalSync(PipeDream):
    """PipeDream with vertical sync: a minibatch runs on the version that it found on the input stage."""

    name = "pipedream-vertical-sync"
    source = "PipeDream 2018, section 3.3"
    vertical_sync = True

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """A minibatch runs on every stage on the version that its forward found on the input stage.

        In a straight pipeline of n stages that is t - n everywhere:
        w(t+1) = w(t) - lr grad f(w1(t-n+1), ..., wn(t-n+1)). Between stages of unequal replicas, whose versions hold
        different numbers of minibatches, it is the newest version that holds no minibatch which the input stage's
        version does not hold.
        """
        first, own = pipeline.replicas[0], pipeline.replicas[worker.stage]
        newest = _newest_versions(pipeline, 0, pipeline.numbers_of(worker))
        return _stashing(pipeline, worker, [version * first // own for version in newest])

    def versions_behind(self, pipeline: Pipeline, stage: int) -> int:
        """The input stage has NOAM minibatches in flight on each of its r1 replicas.

        Of these NOAM r1 minibatches, a version of r replicas holds at least gcd(r1, r): all but those are missing, r an
        update.
        """
        first, own = pipeline.replicas[0], pipeline.replicas[stage]
        return -(-(pipeline.in_flight_limit(0) * first - gcd(first, own)) // own)

    def keeps_versions(self, replicas: Sequence[int], stage: int) -> bool:
        """On all stages, if there are several."""
        del stage
        return len(replicas) > 1


def _newest_versions(pipeline: Pipeline, stage: int, numbers: range) -> list[int]:
    """The newest version on a stage when each of the minibatches is forwarded there."""
    replicas, others = pipeline.replicas[stage], pipeline.in_flight_limit(stage) - 1
    return [max(made - others, 0) for made in _made_before(numbers, replicas)]


def _made_before(numbers: range, replicas: int) -> Iterable[int]:
    """The number of versions that the minibatches before each one make on a stage of `replicas` replicas."""
    if numbers.step == replicas:  # those of one replica
        first = (numbers.start - 1) // replicas
        return range(first, first + len(numbers))
    return ((k - 1) // replicas for k in numbers)


def _stashing(pipeline: Pipeline, worker: Worker, versions: Sequence[int]) -> Iterator[Instruction]:
    """1F1B over all minibatches, each on its version, with an update after every backward."""
    replicas, numbers = pipeline.replicas[worker.stage], pipeline.numbers_of(worker)
    limit = pipeline.in_flight_limit(worker.stage)
    steady = max(len(numbers) - limit, 0)
    forwards: list[Instruction] = list(map(forward, numbers, versions))
    backwards: list[Instruction] = list(map(backward, numbers, versions))
    updates: list[Instruction] = [update(made + 1) for made in _made_before(numbers, replicas)]
    one_by_one = woven(backwards[:steady], updates[:steady], forwards[limit:])
    return iter((*forwards[:limit], *one_by_one, *woven(backwards[steady:], updates[steady:])))
