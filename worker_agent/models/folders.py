"""Folders: the files of a Hugging Face model's folder: its config, its weights, and the files of its owner.

Errors name the kind of a folder that cannot be trained: an adapter, quantised weights, weights in another form, a run.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeplan.errors import InvalidInputError, require

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

QUANTISED = ("quantization_config", "quantization", "compression_config")
"""Keys of a config whose weights are quantised."""

_ADAPTER = "adapter_config.json"
_QUANTISERS = ("quantize_config.json", "quant_config.json")
"""Files that quantisers wrote before configs had a key for it."""

_FORMS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx")
"""Files of weights. Only some are read: a folder with only such a file must not be taken for random weights."""

_OWN = (CONFIG, "*.index.json", *_FORMS)
"""The files that an export writes itself."""


def read_config(path: Path) -> dict[str, Any]:
    """The content of a Hugging Face config: a file, or a folder's config.json.

    Raises InvalidInputError for anything else, and names its kind.
    """
    from pipeplan.documents.files import read_text, require_model  # and pydantic, which other models do without

    require_model(path)
    _refuse_others(path)
    file = path / CONFIG if path.is_dir() else path
    text = read_text(file, field="model")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError("model", f"must name a file with a JSON document ({error})", str(file)) from error
    rule = "must name a Hugging Face config: a JSON object with a model_type"
    if isinstance(content, dict) and "peft_type" in content:
        raise _adapter(content, file)
    if isinstance(content, dict) and "model_type" not in content:
        options = {"blocks": "--profile", "stages": "--plan", "levels": "--cluster"}
        meant = next((option for key, option in options.items() if key in content), None)
        rule += f"; this is a document of pipeplan's, for {meant}" if meant else ""
    fits = isinstance(content, dict) and isinstance(content.get("model_type"), str)
    require(fits, "model", rule, str(file))
    return content  # type: ignore[no-any-return]  # checked above


def weight_files(folder: Path, config: Mapping[str, Any]) -> tuple[Path, ...]:
    """The files with weights that `save_pretrained` wrote to a folder; none in a folder without weights.

    Raises InvalidInputError for quantised weights and those of another form, and for an index that names missing
    files.
    """
    there = sorted(path.name for pattern in _FORMS for path in folder.glob(pattern))
    method = _quantiser(folder, config)
    if there and method is not None:
        rule = (
            f"must have weights that can be trained, and these are quantised ({method}): load them in a floating-point "
            "type and save them again (transformers: from_pretrained, dequantize, save_pretrained), or name "
            f"hf:{folder}/{CONFIG} for random weights"
        )
        raise InvalidInputError("model", rule, str(folder))
    if (folder / INDEX).is_file():
        try:
            names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            rule = f"must have a readable {INDEX} with a weight_map ({type(error).__name__}: {error})"
            raise InvalidInputError("model", rule, str(folder)) from error
        for name in names:
            fits = isinstance(name, str) and Path(name).name == name and (folder / name).is_file()
            require(fits, "model", f"must have every file of {INDEX} in its folder", name)
        return tuple(folder / name for name in sorted(names))
    if (folder / WEIGHTS).is_file():
        return (folder / WEIGHTS,)
    rule = f"must have its weights in {WEIGHTS} or in the files of {INDEX}, as save_pretrained writes them"
    if there and there[0].endswith(".gguf"):
        rule += f"; these are llama.cpp's GGUF: from_pretrained({str(folder)!r}, gguf_file={there[0]!r}) reads them"
    require(not there, "model", rule, ", ".join(there[:3]))
    return ()


def files_beside(folder: Path) -> Iterator[Path]:
    """The files of a model's folder that are neither its config nor weights, relative to it.

    Hidden ones, and parts of the folder with weights of their own, are left out: they belong to something else.
    """
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_file() and not any(path.match(pattern) for pattern in _OWN):
            yield path.relative_to(folder)
        elif path.is_dir() and not path.is_symlink() and not any(any(path.rglob(form)) for form in _FORMS):
            yield from (each.relative_to(folder) for each in sorted(path.rglob("*")) if each.is_file())


def _refuse_others(path: Path) -> None:
    """Raises InvalidInputError for a file or folder that is known to be no model's."""
    if path.is_file() and any(path.match(form) for form in _FORMS):
        raise InvalidInputError("model", f"must be the folder of these weights, with their {CONFIG}", str(path))
    if not path.is_dir():
        return
    if (path / _ADAPTER).is_file():
        try:
            content = json.loads((path / _ADAPTER).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            content = None
        raise _adapter(content if isinstance(content, dict) else {}, path)
    if (path / CONFIG).exists():
        return
    rule = f"must be a model's folder, with a {CONFIG} as save_pretrained writes it"
    others = {
        "checkpoints": "; this is a run's: `pipeplan-agent export RUN --to FOLDER` makes a model's folder of it",
        "model_index.json": "; this is a pipeline of diffusers: name one of the models in it",
        "params.json": "; this has weights in their makers' form: transformers' scripts convert them",
        "*.gguf": "; this has llama.cpp's GGUF: load it with from_pretrained(FOLDER, gguf_file=...) and save it",
    }
    meant = next((words for pattern, words in others.items() if any(path.glob(pattern))), "")
    raise InvalidInputError("model", rule + meant, str(path))


def _adapter(content: Mapping[str, Any], path: Path) -> InvalidInputError:
    """The refusal of an adapter's folder or config."""
    kind, base = content.get("peft_type", "PEFT"), content.get("base_model_name_or_path")
    of = f" of {base}" if isinstance(base, str) else ""
    rule = (
        f"must be a whole model's folder, and this is an adapter's ({kind}{of}): name its base model's folder, or "
        "merge the two and save them (peft: merge_and_unload, save_pretrained)"
    )
    return InvalidInputError("model", rule, str(path))


def _quantiser(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The quantisation of a folder's weights; None for other weights."""
    for key in QUANTISED:
        said = config.get(key)
        if said:
            method = said.get("quant_method") if isinstance(said, dict) else None
            return f"{key} of its {CONFIG}: {method}" if method else f"{key} of its {CONFIG}"
    return next((f"it has a {name}" for name in _QUANTISERS if (folder / name).is_file()), None)
