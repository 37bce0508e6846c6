"""Reference: docs/client.md, from the clients' docstrings: `python -m pipeplan.client.reference > docs/client.md`."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_origin

import pipeplan
import pipeplan.errors
from pipeplan.client.client import AsyncClient, Client
from pipeplan.client.reading import Items

_OPENING = """# The Python client

<!-- Written by `python -m pipeplan.client.reference > docs/client.md`: edit the docstrings. -->

```python
from pipeplan import Client, Profile, load
from pipeplan.protocol.plans import PlanQuery, PlanRequest

with Client() as service:  # PIPEPLAN_URL, PIPEPLAN_TOKEN
    profile = service.create_profile(load(Profile, "profile.json"))
    request = PlanRequest(profile_id=profile.id, cluster_id="dgx-a100:2", planner="auto", batch_size=64)
    answer = service.create_plan(request, wait_s=5)
    service.set_alias("gpt-prod", answer.plan_id)
    for plan in service.plans(PlanQuery(sort="-throughput"), limit=10):
        print(plan.id, plan.throughput_samples_per_s)
```

```python
from pipeplan import AsyncClient

async with AsyncClient() as service:
    plan = await service.plan(await service.plan_id("gpt-prod"))
    async for event in service.follow_job("..."):
        print(event.kind, event.data)
```
"""

_AGAIN = """## What is sent again

| | after a broken connection, or a proxy's 502 or 504 | after 429, 503 or a request in flight |
|---|---|---|
| GET; PUT without a condition; POST, which always has an idempotency key | yes | yes |
| DELETE; PUT with a version, or only if new | if it was not sent | yes |

Pauses begin with 0.2 s and double up to 5 s. They are not shorter than `Retry-After`, and nothing is sent after
`patience_s`: the last failure is then raised.
"""


_TYPES = """
What the methods take and return, with its fields and properties.

| | from | it has |
|---|---|---|"""


def written() -> str:
    """The whole reference."""
    parts = [_OPENING]
    kinds = (Client, AsyncClient)
    parts += [f"## {kind.__name__}\n\n{_signed(kind.__name__, kind)}\n\n{inspect.getdoc(kind)}\n" for kind in kinds]
    parts += [
        _AGAIN,
        "## Operations\n\nThese are `Client`'s. `AsyncClient` has the same, to be awaited or read with `async for`.\n",
    ]
    for name, method in _own(Client):
        parts.append(f"### {name}\n\n{_signed(name, method)}\n\n{inspect.getdoc(method)}\n")
    parts.append(f"## Lists\n\n{inspect.getdoc(Items)}\n")
    parts += [f"- `{name}()`: {inspect.getdoc(method)}" for name, method in _own(Items)]
    tree = (inspect.getdoc(pipeplan.errors) or "").split("\n\n")[1]
    same = "The same as those of the commands, from `pipeplan.errors`:"
    parts += ["\n## Types", _TYPES, *map(_row, sorted(set(_types()), key=lambda kind: kind.__name__))]
    parts.append(f"\n## Errors\n\n{same}\n\n```\n{inspect.cleandoc(tree)}\n```\n")
    return "\n".join(parts)


def _types() -> Iterator[type]:
    """The classes of ours that the methods take and return, in lists and unions as well."""
    signed = [inspect.signature(method) for _, method in _own(Client)]
    waiting = [one.annotation for each in signed for one in each.parameters.values()]
    waiting += [each.return_annotation for each in signed]
    while waiting:
        hint = waiting.pop()
        waiting += [each for each in get_args(hint) if not isinstance(each, str)]
        if isinstance(hint, list):  # a callable's arguments
            waiting += hint
        kind = get_origin(hint) or hint
        if isinstance(kind, type) and kind.__module__.startswith("pipeplan.") and kind is not Items:
            yield getattr(kind, "__pydantic_generic_metadata__", {}).get("origin") or kind


def _row(kind: type) -> str:
    home = "pipeplan" if kind.__name__ in pipeplan.__all__ else kind.__module__
    fields = getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", {})
    named = [*fields, *(name for name, value in vars(kind).items() if isinstance(value, property))]
    shown = ", ".join(f"`{name}`" for name in named if not name.startswith("_"))
    return f"| `{kind.__name__}` | `{home}` | {shown} |"


def _own(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    names = (name for each in kind.__mro__[:-1] for name in vars(each) if not name.startswith("_") and name != "close")
    return ((name, getattr(kind, name)) for name in names)


def _signed(name: str, called: Callable[..., Any]) -> str:
    """The signature: types without their modules, and without arguments for tests."""
    signature = inspect.signature(called)
    kept = [one for one in signature.parameters.values() if one.name not in ("self", "transport", "clock")]
    text = _ANNOTATED.sub(r"\1", str(signature.replace(parameters=kept)))
    if isinstance(called, type):
        text = text.removesuffix(" -> None")
    return f"```python\n{name}{_MODULE.sub('', text)}\n```"


_ANNOTATED = re.compile(r"(?:\w+\.)*Annotated\[([^,\]]*), FieldInfo\(.*?\)\]")
_MODULE = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)*\.(?=[A-Z])")


if __name__ == "__main__":
    sys.stdout.write(written())
