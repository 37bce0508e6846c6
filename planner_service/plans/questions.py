"""Questions: the questions to the processes that solve and play, and their answers.

They are not in `solver_process` and `price_process`, which run as programs: a pickled class must have the same name on
both sides. A question may carry a plan's problem as `Posed`: the texts of its documents, which only the solving process
reads.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse
from pipeplan.documents.plan import Answer
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.solve import asked_of
from pipeplan.protocol.plans import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Posed:
    """A request, and the stored documents that it names. A short request may name profiles of many megabytes."""

    request: PlanRequest
    profile: str
    cluster: str
    other_profiles: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return len(self.profile) + len(self.cluster) + sum(map(len, self.other_profiles))

    def problem(self) -> PlanningProblem:
        """The problem. Raises InvalidInputError for documents that do not match."""
        return PlanningProblem(
            profile=_profile("profile_id", self.profile),
            cluster=parse(Cluster, self.cluster),
            batch_size=self.request.batch_size,
            options=self.request.options,
            other_profiles=tuple(_profile("other_profile_ids", other) for other in self.other_profiles),
            calibration=self.request.calibration,
        )

    def check(self) -> None:
        """Raises InvalidInputError for documents that do not fit together, a size that was not measured, and a planner
        that does not exist or does not support the request.
        """
        problem = asked_of(self.request.planner, self.problem())
        if problem.options.microbatch_size is not None:
            problem.profile.at(problem.options.microbatch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerQuestion:
    """A question to a planner. `pose` makes the problem in the planner's process, because reading its documents takes a
    while.
    """

    planner: str
    pose: Callable[[], PlanningProblem]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The planner's answer, and how many seconds it took."""

    answer: Answer
    solve_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceQuestion:
    """A stored plan without a play, and how many instructions may be played for one."""

    plan_id: str
    content: str
    instructions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A stored plan's document with its play, and its summary for lists."""

    content: str
    throughput_samples_per_s: float
    bubble_fraction: float


def _profile(field: str, content: str) -> Profile:
    try:
        return parse(Profile, content)
    except InvalidInputError as error:  # it was stored before the rule was there
        raise InvalidInputError(f"{field}.{error.field}", error.rule, error.value) from error
