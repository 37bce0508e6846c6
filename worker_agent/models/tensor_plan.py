"""Tensor plan: how devices share a Hugging Face model's modules, as in Megatron-LM, derived from the modules.

Linear layers are recognised by their names in the library's families. Those that read a layer's input are shared by
output features, and the one that makes its output by input features: heads of attention, inner features of a
feed-forward network, heads and groups of a state-space or linear-attention mixer. Experts are shared among
expert-parallel devices, each expert's features among tensor-parallel ones. Latent attention (MLA) shares the layers
from latents to heads; the layers that make latents are whole on every device.
"""

from collections.abc import Iterator
from inspect import signature, unwrap
from math import gcd
from typing import Any

from torch import nn

from worker_agent.models.sharding import Sharding, experts_of

_ENTERS = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "g_proj", "q_b_proj", "kv_b_proj", "query_key_value"),
        *("gate_proj", "up_proj", "w1", "w3", "wi_0", "wi_1", "fc1", "fc_in", "c_fc", "dense_h_to_4h"),
        *("in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"),
    }
)
"""Linear layers that are shared by output features."""

_PACKED = frozenset({"gate_up_proj", "input_linear"})
"""Linear layers that are two such layers in one weight."""

_LEAVES = frozenset(
    {
        *("o_proj", "out_proj", "dense", "down_proj", "w2", "wo", "fc2", "fc_out", "c_proj", "dense_4h_to_h"),
        "output_linear",
    }
)
"""Linear layers that are shared by input features."""

_LATENTS = frozenset(
    {
        *("q_a_proj", "kv_a_proj_with_mqa", "f_a_proj", "g_a_proj", "fc1_latent_proj", "fc2_latent_proj"),
        *("wq_b", "wk", "weights_proj"),  # of the indexer that chooses keys (DSA)
    }
)
"""Linear layers that are whole: their output is small, and all heads or experts read all of it."""

_SMALL = 8
"""Other linear layers may be whole if this multiple of their smaller side is at most a token's features: routers."""

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads")
"""Attributes of attention that count heads."""

_MIXER = (
    *("num_heads", "intermediate_size", "n_groups", "conv_dim", "num_v_heads", "num_k_heads", "key_dim", "value_dim"),
    *("qkv_dim", "dt_bias", "A_log", "D"),
)
"""Attributes of state-space and linear-attention mixers that count shared features, and their own parameters."""

_COUNTS = (
    *("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads", "intermediate_size"),
    *("moe_intermediate_size", "n_inner", "linear_num_key_heads", "linear_num_value_heads"),
)
"""Keys of a config that the tensor degree must divide."""

_GPT2 = {
    "transformer.h.*.attn": "divided split_size",
    "transformer.h.*.attn.c_attn": "packed 3",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "transformer.wpe": "positions",
}


_ATTENTION = frozenset({"ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"})
"""The names in code whose attention is torch's."""


