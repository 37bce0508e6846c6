"""The worst bodies of a route: one of every kind, as large as the route takes."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

DIGITS = 4300
"""The longest number that is accepted."""

AROUND: dict[str, tuple[str, str]] = {
    "/v1/profiles": ('{"blocks":', "}"),
    "/v1/clusters": ('{"levels":', "}"),
    "/v1/plans": ('{"calibration":{"forward":{"values":', "}}}"),
    "/v1/jobs": ('{"kind":"run","agents":', "}"),
    "/v1/jobs/lease": ('{"kinds":', "}"),
    "/v1/jobs/{job_id}/complete": ('{"token":"x","result":{"kind":"links","cluster":{"levels":', "}}}"),
    "/v1/agents": ('{"allow":', "}"),
    "/v1/tokens": ('{"scopes":', "}"),
}
"""The place at which each route expects a list."""

MEASUREMENT: dict[str, Any] = {
    "microbatch_size": 1,
    "forward_s": 0.00123456789,
    "backward_s": 0.0023456789,
    "input_bytes": 1234567,
    "output_bytes": 2345678,
    "activation_bytes": 3456789,
}
LEVEL = {"size": 1, "bandwidth_bytes_per_s": 1e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A body, and its fault."""

    kind: str
    content: bytes


def bodies_of(path: str, most_bytes: int) -> Iterator[Body]:
    """The bodies for a route, one at a time: they are large."""
    if path == "/login":
        yield Body(kind="separators", content=b"&" * most_bytes)
        yield Body(kind="escapes", content=b"token=" + b"%41" * ((most_bytes - 6) // 3))
        yield Body(kind="invalid UTF-8", content=b"token=" + b"\xff" * (most_bytes - 6))
        return
    before, after = (text.encode() for text in AROUND.get(path, ('{"token":', "}")))
    room = most_bytes - len(before) - len(after) - 2

    def filled(item: bytes) -> bytes:
        return before + b"[" + b",".join([item] * (room // (len(item) + 1))) + b"]" + after

    yield Body(kind="wrong items", content=filled(b"0"))
    yield Body(kind="texts for numbers", content=filled(b'"1"'))
    yield Body(kind="tiny objects", content=filled(b"{}"))
    yield Body(kind="empty lists", content=filled(b"[]"))
    yield Body(kind="long numbers", content=filled(b"9" * min(DIGITS, room // 4)))
    yield Body(kind="one number", content=before + b"9" * room + after)
    yield Body(kind="one text", content=before + b'"' + b"x" * room + b'"' + after)
    yield Body(kind="backslashes", content=before + b'"' + b"\\" * (room - 6) + b'u0000"' + after)
    yield Body(kind="unknown keys", content=_keys(most_bytes))
    yield Body(kind="one key again and again", content=b"{" + b'"":0,' * ((most_bytes - 6) // 5) + b'"":0}')
    yield Body(kind="deep lists", content=before + b"[" * (room + 1))
    yield Body(kind="invalid UTF-8", content=before + b'"' + b"\xff" * room + b'"' + after)
    yield Body(kind="blanks", content=b" " * most_bytes)
    if path in VALID:
        yield Body(kind="a valid document", content=VALID[path](most_bytes))


def _keys(most_bytes: int) -> bytes:
    return b"{" + b",".join(b'"%08x":0' % number for number in range((most_bytes - 2) // 13)) + b"}"


def _repeated(make: Callable[[int], Any], most_bytes: int, room: int) -> list[Any]:
    return [make(number) for number in range((most_bytes - room) // (len(json.dumps(make(10**6))) + 2))]


def _profile(most_bytes: int) -> bytes:
    blocks = _repeated(
        lambda number: {"name": f"block {number}", "weight_bytes": 4, "measurements": [MEASUREMENT]}, most_bytes, 500
    )
    device = {"name": "d", "memory_bytes": 10**9}
    return json.dumps({"model": {"name": "m"}, "device": device, "dtype": "float32", "blocks": blocks}).encode()


def _cluster(most_bytes: int) -> bytes:
    levels = _repeated(lambda _number: LEVEL, most_bytes, 200)
    return json.dumps({"device": {"name": "d", "memory_bytes": 10**9}, "levels": levels}).encode()


def _request(most_bytes: int) -> bytes:
    values = [1.0123456789] * ((most_bytes - 500) // 14)
    calibration = {
        "model": {"name": "m"},
        "device": "d",
        "dtype": "float32",
        "profile_id": "0",
        "cluster_id": "0",
        "runs": [],
        "forward": {"values": values},
    }
    asked = {"profile_id": "0" * 32, "cluster_id": "0" * 32, "planner": "gpipe", "batch_size": 1}
    return json.dumps(asked | {"calibration": calibration}).encode()


def _completion(most_bytes: int) -> bytes:
    """The completion of a job that nobody holds: it is read and packed before the job is looked up."""
    events = (most_bytes - 2000) // 60
    compared = {"predicted": 1.0, "measured": 1.0}
    lane = {
        "rank": 0,
        "stage": 0,
        "replica": 0,
        "instructions": [f"F{number % 1000}" for number in range(events)],
        "start_s": [number / 997 for number in range(events)],
        "end_s": [(number + 1) / 997 for number in range(events)],
        "memory_bytes": [123456] * events,
    }
    report = {"schedule": "gpipe", "first_step": 0, "steps": 1, "batch_size": 1, "losses": [0.5], "elapsed_s": 1.0}
    report |= {"throughput_samples_per_s": compared, "bubble_fraction": compared, "stages": [], "ranks": []}
    timeline = {"lanes": [lane], "batch_size": 1, "batches": 1}
    return json.dumps({"token": "x", "result": {"kind": "run", "report": report, "timeline": timeline}}).encode()


VALID: dict[str, Callable[[int], bytes]] = {
    "/v1/profiles": _profile,
    "/v1/clusters": _cluster,
    "/v1/plans": _request,
    "/v1/jobs/{job_id}/complete": _completion,
}
