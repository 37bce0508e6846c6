"""Configuration: the settings of a process, and where each comes from.

Options of the command line come before the environment, the environment before the file, the file before the defaults.
In place of a variable NAME there may be NAME_FILE, the path of a file that holds the value: so containers hand out
secrets.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsError

from pipeplan.documents.files import invalid_input
from pipeplan.errors import InvalidInputError, require
from pipeplan.protocol.tokens import HIDDEN, masked

S = TypeVar("S", bound=BaseSettings)

NEARLY = 0.85
"""From this likeness on (difflib's) an unknown variable is taken for a setting that is misspelt."""

SECRET: dict[str, Any] = {"secret": True}
"""What a field of settings says of itself (as `json_schema_extra`) whose value is never shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting as it is shown; `source` says where its value comes from."""

    name: str
    value: Any
    source: str
    variable: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[S]):
    """The settings, and by name where each that is no default comes from."""

    settings: S
    sources: Mapping[str, str]

    def shown(self) -> tuple[Setting, ...]:
        """All settings, secrets masked."""
        fields = type(self.settings).model_fields
        values = self.settings.model_dump(mode="json")
        return tuple(
            Setting(
                name=name,
                value=_shown(fields[name].json_schema_extra, values[name]),
                source=self.sources.get(name, "default"),
                variable=_variable(type(self.settings), name),
                meaning=fields[name].description or "",
            )
            for name in fields
        )


def resolve(kind: type[S], options: Mapping[str, Any], config: Path | None = None) -> Resolved[S]:
    """The settings, from the options (None: not given), the environment and the file that is named here or there.

    Raises InvalidInputError that names the setting and where its value comes from.
    """
    given = {name: value for name, value in options.items() if value is not None}
    named = os.environ.get(_variable(kind, "config"))
    path = config or (Path(named) if named else None)

    file = {}
    if path is not None:
        try:
            file = tomllib.loads(_text("config", path))
        except tomllib.TOMLDecodeError as error:
            raise InvalidInputError(str(path), f"must be a TOML file ({error})", path.name) from error
        for name in file:
            known = name in kind.model_fields
            require(known, str(path), "must hold known settings only (`pipeplan settings` lists them)", name)

    _require_no_misspelling(kind)
    environment = _environment(kind)
    sources = dict.fromkeys(file, f"file {path}")
    sources |= {name: source for name, (_, source) in environment.items()} | dict.fromkeys(given, "option")
    values = file | {name: value for name, (value, _) in environment.items()} | given
    try:
        return Resolved(settings=kind(**values), sources=sources)
    except ValidationError as error:
        found = invalid_input(error)
        name = found.field.partition(".")[0]
        rule = f"{found.rule} (from: {sources[name]})" if name in sources else found.rule
        field = kind.model_fields.get(name)
        value = found.value if field is None else _shown(field.json_schema_extra, found.value)
        raise InvalidInputError(found.field, rule, value) from error


def _require_no_misspelling(kind: type[BaseSettings]) -> None:
    """Raises InvalidInputError for a variable that is nearly one of the settings; others may belong to clients."""
    known = [_variable(kind, name) for name in (*kind.model_fields, "config")]
    prefix = _variable(kind, "")
    near = {variable[len(prefix) :]: variable for variable in known}
    for variable in sorted(os.environ):
        plain = variable.removesuffix("_FILE")
        if not variable.startswith(prefix) or variable in known or plain in known:
            continue
        meant = get_close_matches(plain[len(prefix) :], near, n=1, cutoff=NEARLY)
        rule = f"must name a setting: {near[meant[0]]} is meant" if meant else ""
        require(not meant, "environment", rule, variable)


def _environment(kind: type[BaseSettings]) -> dict[str, tuple[Any, str]]:
    """By name: the value, and the variable or file that it comes from."""
    try:
        plain = EnvSettingsSource(kind)()
    except SettingsError as error:
        named = re.search(r'field "(\w+)"', str(error))
        variable = _variable(kind, named[1] if named else "")
        rule = 'must be a JSON list such as ["package.module:factory"]'
        raise InvalidInputError(variable, rule, os.environ.get(variable)) from error
    values = {name: (value, f"environment {_variable(kind, name)}") for name, value in plain.items()}
    for name in kind.model_fields:
        variable = f"{_variable(kind, name)}_FILE"
        path = os.environ.get(variable)
        if not path or f"{name}_file" in kind.model_fields:
            continue
        require(name not in values, name, f"must be set by {variable} or by the variable itself, not by both", path)
        values[name] = (_text(variable, Path(path)).strip(), f"file {path}")
    return values


def _text(field: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(field, "must name a readable text file", str(path)) from error


def _variable(kind: type[BaseSettings], name: str) -> str:
    return f"{kind.model_config.get('env_prefix', '')}{name}".upper()


def _shown(extra: object, value: Any) -> Any:
    if extra == SECRET and value is not None:
        return HIDDEN
    return masked(value) if isinstance(value, str) else value
