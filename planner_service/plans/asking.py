"""Asking by a form: its fields, the API's request that they make, and the same request as two commands.

    fields of the form ──document_of──▶ document ──checked──▶ refused, or right
                                           ├──curl_of──▶ curl ... -d DOCUMENT
                                           └──command_of──▶ pipeplan plan create ...

Every option of a request is a field. A field left empty is not in the document. Only the checks of the API's requests
check a field's content.
"""

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from pipeplan.documents.engines import OUR_RUNTIME
from pipeplan.documents.identity import canonical_json
from pipeplan.planners.problem import Options
from pipeplan.protocol.estimates import ModelPlanRequest, parse_plan_request
from pipeplan.protocol.plans import CHOICES, PlanRequest
from planner_service.plans import estimates
from planner_service.plans import service as plans
from planner_service.plans.questions import Posed
from planner_service.platform.context import Context

YES, NO = "true", "false"

FIRST = ("microbatch_size", "schedule", "optimizer", "engine", "synchronous")
"""The most common options."""

SWITCHES = {"split_backward": ("--two-bp", "--no-two-bp"), "split_backward_half_way": ("--two-bp-half-way", "")}
CUT_FLAGS = {"forced_cuts": "--force-cut", "forbidden_cuts": "--forbid-cut"}
"""The command's flags whose names differ from their options."""

WHEN_LEFT_OUT = {
    "synchronisation": "all-reduce",
    "semantics": "played",
    "cuts": "any",
    "engine": OUR_RUNTIME,
    "optimizer": "sgd, for other engines adamw",
    "recompute_factor": "from the profile",
    "compression_ratio": "none",
    "master_weights": "for 16 bits",
    "sequence_parallel": "with tensor",
    "offload": "nothing, where anything fits",
    "time_limit_s": "none",
}
"""The defaults of the options that no planner chooses."""

LABELS = {
    "split_backward": "Split backward (2BP)",
    "split_backward_half_way": "2BP half-way",
    "time_limit_s": "Time limit, seconds",
}
"""The options whose name in words is not clear enough."""

HINTS = {
    "microbatch_size": "samples",
    "schedule": "the order in which ranks compute",
    "synchronous": "only schedules that train as one process does",
    "stages": "parts of the pipeline, one a rank",
    "chunks": "stages a rank, in 1f1b-interleaved",
    "recompute": "run the forward again instead of keeping activations",
    "recompute_unit": "what is run again at a time",
    "synchronisation": "how pipedream exchanges gradients",
    "memory": "how memory is counted",
    "optimizer": "what updates the weights",
    "recompute_factor": "c_extra of PipeDream-2BW",
    "safe_batch": "the batch may be smaller, but not larger",
    "master_weights": "gradients, weights and states in float32",
    "semantics": "what plans are compared by",
    "compression_ratio": "of boundaries, with semantics release",
    "straight": "pipedream: one replica a stage",
    "fewer_machines": "pipedream: leave devices idle",
    "cuts": "where a graph may be cut",
    "forced_cuts": "a stage begins at these blocks",
    "forbidden_cuts": "no stage begins at these blocks",
    "split_backward": "inputs' gradients first, weights' gradients later",
    "split_backward_half_way": "auto: where 2BP is used, its variant with less memory",
    "time_limit_s": "exact: the best plan found by then",
    "as_if": "take the cluster's devices for the profile's",
    "engine": "what runs the plan",
    "tensor": "devices that share a block's matrices",
    "sequence_parallel": "with tensor: share tokens, too",
    "context": "devices that share a sequence",
    "expert": "groups of devices that share a block's experts",
    "expert_tensor": "the experts' own tensor degree: 1 or the tensor degree",
    "data": "replicas of the pipeline",
    "sharding": "the states that replicas share",
    "graphs": "launch layers as CUDA graphs",
    "replicate": "groups of replicas that share them each",
    "a2a_overlap": "all-to-all of experts beside another microbatch's compute",
    "offload": "what is kept in the host's memory",
    "offload_share": "the share of layers whose activations are there",
}
"""The description of each option."""

