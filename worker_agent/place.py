"""Place: where a node stands among several that run together."""

from dataclasses import dataclass
from typing import ClassVar

from pipeplan.documents.profile import STRICT
from pipeplan.errors import RunFailedError


class OtherNodeError(RunFailedError):
    """This node's part ended because of another node, which may say why, or is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node's place among several that run together. Node rank 0 offers the address and the port; others go there.

    `meeting` names this attempt: a straggler of an earlier one that comes to the same port finds nothing of it there.
    A node waits `meeting_s` for the others: by default as long as those need that are up, to import torch.
    """

    node_rank: int
    nodes: int
    address: str
    port: int
    meeting: str
    meeting_s: int = 120

    __pydantic_config__: ClassVar = STRICT

    def ranks(self, processes: int) -> range:
        """The ranks of this node's processes."""
        return range(self.node_rank * processes, (self.node_rank + 1) * processes)
