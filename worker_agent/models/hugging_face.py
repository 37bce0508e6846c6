"""Hugging Face models by config, cut into embedding, layers and head (`cut`). They are built empty (`materialise`).

B sequences of S tokens: a chain takes token numbers (B, S) and gives logits (B, S, vocabulary); of images it takes
pixels. Layers are the library's own modules: a chain computes what the whole model does, and has its parameter names.
"""

import sys
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from pipeplan.documents.names import FAMILIES, Spec
from pipeplan.errors import InvalidInputError, not_one_of, require
from worker_agent.models.batches import KNOWN, BatchForm, TokenInputs, probes
from worker_agent.models.blocks import Chain
from worker_agent.models.configs import TASKS, config_of, kinds, known_keys, language_model, library, without_path
from worker_agent.models.cut import find_cuts
from worker_agent.models.flow import FACTORY, LAYER_DROPS, refuse_unless
from worker_agent.models.folders import read_config, weight_files
from worker_agent.models.fused import SPARSE, WINDOWED, windowed_attention
from worker_agent.models.layers import Cuts
from worker_agent.models.materialise import Contents, build_empty
from worker_agent.models.recipe import Constructors
from worker_agent.models.scans import count_without_contents
from worker_agent.models.segments import Flows, part_names, segments
from worker_agent.models.tensor_plan import tensor_plan

ATTENTION = ("sdpa", "eager")

MOST_POSITIONS = 2**31 - 1
"""The upper bound on a sequence's tokens for a model without a limit."""

IMAGE_SIZE = 224
"""The size of images if a model takes any."""

_UNSHIFTED = frozenset({"cpmant", "trocr", "xlnet"})
"""Families for the next token whose own loss takes labels as they are, each of the same place."""

_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention")
"""Keys of configs whose layers see less than longer sequences."""

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
"""Sizes that libraries and models divide by, or loop over: their own errors do not name them."""

LIBRARY_ERRORS = (
    *(ValueError, TypeError, RuntimeError, LookupError),
    *(ArithmeticError, AttributeError, ImportError, AssertionError),
)
"""The library's errors for a config without a valid model."""


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


def build_family(spec: Spec, *, seed: int = 0, dtype: torch.dtype = torch.float32, fused: bool = False) -> Chain:
    """The model that a SPEC `hf:FAMILY?key=value&...` or `hf:PATH?key=value&...` describes.

    Keys are the family's config keys. `attn_implementation` is "sdpa" (default, where the family has it) or "eager".
    Weights are those of a folder that has some, and random otherwise. Input and output embeddings are tied as a file or
    folder says, which means the family's own default where it says nothing; those of a family without a file only if
    the SPEC says so. With `fused` attention is `windowed_attention` where the SPEC leaves it open and the model lets it
    be chosen: for counting. Raises InvalidInputError for a family, file, key or value that is not possible, and for a
    model that cannot be cut.
    """
    options: dict[str, Any] = dict(spec.options)
    attention = options.pop("attn_implementation", None)
    rule = f"must be one of {', '.join(ATTENTION)}"
    require(attention is None or attention in ATTENTION, "model.attn_implementation", rule, attention)
    content = {} if spec.path is None else read_config(Path(spec.path))
    files = weight_files(Path(spec.path), content) if spec.path and Path(spec.path).is_dir() else ()
    labels = content.get("id2label")
    library()
    if spec.path is None:
        options.setdefault("tie_word_embeddings", False)
    name, found, left_out = language_model(str(content.pop("model_type", spec.name)), content)
    found |= {"num_labels": len(labels)} if isinstance(labels, dict) else {}
    make = partial(_build, name, found, options, attention, spec.text, fused=fused and attention is None)
    root = build_empty(make)
    config: Any = root.config
    form = _batch_form(name, root)
    drops = _without_drops(root)

    def empty() -> Any:
        made = build_empty(make)
        _without_drops(made)
        return made

    modules = list(root.modules())
    with unset_fake_temporarily():  # the watched forward needs the values of positions
        sizes = {size for tensor in root.state_dict().values() for size in tensor.shape}
        sizes |= {value for value in config.to_dict().values() if type(value) is int}
        flows = Flows(root, empty, form, probes(form, _sample(root), sizes), drops)
        quick = None if drops or form.decodes else _quick(root if next(root.parameters()).is_meta else empty(), form)
    blocks: tuple[nn.Module, ...] | None = quick.blocks(root) if quick else None
    if blocks and name == "gpt2":  # its embeddings can be shared among devices, which the model's own forward cannot
        body: Any = root.transformer
        blocks = (Gpt2Embedding(body.wte, body.wpe, body.drop), *blocks[1:])
    segmented = segments(flows, blocks)
    refuse_unless(
        modules == list(root.modules()), "have the same modules for every length of its input", type(root).__name__
    )
    shareable = config._attn_implementation in ("sdpa", WINDOWED, SPARSE)
    takes_tokens = form.inputs[0] == "input_ids" and not form.decodes
    tokens = (
        TokenInputs(vocab_size=_of_config(config, "vocab_size"), positions=form.positions) if takes_tokens else None
    )
    return Chain(
        name=name,
        spec=spec.text if files else without_path(spec, name, found),
        blocks=segmented,
        block_names=part_names(flows.of(frozenset(form.required))),
        root=root,
        tokens=tokens,
        batches=form,
        sharding=tensor_plan(name, root, cut=quick is not None, one_kernel=shareable) if takes_tokens else None,
        contents=Contents(root=root, seed=seed, dtype=dtype, files=files, constructors=Constructors(make, seed)),
        left_out=left_out,
    )


