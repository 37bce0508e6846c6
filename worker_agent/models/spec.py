"""SPEC strings: how models, data and losses are named, and how what they name is found.

    hf:FAMILY?key=value&...                 a Hugging Face family by config
    hf:/path/to/config.json?key=value&...   the family and config that a file holds, and what the query changes
    package.module:factory?key=value&...    a callable; the query holds its keyword arguments

A value reads as a whole number, a number, true, false or null; anything else is text. Percent signs escape.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from planner_service.core.errors import InvalidInputError, require
from worker_agent.models.user_code import user_code

Value = int | float | bool | str | None

_WORDS: dict[str, Value] = {"true": True, "false": False, "null": None}
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_SHAPE = "must be hf:FAMILY?key=value&..., hf:config.json?... or package.module:factory?key=value&..."
_CONFIG = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A parsed SPEC: `scheme` is a module or "hf", `name` a callable in it, a family or a file, `options` the query."""

    text: str
    scheme: str
    name: str
    options: Mapping[str, Value]

    @property
    def is_hugging_face(self) -> bool:
        """Whether it names a Hugging Face family."""
        return self.scheme == "hf"

    @property
    def config_file(self) -> Path | None:
        """The file with a Hugging Face config that it names, if it does."""
        return Path(self.name) if self.is_hugging_face and self.name.endswith(_CONFIG) else None

    @property
    def target(self) -> str:
        """The SPEC without its query: what an operator allows or does not."""
        return f"{self.scheme}:{self.name}"


def parse_spec(text: str, *, field: str) -> Spec:
    """The SPEC that a text holds. Raises InvalidInputError naming the field ("model", "data" or "loss")."""
    target, _, query = text.partition("?")
    scheme, colon, name = target.partition(":")
    file = scheme == "hf" and name.endswith(_CONFIG)
    require(bool(colon) and (file or all(_DOTTED.fullmatch(part) for part in (scheme, name))), field, _SHAPE, text)
    return Spec(text=text, scheme=scheme, name=name, options=_options(query, field))


def load_factory(spec: Spec, *, field: str) -> Callable[..., Any]:
    """The callable that a SPEC names; the current directory is searched first, as `python -m` does.

    Raises InvalidInputError if there is no such module or callable.
    """
    require(not spec.is_hugging_face, field, "must name a callable as package.module:factory", spec.text)
    found: Any = _module(spec, field)
    for part in spec.name.split("."):
        rule = f"must name something that module {spec.scheme} holds"
        require(hasattr(found, part), field, rule, spec.name)
        found = getattr(found, part)
    require(callable(found), field, "must name a callable", spec.target)
    return found  # type: ignore[no-any-return]  # checked above


def accepts(factory: Callable[..., Any], name: str) -> bool:
    """Whether a callable takes a keyword argument of this name."""
    parameters = inspect.signature(factory).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(p.kind is p.VAR_KEYWORD or (p.name == name and p.kind in kinds) for p in parameters)


def misfit(factory: Callable[..., Any], *positional: object, **keywords: object) -> str | None:
    """Why a callable cannot be called with these arguments; None if it can."""
    try:
        inspect.signature(factory).bind(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return None


def call_factory(spec: Spec, *, field: str, **offered: object) -> Any:
    """What the factory returns for the SPEC's options and those of the offered arguments that it takes.

    Raises InvalidInputError if the options do not fit its parameters; what the factory itself raises passes through.
    """
    factory = load_factory(spec, field=field)
    taken = {key: value for key, value in offered.items() if accepts(factory, key) and key not in spec.options}
    reason = misfit(factory, **taken, **spec.options)
    require(reason is None, field, f"must fit the parameters of {spec.target} ({reason})", dict(spec.options))
    with user_code(f"the {field}'s factory {spec.target}"):
        return factory(**taken, **spec.options)


def _module(spec: Spec, field: str) -> Any:
    directory = str(Path.cwd())
    if directory not in sys.path and "" not in sys.path:
        sys.path.insert(0, directory)
    try:
        return importlib.import_module(spec.scheme)
    except ModuleNotFoundError as error:
        missing = error.name or spec.scheme
        own = spec.scheme == missing or spec.scheme.startswith(f"{missing}.")
        rule = "must name a module that exists" if own else f"needs module {missing}, which is not installed"
        raise InvalidInputError(field, rule, spec.scheme) from error
    except (ImportError, SyntaxError) as error:
        raise InvalidInputError(field, f"must name a module that can be imported ({error})", spec.scheme) from error
    except (Exception, SystemExit) as error:  # a module's own lines may raise anything
        with user_code(f"the import of {spec.scheme}"):
            raise error


def _options(query: str, field: str) -> dict[str, Value]:
    options: dict[str, Value] = {}
    for item in query.split("&") if query else ():
        key, equals, value = (unquote(part) for part in item.partition("="))
        require(bool(equals) and key.isidentifier(), field, "must have a query of key=value&...", item)
        require(key not in options, field, "must not name an option twice", key)
        options[key] = _value(value)
    return options


def _value(text: str) -> Value:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