Kind = Literal["number", "text", "choice", "numbers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option as a field: its possible values (`choices` with their texts), and its default."""

    name: str
    kind: Kind
    choices: tuple[tuple[str, str], ...]
    default: str

    @property
    def label(self) -> str:
        return LABELS.get(self.name) or self.name.replace("_", " ").capitalize()

    @property
    def hint(self) -> str:
        return HINTS[self.name]


@cache
def options() -> tuple[Option, ...]:
    """All options of a request, the most common first."""
    hints = get_type_hints(Options)
    found = [_option(field.name, hints[field.name], field.default) for field in fields(Options)]
    return tuple(sorted(found, key=lambda option: FIRST.index(option.name) if option.name in FIRST else len(FIRST)))


def _option(name: str, hint: Any, default: Any) -> Option:
    kinds = {kind for kind in get_args(hint) or (hint,) if kind is not NoneType}
    choices = tuple((each, each) for each in CHOICES.get(name, ()))
    kind: Kind = "choice" if choices else "text"
    if bool in kinds:
        kind, choices = "choice", ((YES, "yes"), (NO, "no")) if default is None else ((YES, "yes"),)
    elif kinds & {int, float}:
        kind = "numbers" if isinstance(default, tuple) else "number"
    shown = default if isinstance(default, str) else {False: "no", (): "none"}.get(default, "the best")
    shown = WHEN_LEFT_OUT.get(name, shown)
    others = tuple(choice for choice in choices if choice[1] != shown)  # the default is the empty choice
    return Option(name=name, kind=kind, choices=others, default=shown)


def document_of(given: Mapping[str, str]) -> dict[str, Any]:
    """The request's document that a form's fields make, not checked yet."""
    by_name = {option.name: option for option in options()}
    document: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    for name, text in ((name, text.strip()) for name, text in given.items()):
        if not text:
            continue
        if name in by_name:
            chosen[name] = _value(text, by_name[name].kind, by_name[name].choices)
        elif name == "options":  # no field of the form: it is refused among the options
            chosen[name] = text
        elif name == "other_profile_ids":
            document[name] = text.replace(",", " ").split()
        else:
            document[name] = _value(text, "number" if name in ("batch_size", "sequence_length") else "text", ())
    return document | ({"options": chosen} if chosen else {})


def _value(text: str, kind: Kind, choices: tuple[tuple[str, str], ...]) -> Any:
    """The text's value, or the text itself if it has none: the API then reports the error."""
    if kind == "numbers":
        return [_value(part, "number", ()) for part in text.replace(",", " ").split()]
    if kind == "choice" and (YES, "yes") in choices:
        return {YES: True, NO: False}.get(text, text)
    if kind != "number":
        return text
    try:
        number = json.loads(text)
    except ValueError:
        return text
    return number if type(number) is int or (type(number) is float and math.isfinite(number)) else text


def checked(context: Context, document: Mapping[str, Any]) -> PlanRequest | ModelPlanRequest:
    """The request of the document. Raises InvalidInputError for all that the API refuses before a planner runs."""
    asked = parse_plan_request(canonical_json(document).encode())
    if isinstance(asked, ModelPlanRequest):
        estimates.check(context, estimates.task_of(context, asked))
    else:
        posed = plans.posed(context, asked)
        context.parsing.read_stored(Posed.check, posed, posed.size)
    return asked


def curl_of(document: Mapping[str, Any], origin: str, *, token: bool) -> str:
    """The request as a `curl` command for a shell; with `token` it sends the one in PIPEPLAN_TOKEN."""
    bearer = ' \\\n  -H "Authorization: Bearer $PIPEPLAN_TOKEN"' if token else ""
    body = shlex.quote(json.dumps(document))
    return f"curl -s {shlex.quote(origin + '/v1/plans')} -H 'Content-Type: application/json'{bearer} \\\n  -d {body}"


def command_of(document: Mapping[str, Any], origin: str) -> str:
    """The request as a `pipeplan` command for a shell; the client finds a token in PIPEPLAN_TOKEN by itself."""
    words = ["--url", origin]
    names = {"profile_id": "profile", "cluster_id": "cluster"}
    for name, value in document.items():
        if name == "other_profile_ids":
            words += [word for each in value for word in ("--profile", str(each))]
        elif name != "options":
            words += [f"--{names.get(name, name).replace('_', '-')}", str(value)]
    for name, value in document.get("options", {}).items():
        flag = f"--{name.replace('_', '-')}"
        if name in CUT_FLAGS:
            words += [word for cut in value for word in (CUT_FLAGS[name], str(cut))]
        elif isinstance(value, bool):
            words.append(SWITCHES.get(name, (flag, f"--no-{flag[2:]}"))[0 if value else 1])
        else:
            words += [flag, str(value)]
    first, *more = (shlex.quote(word) for word in words)
    pairs = "".join(f" \\\n  {word}" if word.startswith("--") else f" {word}" for word in more)
    return f"pipeplan plan create {first}{pairs}"
