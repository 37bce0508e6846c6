"""Configs: the library's model for a Hugging Face config, and the parts of the config that it leaves out.

Of a config of several parts only the language model is used: towers for images and sound are left out, by name. A
family that the library does not know is replaced by the one of its `architectures`, or by one with its layers
(`_ALIKE`). Code that a config names (`auto_map`) never runs.
"""

import os
from collections.abc import Mapping
from typing import Any, Literal

from pipeplan.documents.names import MAX_LENGTH, Spec, query_of
from pipeplan.errors import InvalidInputError, MissingDependencyError
from worker_agent.models.folders import QUANTISED

TASKS: dict[str, Literal["next", "same", "class"]] = {
    "Seq2SeqLM": "same",
    "SpeechSeq2Seq": "same",
    "MaskedLM": "same",
    "CausalLM": "next",
    "ImageClassification": "class",
}
"""A family's task: the first of these that it has; and the position of its labels (`BatchForm`).

Models of masked language can decode as well, and so can parts of those with an encoder.
"""

NOT_OPTIONS = frozenset(
    {
        *("add_cross_attention", "architectures", "attn_implementation", "auto_map", "dtype", "id2label", "is_decoder"),
        *("is_encoder_decoder", "label2id", "output_hidden_states", "return_dict", "torch_dtype"),
        *("transformers_version", "use_cache"),
    }
)
"""Keys of a config that would make another kind of model, or that are set by other means."""

_TEXT = ("text_config", "llm_config", "language_config")
"""Where configs of several parts have their language model."""

_ALIKE = {
    "glm4v": "glm4",
    "glm4v_moe": "glm4_moe",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "minimax_m1": "minimax",
    "minimax_text_01": "minimax",
    "qwen2_5": "qwen2",
    "qwen2_5_omni": "qwen2",
}
"""Families that have another one's layers: those that the library lacks, or has for texts with images alone."""

_NO_KIND = frozenset({"text", "vl"})
"""Parts of a family's name that say nothing about its layers."""

_AHEAD = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
"""Keys that count the layers of multi-token prediction, which the library's models do not have."""


def library() -> None:
    """Has transformers imported, silent and without a network. Raises MissingDependencyError where it is missing."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError("hf: models need transformers: pip install 'pipeplan[worker]'") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def language_model(name: str, content: Mapping[str, Any]) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """The library's family of a config of family `name`, the config's keys for it, and sentences on left-out parts.

    A family that the library has no model for keeps its name.
    """
    left_out: list[str] = []
    family, keys = name, dict(content)
    part = next((key for key in _TEXT if isinstance(content.get(key), dict) and content[key]), None)
    if part is not None and _task(name) != "ImageClassification":
        keys = {"tie_word_embeddings": content["tie_word_embeddings"]} if "tie_word_embeddings" in content else {}
        keys |= content[part]
        inner = _known_families()[name].sub_configs.get(part) if name in _known_families() else None
        family = str(keys.pop("model_type", None) or getattr(inner, "model_type", name))
        others = [
            key
            for key, value in content.items()
            if key.endswith("_config") and value and key not in (*_TEXT, *QUANTISED)
        ]
        left_out += [f"the model's {key} is left out: the estimate is of the language model alone" for key in others]
    elif content and _task(name) is None and name in _known_families():  # of several parts, with its keys in one
        of_texts = config_of(name, keys, {}).get_text_config(decoder=True)
        if of_texts.model_type != name:
            family, keys = of_texts.model_type, of_texts.to_dict()
            left_out.append("the model's vision_config is left out: the estimate is of the language model alone")
    known = family if _task(family) else _alike(family, keys.get("architectures") or content.get("architectures"))
    if known != family:
        left_out.append(f"{family} is taken as {known}, which has its layers")
    ahead = next((key for key in _AHEAD if isinstance(keys.get(key), int) and keys[key] > 0), None)
    if ahead is not None:
        left_out.append(f"the layers of multi-token prediction ({ahead} {keys[ahead]}) are left out")
    if known == "minimax" and isinstance(keys.get("attn_type_list"), list):
        keys["layer_types"] = ["full_attention" if kind else "linear_attention" for kind in keys["attn_type_list"]]
    keys = {key: value for key, value in keys.items() if key != "model_type" and not key.startswith("_")}
    return known, {key: value for key, value in keys.items() if key not in (*NOT_OPTIONS, *QUANTISED)}, tuple(left_out)


def _known_families() -> Any:
    """The library's configs, by family."""
    import transformers

    return transformers.CONFIG_MAPPING


def _task(name: str) -> str | None:
    """The task of the library's model of a family; None for a family without a model."""
    kinds_of_task = (task for task in TASKS if name in _known_families() and kinds(task, _known_families()[name]))
    return next(kinds_of_task, None)


def _alike(family: str, architectures: object) -> str:
    """The family of which the library has a model: by the model's class, the table, or the rest of the name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = architectures if isinstance(architectures, list) else []
    by_class = [known for known, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if class_name in named]
    short = "_".join(part for part in family.split("_") if part not in _NO_KIND)
    found = (each for each in (*by_class, _ALIKE.get(family), _ALIKE.get(short), short) if each and _task(each))
    return next(found, family)


def kinds(task: str, config: type) -> tuple[type, ...]:
    """The library's models of a config for a task: none, or several of which the first is meant."""
    import transformers

    found = getattr(transformers, f"AutoModelFor{task}")._model_mapping
    models: Any = found.get(config, ())
    return models if isinstance(models, tuple) else (models,)


def config_of(name: str, found: dict[str, Any], options: dict[str, Any]) -> Any:
    """A family's config from a file's keys and the SPEC's own options, which take precedence."""
    import transformers

    return transformers.AutoConfig.for_model(name, **found | options | {"use_cache": False})


def known_keys(config: Any) -> set[str]:
    """The keys of a family's config that a SPEC can set."""
    others = {"num_labels", "tie_word_embeddings"}
    if getattr(config, "is_encoder_decoder", False):
        others |= {"decoder_start_token_id"}
    if hasattr(config, "num_key_value_heads"):
        others |= {"head_dim"}  # some families' attention reads it, though their configs do not have it
    return (set(config.to_dict()) | set(config.attribute_map) | others) - NOT_OPTIONS


def without_path(spec: Spec, name: str, found: dict[str, Any]) -> str:
    """A SPEC of the same model that names no file, if there is one: other nodes then need no copy of the file."""
    if spec.path is None or "num_labels" in found:
        return spec.text
    options = dict(spec.options)
    attention = {key: options.pop(key) for key in ("attn_implementation",) if key in options}
    usual, whole = config_of(name, {}, {"tie_word_embeddings": False}), config_of(name, found, options).to_dict()
    known, default = known_keys(usual), usual.to_dict()
    asked = found.keys() | spec.options.keys()
    keys = {k: v for k, v in whole.items() if k in known and (k in asked or k not in default or v != default[k])}
    # as requested: T5's config object always says tied
    tied = (found | options).get("tie_word_embeddings", whole.get("tie_word_embeddings"))
    if tied or "tie_word_embeddings" in asked:
        keys["tie_word_embeddings"] = tied
    try:
        text = f"hf:{name}?{query_of(keys | attention)}"
    except InvalidInputError:
        return spec.text
    same = config_of(name, keys, {"tie_word_embeddings": False} | keys).to_dict()
    return text if len(text) <= MAX_LENGTH and all(whole[key] == same[key] for key in same) else spec.text
