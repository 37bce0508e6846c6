"""Settings of the service: from options, else from PIPEPLAN_* in the environment, else from a TOML file."""

import os
import re
import sys
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from pipeplan.configuration import SECRET, Resolved, resolve
from pipeplan.errors import InvalidInputError, require
from pipeplan.protocol.tokens import is_loopback
from planner_service.platform.logs import LogFormat, LogLevel
from planner_service.platform.rules import parse_rules

DEFAULT_PORT = 8437


def default_database_url() -> str:
    """SQLite in the user's data folder: the same database wherever the service is started."""
    if sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Application Support"
    else:
        folder = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return f"sqlite:///{folder / 'pipeplan' / 'pipeplan.sqlite3'}"


def _names(value: object) -> object:
    """Names separated by commas, as a tuple; a file may hold a list."""
    return tuple(filter(None, (name.strip().lower() for name in value.split(",")))) if isinstance(value, str) else value


def _networks(value: tuple[str, ...]) -> tuple[str, ...]:
    """The addresses and networks, unchanged. Raises ValueError for a text that is neither."""
    for text in value:
        try:
            ip_network(text)
        except ValueError as error:
            rule = "must be addresses and networks such as 10.1.2.3 and 10.0.0.0/8, without a port or a host's name"
            raise InvalidInputError("", rule, text) from error
    return value


