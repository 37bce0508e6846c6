"""Spec: finds and calls the object that a user's SPEC names, and reports errors of the user's code.

`pipeplan.documents.names` has the grammar of a SPEC. The user's code may raise anything: a UserCodeError reports the
type, the message and the place.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pipeplan.documents.names import Spec, Value, parse_spec
from pipeplan.errors import InvalidInputError, PipeplanError, RunFailedError, require, require_one_of

__all__ = [
    "PRESETS",
    "Spec",
    "Value",
    "accepts",
    "call_factory",
    "has_signature",
    "load_factory",
    "misfit",
    "parse_spec",
]

SHOWN_CHARACTERS = 600

_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")
_ALLOCATION = "can't allocate memory"
_TORCHS_STACK = "Exception raised from"

_MODULES: dict[str, dict[str, tuple[str, ...]]] = {
    "model": {
        "papers.amoebanet": ("amoebanet_d",),
        "papers.convolutions": ("alexnet", "resnet152", "resnet50", "vgg16"),
        "papers.inception": ("inception_v3",),
        "papers.language_models": ("bert_large", "gpt_1_3b", "gpt_2_2b", "gpt_3_8b", "llama_7b", "mamba_1_4b"),
        "papers.recurrent": ("awd_lm", "gnmt", "s2vt"),
        "presets": ("mlp", "sleep"),
        "transformer": ("transformer",),
    },
    "data": {
        "presets": ("random_features", "regression"),
        "random_data": ("random_images", "random_translations", "random_videos"),
        "text": ("random_tokens", "standard_library"),
    },
    "loss": {"losses": ("mean_of_squares",)},
}
PRESETS = {
    field: dict(sorted((name, f"worker_agent.models.{module}") for module, names in own.items() for name in names))
    for field, own in _MODULES.items()
}
"""The module of each NAME in `preset:NAME`, by field. They are listed because the modules hold more than presets."""


class UserCodeError(RunFailedError):
    """Code that a SPEC names raised an error of its own: its type, its message, and where it was called."""


@contextmanager
def user_code(place: str) -> Iterator[None]:
    """Converts errors of the user's code to a UserCodeError that names the place. Pipeplan's own errors pass."""
    try:
        yield
    except PipeplanError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and may want to exit
        raise UserCodeError(f"{described(error)}, in {place}") from error


def described(error: BaseException) -> str:
    """An error's type and message as one line of at most SHOWN_CHARACTERS; names exhausted memory as such."""
    lines = str(error).partition(_TORCHS_STACK)[0].split()
    message = "".join(c if c.isprintable() else " " for c in " ".join(lines))
    if type(error).__name__ in _OUT_OF_MEMORY or _ALLOCATION in message:
        message = f"too little memory ({message})" if message else "too little memory"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def load_factory(spec: Spec, *, field: str) -> Callable[..., Any]:
    """The callable that a SPEC names; the current directory is searched first, as `python -m` does.

    Raises InvalidInputError if there is no such module or callable.
    """
    require(not spec.is_hugging_face, field, "must name a callable as package.module:factory", spec.text)
    if spec.is_preset:
        require_one_of(PRESETS[field], field, spec.name)
    module = PRESETS[field][spec.name] if spec.is_preset else spec.scheme

    directory = str(Path.cwd())
    if directory not in sys.path and "" not in sys.path:
        sys.path.insert(0, directory)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        own = module == missing or module.startswith(f"{missing}.")
        here = "must name a module that exists, in the current folder or installed"
        if module.endswith(".py"):
            here += f": {module.removesuffix('.py')}:{spec.name} is meant"
        elif module.casefold() in ("hf", "preset"):
            here += f": {module.casefold()}:{spec.name} is meant"
        rule = here if own else f"needs module {missing}, which is not installed"
        raise InvalidInputError(field, rule, module) from error
    except (ImportError, SyntaxError) as error:
        raise InvalidInputError(field, f"must name a module that can be imported ({error})", module) from error
    except (Exception, SystemExit) as error:  # a module's own lines may raise anything
        with user_code(f"the import of {module}"):
            raise error

    for part in spec.name.split("."):
        rule = f"must name something that module {spec.scheme} holds"
        require(hasattr(found, part), field, rule, spec.name)
        found = getattr(found, part)
    rule = f"must name a function or a class that makes it, and this is a {type(found).__name__}"
    require(callable(found), field, rule, spec.target)
    return found  # type: ignore[no-any-return]  # checked above


def accepts(factory: Callable[..., Any], name: str) -> bool:
    """Whether a callable takes a keyword argument of this name."""
    parameters = inspect.signature(factory).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(p.kind is p.VAR_KEYWORD or (p.name == name and p.kind in kinds) for p in parameters)


def has_signature(called: Callable[..., Any]) -> bool:
    """Whether Python can tell a callable's parameters. Of some that are written in C it cannot."""
    try:
        inspect.signature(called)
    except ValueError:
        return False
    return True


def misfit(factory: Callable[..., Any], *positional: object, **keywords: object) -> str | None:
    """Why a callable cannot be called with these arguments; None if it can."""
    try:
        inspect.signature(factory).bind(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return None


def call_factory(spec: Spec, *, field: str, **offered: object) -> Any:
    """The factory's result for the SPEC's options and those of the offered arguments that it accepts.

    Raises InvalidInputError if the options do not fit its parameters, and UserCodeError for the factory's own errors.
    """
    factory = load_factory(spec, field=field)
    rule = "must name a function or a class that makes it, whose parameters Python can tell"
    require(has_signature(factory), field, rule, spec.target)
    for option in spec.options:
        if not accepts(factory, option):
            names = [name for name in inspect.signature(factory).parameters if accepts(factory, name)]
            near = "".join(f" (near: {name})" for name in get_close_matches(option, names, n=1))
            rule = f"must fit the parameters of {spec.target}: {', '.join(names) or 'it has none'}{near}"
            raise InvalidInputError(field, rule, option)
    taken = {key: value for key, value in offered.items() if accepts(factory, key) and key not in spec.options}
    reason = misfit(factory, **taken, **spec.options)
    require(reason is None, field, f"must fit the parameters of {spec.target} ({reason})", dict(spec.options))
    with user_code(f"the {field}'s factory {spec.target}"):
        return factory(**taken, **spec.options)
