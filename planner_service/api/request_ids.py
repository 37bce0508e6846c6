"""Request ids: in every answer, every log line and every problem. A caller's own is taken where it is a plain word."""

import re
import secrets

from starlette.datastructures import Headers

from planner_service.logs import REQUEST_ID

HEADER = "X-Request-ID"
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def assign(headers: Headers) -> str:
    """The request's id, from here on this request's in the logs."""
    given = headers.get(HEADER, "")
    request_id = given if _SANE.fullmatch(given) else secrets.token_hex(16)
    REQUEST_ID.set(request_id)
    return request_id