def tensor_plan(name: str, root: Any, *, cut: bool, one_kernel: bool) -> Sharding:
    """The plan of a model of family `name`. `cut`: one tensor goes from layer to layer. `one_kernel`: attention's."""
    sequential = _sequential(root) or (None if one_kernel else "attention of several kernels")
    if not cut:
        most = max(experts_in(module) for module in root.modules())
        what = "ALiBi attention" if _has_alibi(root) else "layers that exchange several tensors"
        named = ((prefix, dict(_styles(module, root.config)).get("")) for prefix, module in root.named_modules())
        inside = {prefix: style for prefix, style in named if style in ("experts", "routed")}  # of a layer alone
        return Sharding(styles=inside, divided={}, experts=most, unknown=what, sequential=sequential)
    styles = dict(_GPT2) if name == "gpt2" else {}
    keys, other_names = root.config.to_dict(), root.config.attribute_map  # an attribute may be an error: a layer's own
    divided = {key: keys.get(other_names.get(key, key)) for key in _COUNTS}
    experts = 0
    for prefix, module in root.named_modules() if name != "gpt2" else ():
        own = dict(_styles(module, root.config))
        styles |= {f"{prefix}.{part}".strip("."): style for part, style in own.items()}
        for key in set(own.get("", "").split()[1:]) & set(_HEADS):
            divided[key] = gcd(divided.get(key) or 0, getattr(module, key))
        experts = experts_in(module) or experts
        if isinstance(getattr(module, "k_proj", None), nn.Linear) and isinstance(
            getattr(module, "head_dim", None), int
        ):
            heads = module.k_proj.out_features // module.head_dim
            divided["num_key_value_heads"] = gcd(divided.get("num_key_value_heads") or 0, heads)
        counts = (("the heads of its mixers", "num_heads"), ("n_groups", "n_groups")) if _is_mixer(module) else ()
        divided |= {what: getattr(module, key) for what, key in counts if hasattr(module, key)}
    embeddings = root.get_input_embeddings(), root.get_output_embeddings()
    names = {module: prefix for prefix, module in root.named_modules()}
    styles |= {names[embedding]: "vocabulary" for embedding in embeddings if embedding in names}
    large = getattr(embeddings[0], "embedding_dim", 0) // _SMALL
    unknown = (
        prefix
        for module, prefix in names.items()
        if isinstance(module, nn.Linear)
        and prefix not in styles
        and prefix.rpartition(".")[2] not in _LATENTS
        and min(module.in_features, module.out_features) > large
    )
    return Sharding(
        styles=styles,
        divided={key: count for key, count in divided.items() if isinstance(count, int)},
        experts=experts,
        unknown="ALiBi attention" if _has_alibi(root) else next(unknown, None),
        sequential=sequential,
    )


def experts_in(module: Any) -> int:
    """The number of experts that a module has as weights of three dimensions; 0 for other modules."""
    held = experts_of(module) if isinstance(module, nn.Module) else {}
    known = len(held) == 2 and all(weight.dim() == 3 for weight in held.values())
    return len(next(iter(held.values()))) if known else 0


def _sequential(root: Any) -> str | None:
    """The first module that sees a whole sequence by other means than torch's attention: a convolution or own heads."""
    for prefix, module in root.named_modules():
        children, names = list(module.children()), unwrap(type(module).forward).__code__.co_names
        heads = any(isinstance(child, nn.Linear) for child in children) and any(hasattr(module, key) for key in _HEADS)
        convolves = any(isinstance(child, nn.Conv1d) for child in children)
        if convolves or (heads and not _ATTENTION & set(names)):
            return str(prefix)
    return None


def _has_alibi(root: Any) -> bool:
    """Whether attention adds a number for each distance, which the model makes for all heads."""
    return bool(root.config.to_dict().get("alibi")) or any("alibi_tensor" in key for key in dir(root.base_model))


def _is_mixer(module: Any) -> bool:
    """Whether a module is a state-space or linear-attention mixer, with a convolution over the sequence."""
    makes = any(isinstance(getattr(module, key, None), nn.Linear) for key in ("out_proj", "o_proj"))
    return makes and any(isinstance(getattr(module, key, None), nn.Conv1d) for key in ("conv1d", "conv"))


def _styles(module: Any, config: Any) -> Iterator[tuple[str, str]]:
    """The styles of a module's parts by name, and its own by none."""
    if type(module).__name__.endswith("RotaryEmbedding"):
        yield "", "rotary"
    elif experts_in(module):
        yield "", "experts"
    elif experts_in(getattr(module, "experts", None)) and len(signature(module.experts.forward).parameters) == 1:
        yield "", "routed"  # Llama 4's experts all compute all tokens: the module dispatches them instead
    elif _is_mixer(module):
        yield from mixer_styles(module)
    elif not isinstance(module, nn.Linear):
        yield from layer_styles(module, config)


