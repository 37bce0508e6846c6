"""Formats in which `pipeplan plan get` prints a plan for scripts: JSON, YAML, and variables of an environment."""

import json
import shlex
from collections.abc import Iterator
from typing import Any

from pipeplan.documents.identity import content_id, plain
from pipeplan.documents.plan import Plan
from pipeplan.errors import require
from pipeplan.formats import spoken_document

GET_FORMATS = ("json", "yaml", "env", "torchrun")
"""The formats of `plan get --format`; torchrun is the service's export."""


def as_yaml(plan: Plan) -> str:
    return "\n".join(_lines(plain_values(plan))) + "\n"


def as_env(plan: Plan) -> str:
    """One line NAME=value each, for a shell's `source`, GitHub's GITHUB_ENV and GitLab's dotenv reports.

    No value needs quotes, because these readers treat quotes differently. Raises InvalidInputError for names that would
    need them.
    """
    values: dict[str, object] = {
        "ID": content_id(plan),
        "PLANNER": plan.planner,
        "ENGINE": plan.engine,
        "SCHEDULE": plan.schedule,
        "STAGES": plan.depth,
        "CUTS": ",".join(str(stage.start) for stage in plan.stages[1:]),
        "REPLICAS": ",".join(str(stage.replicas) for stage in plan.stages),
        "RECOMPUTE": ",".join(str(int(stage.recompute)) for stage in plan.stages),
        "CHUNKS": plan.chunks,
        "WORKERS": plan.workers,
        "TENSOR": plan.form.tensor,
        "CONTEXT": plan.form.context,
        "EXPERT": plan.form.expert,
        "EXPERT_TENSOR": plan.form.expert_tensor_degree,
        "SHARDING": plan.sharding,
        "REPLICATE": plan.replicate,
        "BATCH_SIZE": plan.batch_size,
        "MICROBATCH_SIZE": plan.microbatch_size,
        "MICROBATCHES": plan.microbatches,
        "DTYPE": plan.dtype,
        "OPTIMIZER": plan.optimizer,
        "SAMPLES_PER_S": plan.throughput_samples_per_s,
    }
    lines = []
    for name, value in values.items():
        text = "" if value is None else str(value)
        plain_text = not text or shlex.quote(text) == text
        require(plain_text, f"plan.{name.lower()}", "must be a text that needs no quotes in a shell", text)
        lines.append(f"PLAN_{name}={text}\n")
    return "".join(lines)


def plain_values(plan: Plan) -> Any:
    return json.loads(json.dumps(spoken_document(plan), default=plain))


def _lines(value: Any, indent: str = "") -> Iterator[str]:
    """The lines of a dictionary or a list that is not empty."""
    keyed = isinstance(value, dict)
    pairs = ((f"{key}:", inner) for key, inner in value.items()) if keyed else (("-", inner) for inner in value)
    for head, inner in pairs:
        if isinstance(inner, dict | list) and inner:
            nested = list(_lines(inner, indent + "  "))
            if head == "-":  # the first line of its content follows the dash
                yield f"{indent}- {nested[0].lstrip()}"
                yield from nested[1:]
            else:
                yield f"{indent}{head}"
                yield from nested
        else:
            yield f"{indent}{head} {_scalar(inner)}"


def _scalar(value: Any) -> str:
    """A text is quoted, with escapes for unprintable characters; a float has a point, or readers take it for a text."""
    if isinstance(value, str):
        quoted = json.dumps(value, ensure_ascii=False)
        return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)
    text = json.dumps(value)
    if isinstance(value, float) and "." not in text:
        return text.replace("e", ".0e")
    return text
