"""Data: numbered microbatches from a user's factory, and defaults for a model without data."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from pipeplan.errors import InvalidInputError, require, require_count
from worker_agent.models.batches import BatchForm, require_samples
from worker_agent.models.chain import Chain
from worker_agent.models.keywords import KeywordForm
from worker_agent.models.random_data import RandomData
from worker_agent.models.randomness import seed_all, seed_of
from worker_agent.models.samples import Samples
from worker_agent.models.spec import call_factory, has_signature, load_factory, parse_spec, user_code
from worker_agent.models.values import Value, matching_dtype

Microbatch = tuple[Value, Value]
"""(inputs, targets)"""

SEQUENCE_LENGTH = 512
"""The longest sequence that a language model gets by default."""

SAMPLES = 256
MOST_TOKENS = 2**22
"""The number of random samples, unless they have more tokens together."""


class MicrobatchSource:
    """Microbatches numbered from 0: microbatch i holds the samples [i * b, (i + 1) * b), b the microbatch size.

    An object with a length and items is read at i modulo its length. Anything else is iterated up to microbatch i; at
    its end, and for a microbatch before the newest, it starts again. If an iterable cannot start again, as a generator
    cannot, its factory makes a new one. Items are pairs of inputs and targets, or mappings as `form` takes them; in a
    pair the inputs alone may be a mapping.

    The first and the last stage read the data for themselves, and so does a resumed run. Global random numbers that
    the data draws for an item therefore follow from (seed, number of the item): augmentations and shuffles are the same
    everywhere.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        microbatch_size: int,
        name: str,
        form: BatchForm | KeywordForm | None = None,
        seed: int = 0,
        microbatches: int = 0,
    ) -> None:
        self.labels_tokens = False
        """Whether the newest microbatch had inputs by name, and a label for every token."""
        self.names: tuple[str, ...] = ()
        """Of the newest microbatch's inputs, where a module's forward takes them as keyword arguments."""
        self._form = form
        self._make = make
        self._microbatch_size = microbatch_size
        self._name = name
        self._seed = seed
        self._draw_for("its factory")
        self._data: Any = make()
        require(
            isinstance(self._data, Iterable) or self._indexed, "data", "must give an iterable of microbatches", name
        )
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._newest: Microbatch | None = None
        self._require_whole(microbatches)

    def microbatch(self, index: int) -> Microbatch:
        """Inputs and targets of one microbatch. Raises InvalidInputError if they do not have the promised shape."""
        require_count("microbatch", index, at_least=0)
        if self._indexed:
            require(len(self._data) > 0, "data", "must hold at least one microbatch", self._name)
            self._draw_for(index)
            return self._checked(index, self._data[index % len(self._data)])
        if self._newest is not None and index == self._next - 1:
            return self._newest
        if index < self._next:
            self._next = 0
            self._iterator = self._restarted()
        while self._next < index:
            self._following()
        self._newest = self._checked(index, self._following())
        return self._newest

    def _require_whole(self, microbatches: int) -> None:
        """Raises InvalidInputError if one of the first `microbatches` is the short last one of a pass."""
        samples, size = _batched(self._data) if isinstance(self._data, DataLoader) else (0, 1)
        if size == self._microbatch_size and samples % size and microbatches > samples // size:
            rule = (
                f"must have no short microbatch, and the last one of {samples} samples by {size} has {samples % size}: "
                "give the DataLoader drop_last=True"
            )
            raise InvalidInputError("data", rule, self._name)
        if self._indexed and not isinstance(self._data, Samples) and 1 < len(self._data) <= microbatches:
            self.microbatch(len(self._data) - 1)

    @property
    def _indexed(self) -> bool:
        return hasattr(self._data, "__getitem__") and hasattr(self._data, "__len__")

    def _draw_for(self, what: object) -> None:
        seed_all(seed_of(self._seed, "data", what))

    def _restarted(self) -> Iterator[Any]:
        self._draw_for(self._next)
        iterator: Iterator[Any] = iter(self._data)
        if iterator is self._data:
            self._data = self._make()
            iterator = iter(self._data)
        return iterator

    def _following(self) -> Any:
        """The next item, the first one again after the last."""
        self._draw_for(self._next)
        if self._iterator is None:
            self._iterator = iter(self._data)
        ended = object()
        item = next(self._iterator, ended)
        if item is ended:
            self._iterator = self._restarted()
            item = next(self._iterator, ended)
        if item is ended:
            rule = f"must hold microbatch {self._next}: it has ended, and gives nothing when it is started again"
            raise InvalidInputError("data", rule, self._name)
        self._next += 1
        return item

    def _checked(self, index: int, item: Any) -> Microbatch:
        field = f"data.{index}"
        if isinstance(item, Mapping):
            form = self._named(field, item)
            inputs, labels = form.pair(field, item, self._microbatch_size)
            self.labels_tokens = form.labels != "class" and labels.dim() > 1
            return inputs, labels
        pair = isinstance(item, tuple | list) and len(item) == 2
        require(pair, field, "must be a pair of inputs and targets", type(item).__name__)
        targets = self._tensors(f"{field}.targets", item[1])
        if isinstance(item[0], Mapping):
            form = self._named(field, item[0])
            self.labels_tokens = form.labels != "class" and isinstance(targets, Tensor) and targets.dim() > 1
            return form.given(field, item[0], self._microbatch_size), targets
        self.labels_tokens, self.names = False, ()
        named = self._form.names if isinstance(self._form, KeywordForm) else None
        require(not named, field, f"must be a mapping, as the first microbatch: {', '.join(named or ())}", "a pair")
        inputs = self._tensors(f"{field}.inputs", item[0])
        if isinstance(self._form, BatchForm):
            self._form.require_tokens(field, inputs)
        return inputs, targets

    def _named(self, field: str, given: Mapping[Any, Any]) -> BatchForm | KeywordForm:
        """The model's inputs by name. Raises InvalidInputError for a model without named inputs."""
        if self._form is None:
            rule = "must be a pair of inputs and targets, of tensors: this model takes no inputs by name"
            raise InvalidInputError(field, rule, sorted(map(str, given)))
        if isinstance(self._form, KeywordForm):
            self.names = self._form.of(given)
        return self._form

    def _tensors(self, field: str, value: Any) -> Value:
        tensors = (value,) if isinstance(value, Tensor) else value
        fits = isinstance(tensors, tuple | list) and all(isinstance(t, Tensor) for t in tensors)
        require(fits and len(tensors) > 0, field, "must be a tensor or a tuple of tensors", type(value).__name__)
        for tensor in tensors:
            require_samples(field, tensor, self._microbatch_size)
        return value if isinstance(value, Tensor) else tuple(tensors)


