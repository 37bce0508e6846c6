"""Hugging Face language models by config, with random weights, cut into embedding, layers and head.

B sequences of S tokens: a chain takes token numbers (B, S) and gives logits (B, S, vocabulary). Layers are the
library's own modules, so that a chain computes what the whole model does, with the whole model's parameter names.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner_service.core.errors import InvalidInputError, MissingDependencyError, require
from worker_agent.models.spec import Spec, Value

ATTENTION = ("sdpa", "eager")

_NOT_OPTIONS = frozenset(
    {
        "add_cross_attention",
        "architectures",
        "dtype",
        "id2label",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "output_hidden_states",
        "return_dict",
        "transformers_version",
        "use_cache",
    }
)
"""Keys of a config that would make another kind of model, or that are set elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """What a language model takes: token numbers below `vocab_size`, at most `positions` of them in a sequence."""

    vocab_size: int
    positions: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """A model of a family, and its blocks: modules of it, or thin modules that call them."""

    name: str
    root: nn.Module
    blocks: tuple[nn.Module, ...]
    tokens: TokenInputs

    @property
    def block_names(self) -> tuple[str, ...]:
        """embedding, layer.0, layer.1, ..., head."""
        return ("embedding", *(f"layer.{i}" for i in range(len(self.blocks) - 2)), "head")


class Gpt2Embedding(nn.Module):
    """Token and position embeddings, with dropout."""

    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding, dropout: nn.Module) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) -> (B, S, hidden)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        return self.dropout(self.tokens(tokens) + self.positions(positions))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One transformer layer with the attention mask, and the rotary embedding where there is one, that it needs."""

    def __init__(self, layer: nn.Module, *, mask: bool, rotary: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.mask = mask
        self.rotary = rotary

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, S, hidden) -> (B, S, hidden)."""
        arguments: dict[str, Any] = {"attention_mask": _causal_mask(hidden) if self.mask else None}
        if self.rotary is not None:
            positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
            arguments["position_embeddings"] = self.rotary(hidden, position_ids=positions)
        result = self.layer(hidden, **arguments)
        output: Tensor = result[0] if isinstance(result, tuple) else result  # a tuple before transformers 5
        return output


def build_family(spec: Spec) -> Family:
    """The model that a SPEC `hf:FAMILY?key=value&...` describes; keys are the family's config keys.

    `attn_implementation` is "sdpa" (default) or "eager". Input and output embeddings are not tied: a shared parameter
    would have to be in two stages. Raises InvalidInputError for a family, key or value that is not possible.
    """
    require(spec.name in _CUTS, "model", f"must be of a known family: {', '.join(sorted(_CUTS))}", spec.name)
    options = dict(spec.options)
    attention = options.pop("attn_implementation", "sdpa")
    require(attention in ATTENTION, "model.attn_implementation", f"must be one of {', '.join(ATTENTION)}", attention)
    root = _build(spec, options, str(attention))
    mask = attention == "eager" and spec.name != "bert"  # sdpa has its own causal form
    config: Any = root.config
    return Family(
        name=spec.name,
        root=root,
        blocks=_CUTS[spec.name](root, mask),
        tokens=TokenInputs(vocab_size=config.vocab_size, positions=config.max_position_embeddings),
    )


def _build(spec: Spec, options: dict[str, Value], attention: str) -> nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers
        from huggingface_hub.errors import StrictDataclassError
    except ImportError as error:
        raise MissingDependencyError("hf: models need transformers: pip install 'pipeplan[worker]'") from error
    transformers.logging.set_verbosity_error()
    _check_options(transformers.AutoConfig.for_model(spec.name), options)
    kind = transformers.AutoModelForMaskedLM if spec.name == "bert" else transformers.AutoModelForCausalLM
    fixed = {"tie_word_embeddings": False, "use_cache": False}
    try:
        config = transformers.AutoConfig.for_model(spec.name, **options | fixed)
        return kind.from_config(config, attn_implementation=attention)  # type: ignore[no-any-return]
    except (StrictDataclassError, ValueError, TypeError, RuntimeError) as error:
        sentence = " ".join(str(error).split()).rstrip(".")
        raise InvalidInputError("model", f"must be possible for {spec.name} ({sentence})", spec.text) from error


def _check_options(config: Any, options: dict[str, Value]) -> None:
    known = (set(config.to_dict()) | set(config.attribute_map)) - _NOT_OPTIONS
    for key, value in options.items():
        require(key in known, f"model.{key}", f"is not a key of {config.model_type}'s config that can be set", value)
    rule = "cannot be true: the embedding and the head would share a parameter, and they may be in different stages"
    require(not options.get("tie_word_embeddings"), "model.tie_word_embeddings", rule, True)


def _causal_mask(hidden: Tensor) -> Tensor:
    """(1, 1, S, S): 0 where a position may look, the lowest number where not."""
    length = hidden.shape[1]
    lowest = torch.finfo(hidden.dtype).min
    return torch.full((1, 1, length, length), lowest, dtype=hidden.dtype, device=hidden.device).triu(diagonal=1)


def _cut_gpt2(root: Any, mask: bool) -> tuple[nn.Module, ...]:
    body = root.transformer
    layers = (Layer(layer, mask=mask) for layer in body.h)
    return (Gpt2Embedding(body.wte, body.wpe, body.drop), *layers, nn.Sequential(body.ln_f, root.lm_head))


def _cut_llama(root: Any, mask: bool) -> tuple[nn.Module, ...]:
    body = root.model
    layers = (Layer(layer, mask=mask, rotary=body.rotary_emb) for layer in body.layers)
    return (body.embed_tokens, *layers, nn.Sequential(body.norm, root.lm_head))


def _cut_bert(root: Any, mask: bool) -> tuple[nn.Module, ...]:
    layers = (Layer(layer, mask=mask) for layer in root.bert.encoder.layer)
    return (root.bert.embeddings, *layers, root.cls)


_CUTS: dict[str, Callable[[Any, bool], tuple[nn.Module, ...]]] = {
    "gpt2": _cut_gpt2,
    "llama": _cut_llama,
    "bert": _cut_bert,
}
