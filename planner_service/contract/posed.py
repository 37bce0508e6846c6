"""Posed: a plan's problem by the texts of its documents, which are read where it is solved and nowhere before."""

from dataclasses import dataclass

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import PlanningProblem
from planner_service.contract.plans import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Posed:
    """A request, and the stored documents that it names. A short request may name profiles of many megabytes."""

    request: PlanRequest
    profile: str
    cluster: str
    other_profiles: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """How many characters there are to read."""
        return len(self.profile) + len(self.cluster) + sum(map(len, self.other_profiles))

    def problem(self) -> PlanningProblem:
        """The problem. Raises InvalidInputError for documents that do not go together."""
        return PlanningProblem(
            profile=_profile("profile_id", self.profile),
            cluster=parse(Cluster, self.cluster),
            batch_size=self.request.batch_size,
            options=self.request.options,
            other_profiles=tuple(_profile("other_profile_ids", other) for other in self.other_profiles),
            calibration=self.request.calibration,
        )

    def check(self) -> None:
        """Raises InvalidInputError for documents that do not go together."""
        self.problem()


def _profile(field: str, content: str) -> Profile:
    try:
        return parse(Profile, content)
    except InvalidInputError as error:  # it was stored before the rule was there
        raise InvalidInputError(f"{field}.{error.field}", error.rule, error.value) from error