def _batched(loader: DataLoader[Any]) -> tuple[int, int]:
    """The samples of a pass that come in batches, the last one perhaps short, and a batch's size.

    (0, 1) where they are unknown, or the loader drops a short one.
    """
    batches = loader.batch_sampler
    stream = isinstance(loader.dataset, IterableDataset)
    by_process = stream and loader.num_workers > 1  # each makes batches of its own samples
    if type(batches) is not BatchSampler or batches.drop_last or by_process:
        return 0, 1
    samples: Any = loader.dataset if stream else batches.sampler
    return (len(samples), batches.batch_size) if hasattr(samples, "__len__") else (0, 1)


def open_data(
    spec: str,
    *,
    microbatch_size: int,
    seed: int,
    form: BatchForm | KeywordForm | None = None,
    microbatches: int = 0,
) -> MicrobatchSource:
    """The microbatches that a SPEC names, for a model that takes inputs by name as `form` says.

    Its factory gets its own options, and `microbatch_size`, `seed` and `named_inputs` (whether the model takes inputs
    and masks by name) if it takes them. Raises InvalidInputError if there is no such factory, its options do not fit,
    its result cannot be iterated, or one of the first `microbatches` is known to be short.
    """
    parsed = parse_spec(spec, field="data")

    def make() -> Any:
        offered: dict[str, object] = {"microbatch_size": microbatch_size, "seed": seed}
        factory = load_factory(parsed, field="data")
        if has_signature(factory) and "named_inputs" in signature(factory).parameters:  # not as one of **options
            offered["named_inputs"] = form is not None and "attention_mask" in form.inputs
        return call_factory(parsed, field="data", **offered)

    return MicrobatchSource(
        make, microbatch_size=microbatch_size, name=spec, form=form, seed=seed, microbatches=microbatches
    )