def layer_styles(module: Any, config: Any) -> Iterator[tuple[str, str]]:
    """Attention and feed-forward networks: linear layers that read, and one that makes the output."""
    linear = {key: part for key, part in module.named_children() if isinstance(part, nn.Linear)}
    reading = {key: "colwise" for key in linear if key in _ENTERS} | {
        key: "packed 2" for key in linear if key in _PACKED
    }
    making = [key for key in linear if key in _LEAVES]
    fused = "qkv_proj" if "qkv_proj" in linear else "Wqkv" if "Wqkv" in linear else None
    if fused is not None:
        queries = config.num_attention_heads * getattr(module, "head_dim", 0)
        others = (linear[fused].out_features - queries) // 2
        reading[fused] = f"packed {queries}+{others}+{others}"
    if not reading or len(making) != 1:
        return
    yield from reading.items()
    yield making[0], "rowwise"
    own = [key for key in _HEADS if isinstance(getattr(module, key, None), int)]
    own += ["config"] if fused is not None else []
    own += ["hidden_size"] if fused == "Wqkv" and getattr(module, "hidden_size", 0) == queries else []
    own += [
        key for key, p in module.named_parameters(recurse=False) if len(p) == getattr(config, "num_attention_heads", 0)
    ]
    if own:
        yield "", f"divided {' '.join(own)}"
    for norm, over in (("q_norm", "q_proj"), ("k_norm", "k_proj")):  # over all heads, not over each
        weight = getattr(getattr(module, norm, None), "weight", None)
        if (
            over in reading
            and weight is not None
            and len(weight) == linear[over].out_features != getattr(module, "head_dim", 0)
        ):
            yield norm, "divided weight"


def mixer_styles(module: Any) -> Iterator[tuple[str, str]]:
    """State-space and linear-attention mixers, whose convolution has the heads' and the groups' features."""
    linear = {key: part for key, part in module.named_children() if isinstance(part, nn.Linear)}
    convolution, making = (
        "conv1d" if hasattr(module, "conv1d") else "conv",
        "out_proj" if "out_proj" in linear else "o_proj",
    )
    enters = {key: "colwise" for key in linear if key in _ENTERS}
    if {"q_proj", "k_proj", "v_proj"} <= linear.keys():  # delta nets of separate layers, gates of latents among them
        features = [linear[key].out_features for key in ("q_proj", "k_proj", "v_proj")]
        inputs = {convolution: features}
        enters = {key: "colwise" for key in linear if key != making and not key.endswith("_a_proj")}
        for name, gate in module.named_children():
            if hasattr(gate, "f_b_proj"):
                yield f"{name}.f_b_proj", "colwise"
                yield name, _divided(gate)
    elif hasattr(module, "key_dim"):  # gated delta net
        features = [module.key_dim, module.key_dim, module.value_dim]
        inputs = {"in_proj_qkv": features, convolution: features}
    elif hasattr(module, "x_proj"):  # Mamba's first form
        features = [module.intermediate_size]
        inputs = {"in_proj": [*features, *features], "dt_proj": features, convolution: features}
        yield "x_proj", "reduced"
    elif convolution == "conv":  # a short convolution between two gates
        features = [linear[making].in_features]
        inputs = {"in_proj": features * 3, convolution: features}
    else:
        groups = module.n_groups * module.ssm_state_size
        features = [module.intermediate_size, groups, groups]
        inputs = {"in_proj": [module.intermediate_size, *features, module.num_heads], convolution: features}
        if getattr(getattr(module, "norm", None), "weight", None) is not None:
            yield "norm", "divided weight"
    sizes = {key: "+".join(map(str, parts)) if len(parts) > 1 else "1" for key, parts in inputs.items()}
    yield from (enters | {key: f"packed {parts}" for key, parts in sizes.items()}).items()
    yield making, "rowwise"
    if convolution != "conv":
        yield "", _divided(module)


def _divided(module: Any) -> str:
    return f"divided {' '.join(key for key in _MIXER if isinstance(getattr(module, key, None), int | nn.Parameter))}"
