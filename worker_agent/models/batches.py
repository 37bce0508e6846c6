"""Batches: a microbatch as Hugging Face's collators make it, a mapping of tensors by name, and its use.

    input_ids (B, S), attention_mask (B, S), position_ids (B, S), token_type_ids (B, S), labels (B, S)
    decoder_input_ids (B, T), decoder_attention_mask (B, T), labels (B, T)      of an encoder and a decoder
    pixel_values (B, ...) or input_features (B, ...), labels

The first block gets the inputs in the order of the model's `BatchForm`, with an empty tensor for each that the batch
does not have. The targets are the labels, at the positions that predict them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from pipeplan.errors import InvalidInputError, require
from worker_agent.models.values import is_dense, kind_of

IGNORED = -100
"""The label of a place that the loss leaves out."""

MASKS = ("attention_mask", "decoder_attention_mask")
KNOWN = ("attention_mask", "position_ids", "token_type_ids", "decoder_input_ids", "decoder_attention_mask")
"""The inputs besides the main one that a batch may have, if the model takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """A language model's inputs: token numbers below `vocab_size`, at most `positions` of them in a sequence."""

    vocab_size: int
    positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForm:
    """A model's inputs by name. `inputs` begin with the main one; a batch has all that are `required`.

    `labels` are the predicted tokens: the "next" one of each position, the one of the "same" position, or a "class" for
    each sample. `positions` is the greatest length of a sequence. If only labels are given, the model's `shift` makes a
    decoder's inputs of them; without it, `start` is their first token and `pad` their padding.
    """

    model: str
    inputs: tuple[str, ...]
    required: tuple[str, ...]
    labels: Literal["next", "same", "class"]
    positions: int
    start: int | None = None
    pad: int | None = None
    shift: Callable[[Tensor], Tensor] | None = field(default=None, compare=False, repr=False)

    @property
    def main(self) -> str:
        return self.inputs[0]

    @property
    def decodes(self) -> bool:
        return "decoder_input_ids" in self.required

    def completed(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The data's inputs, with empty tensors for those that it does not have."""
        if len(values) == len(self.inputs):
            return values
        if len(values) != len(self.required):
            wanted = ", ".join(self.required)
            raise TypeError(f"{self.model} takes {wanted}, or a mapping of inputs by name; it was given {len(values)}")
        given = dict(zip(self.required, values, strict=True))
        return tuple(given.get(name, values[0].new_empty(0)) for name in self.inputs)

    def require_tokens(self, field: str, inputs: Tensor | tuple[Tensor, ...]) -> None:
        """Raises InvalidInputError for a pair's tokens of a wrong kind, shape or length; of how many inputs it may have
        says `completed`.
        """
        values = (inputs,) if isinstance(inputs, Tensor) else inputs
        names = next((each for each in (self.inputs, self.required) if len(each) == len(values)), ())
        given = {name: value for name, value in zip(names, values, strict=False) if value.numel()}
        for name in ("input_ids", "decoder_input_ids"):
            if name in given:
                self._require_tokens(f"{field}.{name}", name, given)

    def pair(self, field: str, batch: Mapping[str, Any], microbatch_size: int) -> tuple[Any, Tensor]:
        """A batch's inputs and targets. Raises InvalidInputError with the name of the input that breaks a rule."""
        labels = batch.get("labels")
        require("labels" in batch, f"{field}.labels", "must be in every batch that is a mapping", sorted(batch))
        require_samples(f"{field}.labels", labels, microbatch_size)
        assert isinstance(labels, Tensor)
        whole = not labels.is_floating_point() and not labels.is_complex()
        require(whole, f"{field}.labels", "must be whole numbers", labels.dtype)
        given = {name: value for name, value in batch.items() if name != "labels"}
        if self.decodes and "decoder_input_ids" not in given:
            given["decoder_input_ids"] = self._begun(field, labels)
        inputs = self.given(field, given, microbatch_size)
        if self.labels == "class":
            return inputs, labels
        tokens = given["decoder_input_ids" if self.decodes else self.main]
        rule = f"must have the shape of the tokens that predict them, {tuple(tokens.shape)}"
        require(labels.shape == tokens.shape, f"{field}.labels", rule, tuple(labels.shape))
        shifted = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()
        return inputs, shifted if self.labels == "next" else labels

    def given(self, field: str, batch: Mapping[str, Any], microbatch_size: int) -> Any:
        """A batch's inputs, as the first block takes them: one tensor, or a tuple.

        A mask that masks nothing is left out, unless positions are given: without a mask the library takes positions
        that begin again for packed samples.
        """
        rule = f"must be one of those that {self.model} takes: {', '.join((*self.inputs, 'labels'))}"
        for name, value in batch.items():
            require(name in self.inputs, f"{field}.{name}", rule, name)
            require_samples(f"{field}.{name}", value, microbatch_size)
        for name in self.required:
            require(name in batch, f"{field}.{name}", "must be in every batch that is a mapping", sorted(batch))
        given: dict[str, Tensor] = dict(batch)
        for name, value in given.items():
            if name == self.main and name != "input_ids":
                require(value.is_floating_point(), f"{field}.{name}", "must be real numbers", value.dtype)
            else:
                self._require_tokens(f"{field}.{name}", name, given)
        for name in MASKS:
            if name in given and "position_ids" not in given and bool((given[name] == 1).all()):
                del given[name]
        if set(given) == set(self.required):
            values = tuple(given[name] for name in self.required)
            return values[0] if len(values) == 1 else values
        return tuple(given.get(name, torch.empty(0, dtype=torch.int64)) for name in self.inputs)

    def _require_tokens(self, field: str, name: str, given: Mapping[str, Tensor]) -> None:
        """Raises InvalidInputError for tokens, or inputs that accompany them, of a wrong kind, shape or range."""
        value = given[name]
        whole = not value.is_floating_point() and not value.is_complex()
        require(whole, field, "must be whole numbers", value.dtype)
        require(value.dim() == 2, field, "must be of shape (samples, tokens)", tuple(value.shape))
        rule = f"must have at most {self.positions} tokens, the positions of the model's config"
        require(value.shape[1] <= self.positions, field, rule, value.shape[1])
        along = given["decoder_input_ids" if name.startswith("decoder_") else self.main]
        if along.dim() == 2:
            rule = f"must have the shape of the tokens, {tuple(along.shape)}"
            require(value.shape == along.shape, field, rule, tuple(value.shape))
        if name in MASKS:
            wrong = value[(value != 0) & (value != 1)]
            rule = "must hold 1 where a token is, and 0 where none is"
            require(wrong.numel() == 0, field, rule, wrong[:1].tolist())
        if name == "position_ids":
            wrong = value[(value < 0) | (value >= self.positions)]
            rule = f"must be from 0 to below the {self.positions} positions of the model's config"
            require(wrong.numel() == 0, field, rule, wrong[:1].tolist())

    def _begun(self, field: str, labels: Tensor) -> Tensor:
        """A decoder's inputs: the labels, each a place later, after the token that begins a sequence."""
        rule = "must be given: the model's config has no decoder_start_token_id and pad_token_id to make them of labels"
        if self.shift is not None:
            try:
                return self.shift(labels)
            except (AttributeError, ValueError, TypeError, RuntimeError) as error:
                raise InvalidInputError(f"{field}.decoder_input_ids", rule, None) from error
        require(self.start is not None and self.pad is not None, f"{field}.decoder_input_ids", rule, None)
        begun = functional.pad(labels, (1, 0), value=self.start or 0)[:, :-1]
        return begun.masked_fill(begun == IGNORED, self.pad or 0)


def require_samples(field: str, value: Any, microbatch_size: int) -> None:
    """Raises InvalidInputError unless this is a dense tensor with that number of samples."""
    require(isinstance(value, Tensor), field, "must be a tensor", type(value).__name__)
    require(is_dense(value), field, "must be a dense tensor", kind_of(value))
    shape = tuple(value.shape)
    rule = f"must have the microbatch size {microbatch_size} as its first dimension: the data's factory should take it"
    rule = f"{rule}, as microbatch_size, and make batches of that size"
    if shape and shape[0] < microbatch_size:
        rule = f"{rule}; a DataLoader leaves a short last one out with drop_last=True"
    require(shape[:1] == (microbatch_size,), field, rule, shape)


def probes(form: BatchForm, main: tuple[int, ...], taken: set[int]) -> dict[str, Tensor]:
    """A short batch of every input, of sizes that are not the model's own. `main` is one sample of the main input."""
    free = [size for size in (3, 5, 7, 6, 9, 11, 13, 4, 2, 8, 10) if size not in taken]
    fits = [size for size in free if size <= form.positions]
    samples, length, decoder = (*fits, 3, 5, 4)[:3]
    tokens, begun = torch.zeros(samples, length, dtype=torch.int64), torch.zeros(samples, decoder, dtype=torch.int64)
    # the last place is filled: without one the models would make no mask
    mask, decoder_mask = torch.ones_like(tokens), torch.ones_like(begun)
    mask[0, -1] = decoder_mask[0, -1] = 0
    given = {
        "input_ids": tokens,
        "attention_mask": mask,
        "position_ids": torch.arange(length).expand(samples, -1),
        "token_type_ids": tokens,
        "decoder_input_ids": begun,
        "decoder_attention_mask": decoder_mask,
    }
    if form.main != "input_ids":
        given[form.main] = torch.zeros(samples, *main)
    return {name: given[name] for name in form.inputs}