def moved(value: Value, device: torch.device, dtype: torch.dtype, *, pinned: bool = False) -> Value:
    """A microbatch's tensors on the model's device, real and complex numbers in the model's dtype.

    With `pinned` they go through pinned memory: the GPU copies them in stream order while the host continues.
    """

    def move(tensor: Tensor) -> Tensor:
        dtype_there = matching_dtype(tensor, dtype)
        if not pinned or tensor.device.type != "cpu":
            return tensor.to(device, dtype_there)
        return tensor.to(dtype=dtype_there).pin_memory().to(device, non_blocking=True)

    return move(value) if isinstance(value, Tensor) else tuple(map(move, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultFeed:
    """SPECs of data and loss (None: the default loss), and a short description."""

    data: str
    loss: str | None
    description: str


def in_blocks(chain: Chain, data: str, *, microbatch_size: int, seed: int, dtype: torch.dtype) -> Chain:
    """The chain; a module of the user's own is cut with the inputs of this data's first microbatch.

    Raises InvalidInputError for data that gives none, and for a module that cannot be cut.
    """
    if not chain.uncut:
        return chain
    source = open_data(data, microbatch_size=microbatch_size, seed=seed, form=chain.batches)
    with user_code(f"microbatch 1 of the data {data}"):
        inputs, _ = source.microbatch(0)
    inputs = moved(inputs, torch.device("cpu"), dtype)
    return chain.cut(inputs if isinstance(inputs, tuple) else (inputs,), source.names)


def length_of(chain: Chain, sequence_length: int | None) -> int:
    """The tokens of a language model's sequences: as requested, else its number of positions, up to a limit.

    Raises InvalidInputError for a length that the model does not take, and for a chain that takes no tokens.
    """
    require(chain.tokens is not None, "model", "must be a language model, which takes sequences of tokens", chain.spec)
    positions = chain.tokens.positions if chain.tokens else 0
    length = min(positions, SEQUENCE_LENGTH) if sequence_length is None else sequence_length
    rule = f"must be at most the {positions} positions of the model's config"
    require(length <= positions, "sequence_length", rule, length)
    return length


def default_feed(chain: Chain, sequence_length: int | None = None) -> DefaultFeed:
    """Random data that a chain can take.

    A language model gets sequences of random tokens, of the requested length, else of its number of positions, at most
    SEQUENCE_LENGTH. A chain whose first block `takes` a RandomData gets that. One that starts with a linear
    layer gets normally distributed features and a loss that needs no targets. Raises InvalidInputError for any other
    chain, and for a length that the model does not take.
    """
    if chain.tokens is not None:
        length = length_of(chain, sequence_length)
        samples = max(1, min(SAMPLES, MOST_TOKENS // length))
        query = f"vocab_size={chain.tokens.vocab_size}&sequence_length={length}&samples={samples}"
        return DefaultFeed(
            data=f"worker_agent.models.text:random_tokens?{query}",
            loss=None,
            description=f"random tokens, {length} a sequence",
        )
    form, taken = chain.batches, getattr(chain.root, "config", None)
    if isinstance(form, BatchForm) and form.decodes and form.main == "input_ids":
        length = min(form.positions, SEQUENCE_LENGTH) if sequence_length is None else sequence_length
        rule = f"must be at most the {form.positions} positions of the model's config"
        require(length <= form.positions, "sequence_length", rule, length)
        query = f"vocabulary={getattr(taken, 'vocab_size', 2)}&length={length}"
        return DefaultFeed(
            data=f"preset:random_translations?{query}", loss=None, description=f"random sentences, {length} tokens each"
        )
    rule = "is for language models, which take sequences of tokens"
    require(sequence_length is None, "sequence_length", rule, sequence_length)
    takes = getattr(chain.blocks[0], "takes", None)
    if isinstance(takes, RandomData):
        return DefaultFeed(data=takes.data, loss=None, description=takes.description)
    first = next(module for module in chain.blocks[0].modules() if not list(module.children()))
    if isinstance(first, nn.Linear):
        return DefaultFeed(
            data=f"worker_agent.models.presets:random_features?width={first.in_features}",
            loss="worker_agent.models.losses:mean_of_squares",
            description=f"random features, {first.in_features} a sample",
        )
    rule = f"must be named (--data) for a model that starts with {type(first).__name__}, whose inputs are unknown"
    raise InvalidInputError("data", rule, None)
