"""Aliases: names that point at plans, for whoever must not know ids, and what they pointed at before."""

import re
from datetime import datetime
from typing import Literal

from pydantic import Field

from pipeplan.errors import require
from planner_service.contract.listing import ListQuery, Name
from planner_service.contract.wire import Wire

MAX_CHARACTERS = 200
PATTERN = r"^[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*$"
RESERVED = ("plan", "history")
"""Last parts that would be taken for what is asked about an alias."""

_ID = re.compile(r"[0-9a-f]{32}")


class AliasTarget(Wire):
    """Where an alias is to point."""

    plan_id: str = Field(min_length=1, max_length=64, description="id of a stored plan")


class Alias(Wire):
    """A name, and the plan that it points at. `version` changes with every move and is its entity tag."""

    name: str
    plan_id: str
    version: int
    moved_by: str = Field(description="the name of the token that moved it, or `local`")
    moved_at: datetime
    created_at: datetime


class AliasMove(Wire):
    """An alias was set: to a plan, or to none when it was deleted."""

    version: int
    plan_id: str | None
    moved_by: str
    moved_at: datetime


class AliasQuery(ListQuery):
    """Which aliases, and in which order: a minus before it is from the last to the first. Default: newest first."""

    sort: Literal["created_at", "-created_at", "name", "-name"] | None = None
    plan_id: Name | None = Field(default=None, description="those that point at this plan")


def require_name(name: str) -> None:
    """Raises InvalidInputError unless the name can be an alias's, and cannot be taken for a plan's id."""
    require(0 < len(name) <= MAX_CHARACTERS, "name", f"must have 1 to {MAX_CHARACTERS} characters", name)
    rule = "must consist of a-z, 0-9, '.', '_' and '-', in parts that '/' separates and a letter or digit starts"
    require(re.fullmatch(PATTERN.strip("^$"), name) is not None, "name", rule, name)
    require(not is_plan_id(name), "name", "must not look like a plan's id", name)
    last = name.rpartition("/")[2]
    require("/" not in name or last not in RESERVED, "name", f"must not end with /{' or /'.join(RESERVED)}", name)


def is_plan_id(name: str) -> bool:
    """Whether the text is a plan's id, and not an alias's name."""
    return _ID.fullmatch(name) is not None
