"""Posed: a plan's problem by the texts of its documents, which are read where it is solved and nowhere before."""

from dataclasses import dataclass

from planner_service.contract.documents import parse
from planner_service.contract.plans import PlanRequest
from planner_service.core.cluster import Cluster
from planner_service.core.errors import InvalidInputError
from planner_service.core.planner.problem import Problem
from planner_service.core.profile import Profile


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

    def problem(self) -> Problem:
        """The problem. Raises InvalidInputError for documents that do not go together."""
        return Problem(
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
