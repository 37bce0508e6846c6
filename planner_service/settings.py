"""Settings of the service: from options, PIPEPLAN_* in the environment, a TOML file; the former before the latter."""

import os
import sys
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from planner_service.contract.configuration import Resolved, resolve
from planner_service.contract.http import is_loopback
from planner_service.core.errors import require
from planner_service.logs import LogFormat, LogLevel

DEFAULT_PORT = 8437


def default_database_url() -> str:
    """SQLite in the user's data folder: the same database wherever the service is started."""
    return f"sqlite:///{_data_folder() / 'pipeplan.sqlite3'}"


class Settings(BaseSettings):
    """What can be set. Every name is an environment variable with PIPEPLAN_ before it, and a key of the file."""

    model_config = SettingsConfigDict(env_prefix="PIPEPLAN_", frozen=True, extra="forbid", env_ignore_empty=True)

    database_url: str = Field(
        default_factory=default_database_url, description="sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
    )
    database_pool_size: int = Field(
        default=16, ge=1, le=1000, description="connections that a process keeps to its database"
    )
    database_pool_timeout_s: float = Field(
        default=2.0,
        ge=0,
        le=60,
        allow_inf_nan=False,
        description="how long a request waits for one of them before it is answered 503",
    )
    host: str = Field(default="127.0.0.1", description="the address to listen on")
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535, description="the port to listen on; 0 takes a free one")
    lease_s: float = Field(
        default=30.0, gt=0, le=86_400, allow_inf_nan=False, description="how long an agent may be silent"
    )
    max_attempts: int = Field(
        default=3, ge=1, le=100, description="how often a job is given to an agent before it is given up"
    )
    max_body_bytes: int = Field(default=64 * 2**20, ge=1024, description="larger bodies are refused with 413")
    log_level: LogLevel = Field(default="info", description="debug, info (each request), warning or error")
    log_format: LogFormat = Field(default="auto", description="json, human, or auto: human on a terminal")
    shutdown_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="how long requests may go on after SIGTERM before they are cut off",
    )


def load_settings(*, config: Path | None = None, **chosen: Any) -> Settings:
    """The settings, with those chosen here (None: not chosen) before the environment's. Raises InvalidInputError.

    Nothing protects the service yet beyond this machine, so that it does not listen there.
    """
    return resolve_settings(config=config, **chosen).settings


def resolve_settings(*, config: Path | None = None, **chosen: Any) -> Resolved[Settings]:
    """The same, with where each comes from."""
    resolved = resolve(Settings, chosen, config)
    host = resolved.settings.host
    rule = "must be a loopback address such as 127.0.0.1: without access tokens the service is for this machine alone"
    require(is_loopback(host), "host", rule, host)
    return resolved


def _data_folder() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "pipeplan"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "pipeplan"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "pipeplan"
