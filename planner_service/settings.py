"""Settings of the service, from PIPEPLAN_* in the environment; the command line's options come before them."""

import os
import sys
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from planner_service.contract.documents import invalid_input
from planner_service.contract.http import is_loopback
from planner_service.core.errors import require

DEFAULT_PORT = 8437


def default_database_url() -> str:
    """SQLite in the user's data folder: the same database wherever the service is started."""
    return f"sqlite:///{_data_folder() / 'pipeplan.sqlite3'}"


class Settings(BaseSettings):
    """What can be set. Every name is an environment variable with PIPEPLAN_ before it."""

    model_config = SettingsConfigDict(env_prefix="PIPEPLAN_", frozen=True, extra="forbid")

    database_url: str = Field(default_factory=default_database_url)
    database_pool_size: int = Field(default=16, ge=1, le=1000)
    database_pool_timeout_s: float = Field(default=2.0, ge=0, le=60, allow_inf_nan=False)
    host: str = "127.0.0.1"
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    lease_s: float = Field(default=30.0, gt=0, le=86_400, allow_inf_nan=False)
    max_attempts: int = Field(default=3, ge=1, le=100)
    max_body_bytes: int = Field(default=64 * 2**20, ge=1024)


def load_settings(**chosen: Any) -> Settings:
    """The settings, with those chosen here (None: not chosen) before the environment's. Raises InvalidInputError.

    Nothing protects the service yet beyond this machine, so that it does not listen there.
    """
    try:
        settings = Settings(**{name: value for name, value in chosen.items() if value is not None})
    except ValidationError as error:
        raise invalid_input(error) from error
    rule = "must be a loopback address such as 127.0.0.1: without access tokens the service is for this machine alone"
    require(is_loopback(settings.host), "host", rule, settings.host)
    return settings


def _data_folder() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "pipeplan"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "pipeplan"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "pipeplan"
