"""Events: what happened to a job or a run, in order, numbered from 1."""

from collections.abc import Iterable, Iterator
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


def events_in(lines: Iterable[str]) -> Iterator[Event]:
    """The events in the lines of a stream of server-sent events; one that is cut off is left out."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            yield Event.model_validate_json("\n".join(data))
            data = []