def _base_path(value: str) -> str:
    """The path without a slash at its end. Raises ValueError for a text that is not a path."""
    path = value.rstrip("/")
    rule = "must be a path such as /pipeplan, of letters, digits, dots, dashes and underscores"
    require(re.fullmatch(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*", path) is not None, "", rule, value)
    return path


def _rules(value: tuple[str, ...]) -> tuple[str, ...]:
    """The rules of retention, unchanged. Raises ValueError for a text that is not a rule."""
    parse_rules(value)
    return value


def _for_sqlite(value: Path | None, given: ValidationInfo) -> Path | None:
    """The folder. Raises ValueError for a database that has tools of its own."""
    is_sqlite = str(given.data.get("database_url", "sqlite")).startswith("sqlite")
    rule = "must be set for SQLite only: back up PostgreSQL by pg_dump (docs/operations.md)"
    require(value is None or is_sqlite, "", rule, str(value))
    return value


class Settings(BaseSettings):
    """The settings. Every name is a key of the file and, with PIPEPLAN_ before it, an environment variable."""

    model_config = SettingsConfigDict(
        env_prefix="PIPEPLAN_", frozen=True, extra="forbid", env_ignore_empty=True, allow_inf_nan=False
    )

    database_url: str = Field(
        default_factory=default_database_url, description="sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
    )
    database_pool_size: int = Field(
        default=16, ge=1, le=1000, description="connections that a process keeps to its database"
    )
    database_pool_timeout_s: float = Field(
        default=2.0, ge=0, le=60, description="how long a request waits for a connection before the answer is a 503"
    )
    host: str = Field(default="127.0.0.1", description="the address to listen on")
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535, description="the port to listen on; 0 takes a free one")
    lease_s: float = Field(default=30.0, gt=0, le=86_400, description="how long an agent may be silent")
    max_attempts: int = Field(
        default=3, ge=1, le=100, description="how often a job is given to an agent before it is given up"
    )
    solver_processes: int = Field(
        default_factory=lambda: min(os.cpu_count() or 1, 4),
        ge=1,
        le=256,
        description="plans that are made at the same time",
    )
    solver_queue: int = Field(default=32, ge=0, le=10_000, description="plans that may wait for a solver process")
    solver_memory_bytes: int = Field(
        default=4 * 2**30,
        ge=2**28,
        le=2**50,
        description="the memory that the search for one plan, or its play, may take",
    )
    solve_deadline_s: float = Field(
        default=50.0, gt=0, le=3600, description="how long a request waits for its plan before the answer is a 504"
    )
    plan_job_deadline_s: float = Field(
        default=3600.0, gt=0, le=864_000, description="how long a plan that is a job may take"
    )
    price_instructions: int = Field(
        default=10_000_000,
        ge=0,
        le=10**12,
        description="how many instructions the service plays, beside other work, for a plan without a price; 0: none",
    )
    parser_processes: int = Field(
        default_factory=lambda: min(os.cpu_count() or 1, 2),
        ge=1,
        le=64,
        description="large documents that are read at the same time",
    )
    parser_queue: int = Field(default=8, ge=0, le=1000, description="large documents that may wait to be read")
    parser_memory_bytes: int = Field(
        default=2 * 2**30, ge=2**28, le=2**50, description="the memory that reading one document may take"
    )
    parser_cpu_s: float = Field(
        default=30.0, gt=0, le=3600, description="the processor time that reading one document may take"
    )
    event_streams: int = Field(
        default=500, ge=1, le=100_000, description="event streams that are open at the same time"
    )
    require_tokens: bool = Field(
        default=False,
        description="whether requests from this machine need a token, too; requests from others always do",
    )
    token_key: str | None = Field(
        default=None,
        min_length=32,
        repr=False,
        json_schema_extra=SECRET,
        description="the key of the tokens' hashes, at least 32 characters; default: a random key in the database",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)] = Field(
        default=(), description="names under which the service is reached beyond this machine, separated by commas"
    )
    base_path: Annotated[str, AfterValidator(_base_path)] = Field(
        default="", description="the path of a shared host under which a proxy serves it, such as /pipeplan"
    )
    trusted_proxies: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names), AfterValidator(_networks)] = Field(
        default=("127.0.0.1",),
        description="proxies whose X-Forwarded-For and -Proto are trusted: addresses and networks, separated by commas",
    )
    requests_per_s: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="how often one token, or an address without one, may ask each process; 0: no limit",
    )
    failed_tokens_per_min: float = Field(
        default=20.0, gt=0, le=1e6, description="how often an address may send a token that is not valid"
    )
    body_timeout_s: float = Field(
        default=60.0, gt=0, le=3600, description="how long a request's body may take to arrive"
    )
    max_body_bytes: int = Field(default=64 * 2**20, ge=1024, description="larger bodies are refused with 413")
    retention: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names), AfterValidator(_rules)] = Field(
        default=(), description="what is removed by age or number, such as runs=90d,jobs=10000; default: nothing"
    )
    retention_interval_s: float = Field(
        default=3600.0, ge=1, le=31_536_000, description="how often retention looks for something to remove"
    )
    backup_folder: Annotated[Path | None, AfterValidator(_for_sqlite)] = Field(
        default=None, description="where backups of a SQLite database are written; default: none are made"
    )
    backup_interval_s: float = Field(default=86_400.0, ge=1, le=31_536_000, description="how often a backup is written")
    backups_kept: int = Field(default=7, ge=1, le=10_000, description="how many of these backups are kept")
    log_level: LogLevel = Field(default="info", description="debug, info (each request), warning or error")
    log_format: LogFormat = Field(default="auto", description="json, human, or auto: human on a terminal")
    shutdown_s: float = Field(
        default=10.0, gt=0, le=3600, description="how long requests may go on after SIGTERM before they are cut off"
    )

    @property
    def demands_tokens(self) -> bool:
        """Whether every request needs a token: always where others than this machine's own users can reach the service.

        An allowed host beyond this machine means that they can, wherever the service listens: behind a proxy on this
        machine it listens on loopback only.
        """
        reachable = (self.host, *self.allowed_hosts)
        return self.require_tokens or not all(is_loopback(name) for name in reachable)

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """The host names that requests may use besides this machine's; None: any, as every request needs a token."""
        return self.allowed_hosts if self.allowed_hosts or is_loopback(self.host) else None


def load_settings(*, config: Path | None = None, **chosen: Any) -> Settings:
    """The settings. Those chosen here (None: not chosen) override the environment's. Raises InvalidInputError."""
    return resolve_settings(config=config, **chosen).settings


def resolve_settings(*, config: Path | None = None, **chosen: Any) -> Resolved[Settings]:
    return resolve(Settings, chosen, config)
