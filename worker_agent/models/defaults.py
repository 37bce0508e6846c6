"""Defaults: data for a model that was named without any, so that it can be profiled."""

from dataclasses import dataclass

from torch import nn

from pipeplan.errors import InvalidInputError
from worker_agent.models.chain import Chain

SEQUENCE_LENGTH = 512
"""The longest sequence that a language model gets by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultFeed:
    """SPECs of data and loss (None: the default loss), and what they are in a few words."""

    data: str
    loss: str | None
    description: str


def default_feed(chain: Chain) -> DefaultFeed:
    """Random data that a chain takes.

    A language model gets random tokens, as many as it has positions but at most SEQUENCE_LENGTH a sequence; a chain
    that starts with a linear layer gets normal features, and a loss that needs no targets. Raises InvalidInputError
    for any other.
    """
    if chain.tokens is not None:
        length = min(chain.tokens.positions, SEQUENCE_LENGTH)
        query = f"vocab_size={chain.tokens.vocab_size}&sequence_length={length}"
        return DefaultFeed(
            data=f"worker_agent.models.text:random_tokens?{query}",
            loss=None,
            description=f"random tokens, {length} a sequence",
        )
    first = next(module for module in chain.blocks[0].modules() if not list(module.children()))
    if isinstance(first, nn.Linear):
        return DefaultFeed(
            data=f"worker_agent.models.presets:random_features?width={first.in_features}",
            loss="worker_agent.models.losses:mean_of_squares",
            description=f"random features, {first.in_features} a sample",
        )
    rule = f"must be named (--data) for a model that starts with {type(first).__name__}, whose inputs are unknown"
    raise InvalidInputError("data", rule, None)
