"""Settings of a node's agent: from options, PIPEPLAN_AGENT_* in the environment, a TOML file, in this order.

They include the factories that the node's operator allows jobs to name: the service cannot run code of its choice.
"""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pipeplan.client.exchange import service_url
from pipeplan.configuration import SECRET, resolve
from pipeplan.documents.names import parse_spec
from pipeplan.errors import require
from pipeplan.protocol.jobs import IN_FOLDER, AgentTask, allows, refusal, require_patterns, specs_of
from pipeplan.schedules.registry import BUILT_IN as BUILT_IN_SCHEDULES
from pipeplan.schedules.registry import installed

BUILT_IN = (
    "hf:*",
    "preset:*",
    "worker_agent.models.losses:default_loss",
    "worker_agent.models.losses:mean_of_squares",
    "worker_agent.models.presets:mlp",
    "worker_agent.models.presets:random_features",
    "worker_agent.models.presets:regression",
    "worker_agent.models.presets:sleep",
    "worker_agent.models.text:random_tokens",
    "worker_agent.models.text:standard_library",
)
"""The factories that every agent allows: Hugging Face families by config, and pipeplan's own models, data and losses.

They are listed one by one: a module also holds its imports, so a pattern over modules would allow os.system.
"""


class AgentSettings(BaseSettings):
    """The settings. Every name, with PIPEPLAN_AGENT_ before it, is an environment variable.

    A TOML file of settings, which `PIPEPLAN_AGENT_CONFIG` names, gives them as well.

    - `url`: the service. Without it an agent serves the clients' service, `PIPEPLAN_URL`.
    - `token`; `PIPEPLAN_AGENT_TOKEN_FILE` names a file that contains it.
    - `allow`: the factories of this node's operator that jobs may name besides the built-in ones, as SPECs without
      options; a trailing * matches any name, but no dot after the colon. In the environment it is a JSON list.
    - `models_dir`: a folder of Hugging Face models that jobs may name by path.
    - `keep_environment`: variables that jobs see although they look like secrets.

    Other nodes:

    - `address`: where they reach this one (default: as the service is reached).
    - `rendezvous_port`: the port that it offers them (0: any free one).
    - `devices`: the number of ranks at once (default: the number of GPUs; without GPUs any number, which share the
      cores).
    - `shared_dir`: a folder that several nodes see; runs over several nodes keep their files there.
    - `drain_s`: on SIGTERM the current job has this time to end; then it is released, a run with a checkpoint.

    Limits of a job's processes:

    - `max_memory_bytes`: that one may write to.
    - `max_open_files`; `max_processes` of the user; `nice`.

    Limits of a job:

    - `max_job_s`; `max_disk_bytes` in its folder; `max_output_bytes` that it prints.

    Folders of succeeded jobs are removed once an hour between jobs; without any of the first three they stay:

    - `prune_older_than_days`; `prune_keep` (folders); `prune_max_bytes`.
    - `prune_abandoned`: those of other ended jobs are removed, too.
    """

    model_config = SettingsConfigDict(env_prefix="PIPEPLAN_AGENT_", frozen=True, extra="forbid", env_ignore_empty=True)

    url: str = Field(default_factory=service_url)
    token: str | None = Field(default=None, repr=False, json_schema_extra=SECRET)
    name: str = Field(default_factory=platform.node, min_length=1, max_length=200)
    work_dir: Path = Field(default_factory=lambda: Path.home() / ".local" / "share" / "pipeplan-agent")
    allow: tuple[str, ...] = ()
    poll_s: float = Field(default=1.0, gt=0, le=3600, allow_inf_nan=False)
    address: str | None = Field(default=None, max_length=500)
    rendezvous_port: int = Field(default=0, ge=0, le=65535)
    devices: int | None = Field(default=None, ge=1, le=4096)
    shared_dir: Path | None = None
    models_dir: Path | None = None
    drain_s: float = Field(default=10.0, ge=0, le=86_400, allow_inf_nan=False)
    max_memory_bytes: int | None = Field(default=None, ge=2**20)
    max_open_files: int | None = Field(default=None, ge=64)
    max_processes: int | None = Field(default=None, ge=16)
    nice: int = Field(default=0, ge=0, le=19)
    max_job_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_disk_bytes: int | None = Field(default=None, ge=2**20)
    max_output_bytes: int = Field(default=64 * 2**20, ge=2**10)
    prune_older_than_days: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    prune_keep: int | None = Field(default=None, ge=0)
    prune_max_bytes: int | None = Field(default=None, ge=0)
    prune_abandoned: bool = False
    keep_environment: tuple[str, ...] = ()

    @field_validator("allow")
    @classmethod
    def _check_patterns(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        require_patterns("", allow)
        return allow

    @field_validator("models_dir")
    @classmethod
    def _check_folder(cls, folder: Path | None) -> Path | None:
        rule = "must be an absolute path of a folder that exists, and not /"
        fits = folder is None or (folder.is_absolute() and folder.is_dir() and len(folder.parts) > 1)
        require(fits, "", rule, str(folder))
        return folder

    @property
    def allowed(self) -> tuple[str, ...]:
        return (*BUILT_IN, *self.allow, *_in_folder(self.models_dir))


def load_settings(**chosen: Any) -> AgentSettings:
    """The settings. Those chosen here (None: not chosen) override the environment's. Raises InvalidInputError."""
    return resolve(AgentSettings, chosen).settings


def require_allowed(task: AgentTask, allow: Sequence[str], models_dir: Path | None = None) -> None:
    """Raises InvalidInputError for a model, data or loss that is neither built in nor allowed by the operator.

    No path in the operator's folder may be a link out of it.
    """
    listed = refusal(task, (*BUILT_IN, *allow))
    refused = listed and refusal(task, (*BUILT_IN, *allow, *_in_folder(models_dir)))
    if refused is not None:
        raise refused
    if listed is None or models_dir is None:
        return
    for field, text in specs_of(task):
        path = Path(parse_spec(text, field=field).path or models_dir)
        found = (path, *path.iterdir()) if path.is_dir() else (path,)
        inside = all(each.resolve().is_relative_to(models_dir.resolve()) for each in found)
        require(inside or path == models_dir, field, f"must name a model in {models_dir}, and no links out of it", text)


def _in_folder(folder: Path | None) -> tuple[str, ...]:
    return () if folder is None else (f"hf:{quote(str(folder))}{IN_FOLDER}",)


def require_allowed_schedule(name: str, allow: Sequence[str]) -> None:
    """Raises InvalidInputError for a schedule that is neither ours nor an installed one on the operator's list.

    A schedule is code. A plan holds only its name; the packages installed here decide which class this is.
    """
    if name in BUILT_IN_SCHEDULES:
        return
    value = next((entry.value for entry in installed() if entry.name == name), None)
    rule = "must name a schedule that is built in, or installed on this node (the entry points pipeplan.schedules)"
    require(value is not None, "schedule", rule, name)
    if value is not None:
        rule = f"must be allowed by this agent's operator: pipeplan-agent start --allow {value}"
        require(allows(allow, value), "schedule", rule, name)