def _quick(root: Any, form: BatchForm) -> Cuts | None:
    """Blocks that make masks and positions themselves, if only one tensor is to cross a cut."""
    keys = root.config.to_dict()  # an attribute may be an error: a layer's own
    for key in _WINDOWS if root.config._attn_implementation not in (WINDOWED, SPARSE) else ():
        window = keys.get(key)
        if isinstance(window, int) and window and window < form.positions:
            return None
    main = form.inputs[0]
    given = torch.zeros(2, 5, dtype=torch.int64) if main == "input_ids" else torch.zeros(2, *_sample(root))
    try:
        return find_cuts(root, {main: given})
    except InvalidInputError:
        return None


def _batch_form(name: str, root: Any) -> BatchForm:
    """A model's inputs by name."""
    main, config = root.main_input_name, root.config
    rule = f"must take input_ids, pixel_values or input_features, {FACTORY}"
    require(main in ("input_ids", "pixel_values", "input_features"), "model", rule, main)
    decodes = bool(getattr(config, "is_encoder_decoder", False))
    positions = getattr(config, "max_position_embeddings", None)
    positions = MOST_POSITIONS if positions is None or positions < 1 else positions  # XLNet's is -1
    if decodes and main != "input_ids":
        positions = getattr(config, "max_target_positions", None) or positions
    task = next((task for task in TASKS if type(root) in kinds(task, type(config))), None)
    if task is None:
        raise InvalidInputError("model", f"must be a model of one part, {FACTORY}", type(root).__name__)
    return BatchForm(
        model=name,
        inputs=(main, *(key for key in KNOWN if key in signature(root.forward).parameters)),
        required=(main, "decoder_input_ids") if decodes else (main,),
        labels="same" if name in _UNSHIFTED else TASKS[task],
        positions=positions,
        start=getattr(config, "decoder_start_token_id", None),
        pad=getattr(config, "pad_token_id", None),
        shift=getattr(root, "prepare_decoder_input_ids_from_labels", None),
    )


def _sample(root: Any) -> tuple[int, ...]:
    """The shape of one sample of a model's main input; any for tokens."""
    config = root.config
    if root.main_input_name == "input_features":
        length = _of_config(config, "max_source_positions") * 2  # its two convolutions halve it
        return _of_config(config, "num_mel_bins"), length
    if root.main_input_name == "pixel_values":
        images = getattr(config, "vision_config", config)  # of a model with a part for texts as well
        size = getattr(images, "image_size", IMAGE_SIZE)
        height, width = (size, size) if isinstance(size, int) else size
        return _of_config(images, "num_channels"), height, width
    return ()


def _of_config(config: Any, key: str) -> int:
    """A number of a config, or of its part for texts. Raises InvalidInputError where there is none."""
    number = getattr(config, key, getattr(config.get_text_config(), key, None))
    rule = f"must have a whole number as {key} in its config, {FACTORY}"
    require(isinstance(number, int), "model", rule, type(config).__name__)
    return int(number)  # type: ignore[arg-type]


