"""Names: the valid names of models, blocks and devices, and the SPEC, which names what an agent builds.

Scripts, logs and terminals print names: each is one line of printable characters. A SPEC is the one grammar by which
models, data and losses are named:

    hf:FAMILY?key=value&...                 a Hugging Face family by config
    hf:PATH?key=value&...                   the family and config in a file, or in a folder's config.json; a path ends
                                            with .json or holds a slash
    preset:NAME?key=value&...               one of pipeplan's own models, data or losses
    package.module:factory?key=value&...    a callable; the query holds its keyword arguments

A SPEC holds printable characters and no space; in a path or a query %XX stands for a byte of any other character. A
value reads as a whole number, a number, true, false or null; one that begins with [ or { as JSON; all else as text.
"""

import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any
from urllib.parse import quote, unquote

from pipeplan.errors import InvalidInputError, require

STRICT: dict[str, Any] = {"extra": "forbid", "allow_inf_nan": False}
"""The validation of documents: unknown keys, NaN and infinity are refused."""

Value = int | float | bool | str | list[Any] | dict[str, Any] | None
"""The value of an option in a SPEC."""

MAX_LENGTH = 2000
"""The characters that a SPEC may have."""

FAMILIES = (
    "bart",
    "bert",
    "bloom",
    "gemma",
    "gpt2",
    "gpt_neox",
    "llama",
    "mamba",
    "mistral",
    "mixtral",
    "mpt",
    "opt",
    "phi",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "resnet",
    "t5",
    "vit",
    "whisper",
)
"""The Hugging Face families that the worker's tests cover; it builds others as well, if they can be cut."""

PRESETS = (
    "alexnet",
    "amoebanet_d",
    "awd_lm",
    "bert_large",
    "gnmt",
    "gpt_1_3b",
    "gpt_2_2b",
    "gpt_3_8b",
    "inception_v3",
    "llama_7b",
    "mamba_1_4b",
    "mean_of_squares",
    "mlp",
    "random_features",
    "random_images",
    "random_tokens",
    "random_translations",
    "random_videos",
    "regression",
    "resnet152",
    "resnet50",
    "s2vt",
    "sleep",
    "standard_library",
    "transformer",
    "vgg16",
)
"""The worker's own models, data and losses."""

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""C0, DEL, C1, the line and paragraph separators, and half characters."""

_INVISIBLE = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"})
"""Unicode's categories of characters that show nothing, or nothing that is agreed upon."""

_IGNORED = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters of other categories that show nothing: joiners, fillers, selectors of variants, an empty pattern."""

_ID = re.compile(r"[0-9A-Fa-f]{32}")

_RULE = "must hold no control character, line separator or lone surrogate"

_WORDS: dict[str, Value] = {"true": True, "false": False, "null": None}
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_FAMILY = re.compile(r"[A-Za-z_][\w-]*")
_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_SUFFIXES = (".yaml", ".yml", ".toml", ".txt", ".safetensors", ".bin", ".pt", ".pth", ".gguf")
_TOKENS = (".bin", ".npy", ".jsonl", ".parquet", ".arrow")
_SHAPE = "must be hf:FAMILY?key=value&..., hf:PATH?..., preset:NAME?... or package.module:factory?key=value&..."
_CHARACTERS = "must hold printable characters and no spaces; %XX stands for others"


def require_name(field: str, value: str) -> None:
    """Raises InvalidInputError for a name that is empty, or does not print as one line.

    Letters of every script, spaces and emoji pass.
    """
    require(bool(value.strip()), field, "must not be empty", value)
    require_line(field, value)


def require_own_name(field: str, value: str) -> None:
    """Raises InvalidInputError for a name that another could be taken for, where names find one thing each.

    Such a name is in Unicode's form NFKC, has no invisible character and no space but single ones inside, and does not
    look like an id.
    """
    require_name(field, value)
    plain = unicodedata.normalize("NFKC", value)
    require(plain == value, field, f"must be in Unicode's form NFKC, which is {plain!r}", value)
    rule = "must hold no invisible character, and no space but single ones between other characters"
    visible = not any(unicodedata.category(one) in _INVISIBLE or _IGNORED.match(one) for one in value)
    require(visible and value == " ".join(value.split()), field, rule, value)
    require(_ID.fullmatch(value) is None, field, "must not look like an id", value)


def require_line(field: str, value: str) -> None:
    """Raises InvalidInputError for a text that does not print as one line."""
    require(_UNPRINTABLE.search(value) is None, field, _RULE, value)


def on_one_line(text: str) -> str:
    """The text with everything escaped that `require_line` refuses: it always prints as one line."""
    return _UNPRINTABLE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A parsed SPEC: `options` are its query.

    `scheme` is a module, "hf" or "preset"; `name` a callable in the module, a family or path, or one of pipeplan's own.
    """

    text: str
    scheme: str
    name: str
    options: Mapping[str, Value]

    @property
    def is_hugging_face(self) -> bool:
        """Whether it names a Hugging Face family or config."""
        return self.scheme == "hf"

    @property
    def is_preset(self) -> bool:
        """Whether it names one of pipeplan's own models, data or losses."""
        return self.scheme == "preset"

    @property
    def is_built_in(self) -> bool:
        """Whether every worker can build it from only the SPEC and pipeplan's own code."""
        return self.name in {"hf": FAMILIES, "preset": PRESETS}.get(self.scheme, ())

    @property
    def path(self) -> str | None:
        """The file or folder with a Hugging Face config, if it names one."""
        return self.name if self.is_hugging_face and _is_path(self.name) else None

    @property
    def target(self) -> str:
        """The SPEC without its query and its escapes, to which an operator's list applies."""
        return f"{self.scheme}:{self.name}"


