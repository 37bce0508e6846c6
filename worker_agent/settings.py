"""Settings of a node's agent, from PIPEPLAN_AGENT_* in the environment; the command line's options come before them."""

import os
import platform
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from planner_service.contract.documents import invalid_input
from planner_service.contract.http import DEFAULT_URL
from planner_service.core.errors import InvalidInputError

BUILT_IN = (
    "hf:*",
    "worker_agent.models.losses:default_loss",
    "worker_agent.models.losses:mean_of_squares",
    "worker_agent.models.presets:mlp",
    "worker_agent.models.presets:random_features",
    "worker_agent.models.presets:regression",
    "worker_agent.models.presets:sleep",
    "worker_agent.models.text:random_tokens",
    "worker_agent.models.text:standard_library",
)
"""What every agent may build: Hugging Face families by config, and pipeplan's own models, data and losses.

One by one: a module also holds what it imports, so that a pattern over modules would allow os.system.
"""


class AgentSettings(BaseSettings):
    """What can be set. Every name is an environment variable with PIPEPLAN_AGENT_ before it.

    `allow` lists the factories of this node's operator that jobs may name besides the built-in ones, as SPECs without
    options; a trailing * stands for any names, not for what is inside of them (no dot after the colon). In the
    environment it is a JSON list.
    """

    model_config = SettingsConfigDict(env_prefix="PIPEPLAN_AGENT_", frozen=True, extra="forbid")

    url: str = DEFAULT_URL
    token: str | None = None
    name: str = Field(default_factory=platform.node, min_length=1, max_length=200)
    work_dir: Path = Field(default_factory=lambda: Path.home() / ".local" / "share" / "pipeplan-agent")
    allow: tuple[str, ...] = ()
    poll_s: float = Field(default=1.0, gt=0, le=3600, allow_inf_nan=False)


def load_settings(**chosen: Any) -> AgentSettings:
    """The settings, with those chosen here (None: not chosen) before the environment's. Raises InvalidInputError."""
    try:
        return AgentSettings(**{name: value for name, value in chosen.items() if value is not None})
    except ValidationError as error:
        raise invalid_input(error) from error
    except SettingsError as error:  # of `allow` alone: nothing else is read as JSON
        rule = 'must be a JSON list such as ["package.module:factory"]'
        raise InvalidInputError("PIPEPLAN_AGENT_ALLOW", rule, os.environ.get("PIPEPLAN_AGENT_ALLOW")) from error
