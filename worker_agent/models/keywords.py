"""Keywords: a microbatch as a mapping, for a module of one's own whose forward takes its inputs by name.

The first microbatch says which inputs there are. All others have the same. The forward gets them as keyword arguments,
and never the labels: these are the targets.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pipeplan.errors import require
from worker_agent.models.batches import IGNORED, require_samples

_PLACES = ("next", "same")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeywordForm:
    """The named inputs of a module's forward.

    `inputs` are the names that it has, `others` whether it takes any. `names` are those of all microbatches, in order;
    None before the first one. `labels` is the module's attribute of this name: a label is of the token that comes
    "next" after its place, or of the "same" place.
    """

    model: str
    inputs: tuple[str, ...]
    others: bool
    labels: str | None
    names: tuple[str, ...] | None = None

    def of(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of a batch's inputs, in the order of the forward's parameters."""
        given = [str(name) for name in batch if name != "labels"]
        known = [name for name in self.inputs if name in given]
        return (*known, *sorted(set(given) - set(known)))

    def pair(self, field: str, batch: Mapping[str, Any], microbatch_size: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """A batch's inputs and targets. Raises InvalidInputError with the name of the wrong tensor."""
        require("labels" in batch, f"{field}.labels", "must be in every batch that is a mapping", sorted(batch))
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        given = self.given(field, inputs, microbatch_size)
        labels: Tensor = batch["labels"]
        require_samples(f"{field}.labels", labels, microbatch_size)
        tokens = labels.dim() > 1 and not labels.is_floating_point()
        if tokens:
            rule = (
                f"must be said by an attribute `labels` of the module: {' or '.join(map(repr, _PLACES))}: whether a "
                "label is that of the token that comes next (as of causal language models) or of the same place"
            )
            require(self.labels in _PLACES, f"model.labels of {self.model}", rule, self.labels)
        if tokens and self.labels == "next":
            labels = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()
        return given, labels

    def given(self, field: str, batch: Mapping[str, Any], microbatch_size: int) -> tuple[Tensor, ...]:
        """A batch's inputs, in order. Raises InvalidInputError for others than it takes, or than came first."""
        rule = f"must be one of those that {self.model}.forward takes: {', '.join(self.inputs)}"
        for name, value in batch.items():
            require(self.others or name in self.inputs, f"{field}.{name}", rule, name)
            require_samples(f"{field}.{name}", value, microbatch_size)
        names = self.of(batch)
        rule = f"must have the inputs of the first microbatch: {', '.join(self.names or ()) or 'by position'}"
        require(self.names is None or names == self.names, field, rule, names)
        require(len(names) > 0, field, "must hold an input beside the labels", sorted(batch))
        return tuple(batch[name] for name in names)


def keyword_form(root: nn.Module) -> KeywordForm:
    """A module's named inputs."""
    parameters = signature(root.forward).parameters.values()
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return KeywordForm(
        model=type(root).__name__,
        inputs=tuple(p.name for p in parameters if p.kind in kinds and p.name != "labels"),
        others=any(p.kind is Parameter.VAR_KEYWORD for p in parameters),
        labels=getattr(root, "labels", None),
    )