def _without_drops(root: Any) -> dict[str, float]:
    """Stops a model from skipping layers itself; returns how probable each layer's block is to skip it, by name."""
    drops: dict[str, float] = {}
    for prefix, module in root.named_modules():
        probability = next((p for p in (getattr(module, key, 0.0) for key in LAYER_DROPS) if isinstance(p, float)), 0.0)
        rows = [(key, row) for key, row in module.named_children() if isinstance(row, nn.ModuleList)]
        if probability and rows:
            for key in LAYER_DROPS:
                if hasattr(module, key):
                    setattr(module, key, 0.0)
            drops |= {f"{prefix}.{key}.{i}".lstrip("."): probability for key, row in rows for i in range(len(row))}
    return drops


def _build(
    name: str, found: dict[str, Any], options: dict[str, Any], attention: object, text: str, *, fused: bool
) -> nn.Module:
    """The model of a family, from a file's config and the SPEC's own options, which take precedence."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers import masking_utils

    if name not in transformers.CONFIG_MAPPING:
        field = "model" if text.startswith(f"hf:{name}") else "model.model_type"
        raise not_one_of(FAMILIES, field, name, f", or another one of transformers {transformers.__version__}")
    tied, hint = (found | options).get("tie_word_embeddings", False), ""
    try:
        usual_config = transformers.AutoConfig.for_model(name)
        language = usual_config.get_text_config(decoder=True).model_type
        hint = "" if language == name else f"; its language model is hf:{language}"
        known = known_keys(usual_config)
        for key, value in options.items():
            require(key in known, f"model.{key}", f"is not a key of {name}'s config that can be set{hint}", value)
        require(isinstance(tied, bool), "model.tie_word_embeddings", "must be true or false", tied)
        config = config_of(name, found, options)
        for size in _SIZES:
            key = config.attribute_map.get(size, size)
            value = (found | options).get(key, 1)
            rule = "must be at least 1"
            require(not isinstance(value, int) or value >= 1, f"model.{key}", rule, value)
        models = [(kind, task) for task in TASKS for kind in kinds(task, type(config))]
        require(bool(models), "model", f"must be a model for one of {', '.join(TASKS)}, {FACTORY}", name)
        kind: Any = models[0][0]
        _require_our_loss(config, classes=TASKS[models[0][1]] == "class")
        usual = "sdpa" if kind._supports_sdpa else "eager"
        model: nn.Module = kind._from_config(config, attn_implementation=attention or usual)
        wide, rule = options.get("head_dim"), f"is not a key of {name}'s config that can be set"
        read = any(getattr(module, "head_dim", None) == wide for module in model.modules())
        require(wide is None or read, "model.head_dim", rule, wide)
        library_code = sys.modules[kind.__module__]
        for code in (library_code, masking_utils):
            count_without_contents(code)
        if fused and getattr(config, "_experts_implementation", None):
            config._experts_implementation = "batched_mm"  # by shapes alone
        if fused and hasattr(library_code, "ALL_ATTENTION_FUNCTIONS"):
            for name_of_it in (WINDOWED, SPARSE):
                transformers.AttentionInterface.register(name_of_it, windowed_attention)
            transformers.AttentionMaskInterface.register(SPARSE, masking_utils.eager_mask)
            config._attn_implementation = SPARSE if getattr(config, "index_topk", None) else WINDOWED
        return model
    except InvalidInputError:
        raise
    except (StrictDataclassError, *LIBRARY_ERRORS) as error:
        sentence = " ".join(str(error).split()).rstrip(".")
        raise InvalidInputError("model", f"must be possible for {name} ({sentence}){hint}", text) from error


def _require_our_loss(config: Any, *, classes: bool) -> None:
    """Raises InvalidInputError for a config that adds to the library's loss, or makes another one of it."""
    rules: dict[str, tuple[tuple[object, ...], str]] = {
        "output_router_logits": ((False, None), "must be false: the loss has no term for the load of experts"),
        "z_loss_coefficient": ((0, None), "must be 0: the loss has no term for the size of logits"),
    }
    if classes:
        rules["problem_type"] = (
            ("single_label_classification", None),
            "must be single_label_classification, or left out",
        )
        few = config.num_labels
        require(few != 1, "model.num_labels", "must be at least 2: the library takes one label for a regression", few)
    for key, (values, rule) in rules.items():
        found = getattr(config, key, None)
        require(found in values, f"model.{key}", rule, found)
