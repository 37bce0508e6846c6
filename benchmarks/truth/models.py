"""Models: the SPECs of the published models that the data names, by the letters and digits of their names."""

from collections.abc import Mapping

LENGTH = 8192


def _gpt(hidden: int, layers: int, heads: int, vocabulary: int, more: Mapping[str, object]) -> str:
    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "vocabulary": vocabulary, "tied": "true", **more}
    return "preset:transformer?" + "&".join(f"{name}={value}" for name, value in sizes.items())


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, family: str = "llama"
) -> str:
    return (
        f"hf:{family}?hidden_size={hidden}&num_hidden_layers={layers}&num_attention_heads={heads}"
        f"&num_key_value_heads={kv_heads}&intermediate_size={ffn}&vocab_size={vocabulary}"
        f"&max_position_embeddings={LENGTH}&tie_word_embeddings=false"
    )


def _nemotron(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> str:
    return _llama(hidden, layers, heads, kv_heads, ffn, 256_000, "nemotron")


_GPT3 = {"sequence_length": 2048, "fused": "true"}
_QWEN3_MOE = (
    "hf:qwen3_moe?hidden_size={hidden}&num_hidden_layers={layers}&num_attention_heads={heads}&num_key_value_heads=4"
    "&head_dim=128&moe_intermediate_size={ffn}&num_experts=128&num_experts_per_tok=8&vocab_size=151936"
    "&max_position_embeddings=8192"
)
_GPT_OSS = "hf:gpt_oss?num_hidden_layers={layers}&num_local_experts={experts}&num_experts_per_tok=4&hidden_size=2880"

MODELS = {
    "gpt35b": _gpt(4096, 24, 32, 51_200, _GPT3),
    "gpt320b": _gpt(6144, 44, 48, 51_200, _GPT3),
    "gpt3175b": _gpt(12288, 96, 96, 51_200, _GPT3),
    "llama27b": _llama(4096, 32, 32, 32, 11008, 32_000),
    "llama213b": _llama(5120, 40, 40, 40, 13824, 32_000),
    "llama34b": _llama(8192, 48, 64, 8, 22016, 32_000),
    "llama270b": _llama(8192, 80, 64, 8, 28672, 32_000),
    "llama38b": _llama(4096, 32, 32, 8, 14336, 128_256),
    "llama370b": _llama(8192, 80, 64, 8, 28672, 128_256),
    "llama31405b": _llama(16384, 126, 128, 8, 53248, 128_256),
    "nemotron8b": _nemotron(4096, 32, 32, 32, 16384),
    "nemotron22b": _nemotron(6144, 40, 48, 48, 24576),
    "nemotron340b": _nemotron(18432, 96, 96, 8, 73728),
    "qwen330ba3b": _QWEN3_MOE.format(hidden=2048, layers=48, heads=32, ffn=768),
    "qwen3235ba22b": _QWEN3_MOE.format(hidden=4096, layers=94, heads=64, ffn=1536),
    "deepseekv3671b": "hf:deepseek_v3",
    "kimik2": "hf:deepseek_v3?num_attention_heads=64&num_key_value_heads=64&n_routed_experts=384&vocab_size=163840"
    "&n_group=1&topk_group=1&first_k_dense_replace=1",
    "gptoss20b": _GPT_OSS.format(layers=24, experts=32),
    "gptoss120b": _GPT_OSS.format(layers=36, experts=128),
}
_OTHER_NAMES = {
    "gpt3": "gpt3175b",
    "llama7b": "llama27b",
    "llama13b": "llama213b",
    "llama70b": "llama270b",
    "qwen3moe30b": "qwen330ba3b",
    "qwen3235b": "qwen3235ba22b",
    "qwen3moe235b": "qwen3235ba22b",
}


def spec_of(name: str) -> str:
    """The SPEC; an empty one for a model that is not known here."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    return MODELS.get(_OTHER_NAMES.get(plain, plain), "")


def spec_of_sizes(
    family: str, *, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, sequence_length: int
) -> str:
    """A model by its sizes: GPT and MPT as they are built, others like Llama."""
    sizes = {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "vocabulary": vocab,
        "sequence_length": sequence_length,
    }
    built = {
        "gpt": "dropout=0.1&fused=true&tied=true",
        "mpt": "bias=false&tied=true",
        "llama-1B": "bias=false&norm=rms&activation=swiglu&positions=rotary&tied=true",
    }
    llama = "bias=false&norm=rms&activation=swiglu&positions=rotary"
    settings = built.get(family, built.get(family.split("-")[0].lower(), llama))
    return "preset:transformer?" + "&".join(f"{name}={value}" for name, value in sizes.items()) + "&" + settings