def parse_spec(text: str, *, field: str) -> Spec:
    """The SPEC in a text. Raises InvalidInputError naming the field ("model", "data" or "loss")."""
    require(len(text) <= MAX_LENGTH, field, f"must have at most {MAX_LENGTH} characters", text)
    require(" " not in text and text.isprintable(), field, _CHARACTERS, text)
    target, _, query = text.partition("?")
    scheme, colon, name = target.partition(":")
    if scheme == "hf":
        name = _unescaped(name, field)
        path = _is_path(name) and name.isprintable() and bool(name.strip("/"))
        fits = path or _FAMILY.fullmatch(name) is not None
    else:
        fits = all(_DOTTED.fullmatch(part) for part in (scheme, name))
    require(bool(colon) and fits, field, f"{_SHAPE}{_near(text, field)}", text)

    options: dict[str, Value] = {}
    for item in query.split("&") if query else ():
        key, equals, value = (_unescaped(part, field) for part in item.partition("="))
        require(bool(equals) and key.isidentifier(), field, "must have a query of key=value&...", item)
        require(key not in options, field, "must not name an option twice", key)
        options[key] = _value(value, field)
    return Spec(text=text, scheme=scheme, name=name, options=options)


def query_of(options: Mapping[str, Any]) -> str:
    """The query of these options. Raises InvalidInputError for a text that would be read as something else."""
    items = []
    for key, value in options.items():
        text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        require(_value(text, key) == value, key, "must be a value that a SPEC can hold", value)
        items.append(f"{key}={quote(text, safe='')}")
    return "&".join(items)


def hub_model(name: str) -> str:
    """How to plan a model of the Hugging Face hub, OWNER/NAME: nothing is downloaded here."""
    folder = name.rpartition("/")[2]
    return f"`hf download {name} config.json --local-dir {folder}`, then hf:{folder}/config.json"


def _near(text: str, field: str) -> str:
    """The likely meaning of a text that is no SPEC, as a rule's end."""
    target, mark, query = text.partition("?")
    if "://" in target:
        parts = target.split("/")[3:5]
        return f"; nothing is downloaded: {hub_model('/'.join(parts))}" if field == "model" and len(parts) == 2 else ""
    stem = target.partition(":")[0]
    if stem.endswith(".py"):
        factory = target.partition(":")[2] or "FACTORY"
        return f"; {stem.removesuffix('.py').strip('./').replace('/', '.')}:{factory} is meant"
    if target in PRESETS:
        return f"; preset:{text} is meant"
    if field == "data" and target.endswith(_TOKENS):
        file = f"path={target}&dtype=uint16&vocabulary=50257&sequence_length=1024"
        return f"; of a file of tokens: worker_agent.models.token_files:tokens?{file}"
    if field != "model":
        return ""
    if target in FAMILIES:
        return f"; hf:{text} is meant"
    name = re.sub("^hf[:/]", "", target, flags=re.IGNORECASE)
    if _is_path(name):
        hub = name.count("/") == 1 and name[0] not in "./~" and not name.endswith((".json", "/"))
        of_hub = (
            f"; of the hub's model {name} the config is enough: {hub_model(name)}" if hub and name == target else ""
        )
        return f"; hf:{name}{mark}{query} is meant, if it is a config's file or a model's folder{of_hub}"
    if _DOTTED.fullmatch(target) and "." in target and not target.endswith(_SUFFIXES):
        return f"; {target}:FACTORY is meant, if it is a module"
    near = [f"hf:{each}" for each in get_close_matches(name, FAMILIES)]
    near += [f"preset:{each}" for each in get_close_matches(name, PRESETS)]
    return f" (near: {', '.join(near)})" if near else ""


def _is_path(name: str) -> bool:
    return name.endswith(".json") or "/" in name


def _unescaped(text: str, field: str) -> str:
    require(_ESCAPE.search(text) is None, field, "must have two hexadecimal digits after a percent sign", text)
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidInputError(field, "must have escapes that are UTF-8", text) from error


def _value(text: str, field: str) -> Value:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if text[:1] not in ("[", "{"):
        return text
    try:
        found: list[Any] | dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(field, "must hold JSON in a value that begins with [ or {", text) from error
    return found
