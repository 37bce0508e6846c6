"""Events: what happened to a job or a run, in order, numbered from 1."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SubjectKind = Literal["job", "run"]

ENDINGS = frozenset({"succeeded", "failed", "cancelled", "dead"})
"""The kinds of event after which there are no more."""


class Event(BaseModel):
    """One event. `kind` is the state that the subject came to, or "progress"; `data` tells what changed with it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int = Field(description="by subject, from 1 on without gaps: the id of the server-sent event")
    kind: str
    data: dict[str, Any]
    created_at: datetime

    @property
    def ends(self) -> bool:
        """Whether it is the subject's last."""
        return self.kind in ENDINGS
