"""Own weights: a stage's blocks compute with the weights that they hold, those of the version in use.

A block may keep another one's weight in a list, or a view of its own. Such a weight is not among the parameters of its
stage: no version of it is put there, no gradient is taken from it, and its copy on another stage is never updated.
"""

from collections.abc import Iterable, Mapping, Sequence
from weakref import ref

from torch import Tensor, nn

from pipeplan.errors import RunFailedError
from worker_agent.models.values import leaves_of

MOST_LOOKS = 4
"""The upper bound on versions whose graphs are checked: a schedule may keep several, which differ."""


class OwnWeights:
    """The weights that the blocks of a stage hold, among `weights`: those of the whole model, by their names."""

    def __init__(self, blocks: Sequence[nn.Module], weights: Mapping[str, nn.Parameter]) -> None:
        self._weights = {id(weight): (name, ref(weight)) for name, weight in weights.items()}
        held = [(m._parameters, name) for block in blocks for m in block.modules() for name in m._parameters]
        self._places = [(where, name) for where, name in held if (p := where[name]) is not None and p.requires_grad]
        self._looked_at: dict[str, set[int]] = {}

    def require(self, outputs: Iterable[Tensor], blocks: str) -> None:
        """Raises RunFailedError where a forward of these blocks has computed with another leaf.

        It looks at the graph once for each version, as far as MOST_LOOKS.
        """
        where, name = self._places[0] if self._places else ({}, "")
        version, looked_at = id(where.get(name)), self._looked_at.setdefault(blocks, set())
        if version in looked_at or len(looked_at) == MOST_LOOKS:
            return
        looked_at.add(version)
        own = {id(held[key]) for held, key in self._places}
        for leaf in leaves_of(outputs):
            name, known = self._weights.get(id(leaf), ("", None))
            if known is not None and known() is leaf and id(leaf) not in own:
                raise RunFailedError(
                    f"{blocks} must hold the weight {name} as a parameter to compute with it: versions and gradients "
                    "of a weight that is kept in another way are not followed"
                )
