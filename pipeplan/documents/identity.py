"""Identity: the same content has the same id, on every machine and under every release.

An id is a hash of the document's canonical text. That text has every field of the document's first version, and a later
one only where it is not at its default: a field that a release adds changes the id of nothing that was stored before,
and no id has to be stored again. A field that has moved or been renamed since is in its old place, under its old name.
To change this rule, add a second version of it, and keep this one for existing ids.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

FIRST_FIELDS: Mapping[str, str] = {
    "Alternative": "",
    "Block": "",
    "BlockKind": "expert_parameters",
    "BlockFactors": "spread observations",
    "Calibration": "forward backward backward_input backward_weight forward_without_graph recompute "
    "backward_after_forward instruction_s update_s_per_byte version_s_per_byte exchange_factor levels "
    "activation_factor context_bytes",
    "Certificate": "witness",
    "DegreeChoice": "",
    "ClosedForm": "",
    "Cluster": "device groups",
    "Collective": "count",
    "CollectiveShares": "",
    "Collectives": "",
    "Device": "context_bytes allocator_reserve",
    "DeviceGroup": "",
    "Host": "",
    "Form": "tensor sequence_parallel context expert",
    "FormMeasurement": "workspace_bytes backward_input_s backward_weight_s forward_collectives backward_collectives "
    "selective",
    "Level": "latency_s",
    "LevelTerms": "",
    "Measurement": "backward_input_s backward_weight_s workspace_bytes forward_spread_s backward_spread_s "
    "weight_gradient_bytes",
    "Method": "concurrent_devices torch_version",
    "Model": "spec",
    "ModelForm": "",
    "Overheads": "update_s_per_byte version_s_per_byte instruction_s forward_without_graph recompute "
    "backward_after_forward exchange_factor",
    "Options": "microbatch_size schedule stages chunks recompute recompute_unit synchronisation memory optimizer "
    "recompute_factor safe_batch master_weights semantics compression_ratio straight fewer_machines cuts forced_cuts "
    "forbidden_cuts split_backward split_backward_half_way time_limit_s as_if engine tensor sequence_parallel context "
    "expert data sharding offload",
    "Plan": "simulated alternatives order certificate pareto master_weights split_backward split_backward_half_way "
    "chunks estimated interpolated calibration_id",
    "Profile": "overheads method edges estimated",
    "Routing": "",
    "RunUsed": "",
    "Selective": "",
    "Simulated": "extrapolated_from",
    "Stage": "replicas recompute time_s memory_bytes memory device",
    "StageCosts": "recompute_s update_s reduce_s activation_transfer_s gradient_transfer_s latency_s instruction_s "
    "activation_bytes input_bytes version_bytes fixed_bytes activation_port_devices gradient_port_devices "
    "reduce_port_devices weight_gradient_bytes reduce_tail_s gradient_bytes",
    "StageMemory": "weights gradients master_weights optimizer_states activations transient buffers",
    "Term": "spread observations",
    "TiedStages": "",
    "TiedWeights": "",
    "Worker": "replica",
}
"""By class, the fields with a default that are in every id. Frozen: no name is ever added to a class that is here. A
new class of documents is added once, without names.
"""

FIRST_PLACES: Mapping[str, str] = {"Plan": "closed_form"}
"""By class, the field in whose place an id's text has that field's own fields: a plan's first version had the closed
form's figures among its own.
"""

FIRST_NAMES: Mapping[str, tuple[str, str]] = {
    "Alternative": ("closed_form_samples_per_s", "throughput_samples_per_s"),
}
"""By class, a field and the name under which an id's text has it while the field of that name is None: an alternative's
first version had one throughput, played or not.
"""

ADDED: Mapping[str, tuple[str, str]] = {"Plan": ("simulated", "added_within")}
"""By class, a field that may be added to a stored document, and the field of its value that says so: an id's text has
None in its place, as the document had when it was stored.
"""


def canonical_json(content: Any) -> str:
    """The one JSON text of a dataclass or plain value: sorted keys, no spaces, NaN refused."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_fields)


def content_id(content: Any) -> str:
    """32 hexadecimal digits of the content's SHA-256."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_first_shape)
    return text_id(text)


def text_id(canonical: str) -> str:
    """The same for a canonical text, for documents that still have their first version's shape: all but plans."""
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def known_id(document: Any) -> str:
    """`content_id` of a document that is needed repeatedly: all planners name the same profile."""
    return _known_id(Same(document))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Same:
    """A document by its identity: comparing large documents by value is too slow."""

    content: Any

    def __hash__(self) -> int:
        return id(self.content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.content is other.content


@lru_cache(maxsize=8)
def _known_id(same: Same) -> str:
    return content_id(same.content)


def plain(content: Any) -> Any:
    """The document's plain values, as in its canonical text."""
    if dataclasses.is_dataclass(content):
        return {name: plain(value) for name, value in _fields(content).items()}
    return tuple(map(plain, content)) if isinstance(content, tuple) else content


def _fields(content: Any) -> dict[str, Any]:
    """A dataclass as a dictionary, one level deep, without later fields at their default."""
    kind: Any = type(content)
    names, later = _names_and_later(kind)
    values = {name: getattr(content, name) for name in names}
    for name in _float_names(kind):
        if type(values[name]) in (int, tuple):  # a whole number is written as it is read: 1.0
            values[name] = float(values[name]) if type(values[name]) is int else tuple(map(float, values[name]))
    return {name: value for name, value in values.items() if name not in later or value != later[name]}


def _first_shape(content: Any) -> dict[str, Any]:
    """The same with the fields where, and under the names that, the first version had them: the text of an id."""
    kind, values = type(content), _fields(content)
    if kind.__name__ in ADDED:
        name, mark = ADDED[kind.__name__]
        if getattr(values[name], mark, None) is not None:
            values[name] = None
    if kind.__name__ in FIRST_PLACES:
        values |= _first_shape(values.pop(FIRST_PLACES[kind.__name__]))
    if kind.__name__ in FIRST_NAMES:
        now, first = FIRST_NAMES[kind.__name__]
        if now in values and values[first] is None:
            values[first] = values.pop(now)
    return values


@cache
def _float_names(kind: Any) -> tuple[str, ...]:
    """The names of a class's fields of floats, for which Python takes whole numbers too."""
    floats = (float, float | None, tuple[float, ...])
    return tuple(field.name for field in dataclasses.fields(kind) if field.type in floats)


@cache
def _names_and_later(kind: Any) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """The names of a class's fields, and the defaults of those that came after its documents' first version.

    A field without a default is in every document, and a class that is not in `FIRST_FIELDS` has no later ones.
    """
    fields = dataclasses.fields(kind)
    names = tuple(field.name for field in fields)
    if kind.__name__ not in FIRST_FIELDS:
        return names, {}
    later = {}
    for field in fields:
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.name not in FIRST_FIELDS[kind.__name__].split() and default is not dataclasses.MISSING:
            later[field.name] = default
    return names, later
