"""What Schemathesis knows of our answers, and of its own token.

YAML may hold several documents, which its own reader does not take. The token that it asks with must last: a run that
revokes it sees nothing but 401 from then on, and would call that a success. Ids of jobs and runs are random: half of
the generated ones become those of runs that have ended.
"""

import json
import os
import re
from typing import Any

import schemathesis
from schemathesis import Case, CheckContext, DeserializationContext, HookContext, Response
from schemathesis.core.media_types import YAML_MEDIA_TYPES

TOKEN = "FUZZ_TOKEN"
"""The variable that holds the run's token."""

IDS = "FUZZ_IDS"
"""The variable that holds ids of jobs and runs, by the parameters that name them."""

NOBODYS = "0" * 32
"""The id of no token."""


EVENT = {"type": "object", "properties": {name: {"type": "string"} for name in ("id", "event", "data")}}
"""What each event of a stream is."""


@schemathesis.hook
def before_load_schema(_context: HookContext, raw_schema: dict[str, Any]) -> None:
    """Describes one event in the place of a stream's whole text, as Schemathesis reads the description."""
    for operations in raw_schema["paths"].values():
        for operation in operations.values():
            for response in operation["responses"].values():
                stream = response.get("content", {}).get("text/event-stream", {})
                stream.update({"schema": EVENT} if stream else {})


@schemathesis.deserializer(*YAML_MEDIA_TYPES)
def yaml_text(_context: DeserializationContext, response: Response) -> str:
    """The text itself, as the description has it."""
    return response.content.decode()


@schemathesis.hook
def before_call(_context: HookContext, case: Case[Any], _kwargs: dict[str, Any]) -> None:
    """Keeps the run's own token from being revoked: another id takes its place."""
    given = (case.path_parameters or {}).get("token_id")
    if isinstance(given, str) and given and given in os.environ.get(TOKEN, ""):
        case.path_parameters["token_id"] = NOBODYS


@schemathesis.hook("before_call")
def name_what_is_there(_context: HookContext, case: Case[Any], _kwargs: dict[str, Any]) -> None:
    """Puts ids of what is there in the place of ids that the description allows."""
    for name, ids in json.loads(os.environ.get(IDS, "{}")).items():
        given = (case.path_parameters or {}).get(name)
        if isinstance(given, str) and re.fullmatch("[0-9a-f]{32}", given) and int(given, 16) % 2 == 0:
            case.path_parameters[name] = ids[int(given, 16) // 2 % len(ids)]
        asked = (case.query or {}).get("id")
        if name == "run_id" and case.path == "/v1/runs/calibration" and isinstance(asked, list) and len(asked) > 1:
            case.query["id"] = ids


@schemathesis.check
def token_lasts(_context: CheckContext, response: Response, case: Case[Any]) -> None:
    """A 401 to the run's own token is a failure."""
    sent = response.request.headers.get("Authorization", "")
    if response.status_code == 401 and sent == f"Bearer {os.environ.get(TOKEN, '')}":
        raise AssertionError(f"{case.method} {case.path}: the run's own token is not valid any more")
