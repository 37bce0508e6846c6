"""Configs as publishers write them: which of the library's models they describe, and what is left out of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from worker_agent.models.chain import build_model

LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
LATENTS = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
TOWER = {"vision_config": {"depth": 2, "hidden_size": 16}}
KIMI = {
    **LAYERS,
    **LATENTS,
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "first_k_dense_replace": 1,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 16,
    "n_group": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8"},
    "topk_group": 1,
}
QWEN_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {**LAYERS, "head_dim": 8, "model_type": "qwen3_vl_text", "tie_word_embeddings": True},
    "tie_word_embeddings": True,
    **TOWER,
}
LLAMA_4 = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": {**LAYERS, "head_dim": 8, "model_type": "llama4_text", "num_local_experts": 4},
}
FLAT = {**LAYERS, **TOWER, "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
VISION = "the model's vision_config is left out: the estimate is of the language model alone"


@pytest.mark.parametrize(
    ("content", "name", "left_out"),
    [
        (
            KIMI,
            "deepseek_v3",
            (
                "kimi_k2 is taken as deepseek_v3, which has its layers",
                "the layers of multi-token prediction (num_nextn_predict_layers 1) are left out",
            ),
        ),
        (QWEN_VL, "qwen3", (VISION, "qwen3_vl_text is taken as qwen3, which has its layers")),
        (LLAMA_4, "llama4_text", ()),
        (FLAT, "qwen2", (VISION, "qwen2_vl_text is taken as qwen2, which has its layers")),
    ],
    ids=["an architecture's name", "a part for texts", "a wrapper", "keys of both parts together"],
)
def test_the_language_model_of_a_config_is_taken_and_the_rest_is_named(
    content: dict[str, Any], name: str, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    """All of these were refused, or taken whole."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    chain = build_model(f"hf:{file}", seed=0, empty=True)
    assert (chain.name, chain.left_out) == (name, left_out)
    assert chain.block_names == ("embedding", "layer.0", "layer.1", "head")
    embedding = chain.root.get_parameter("model.embed_tokens.weight")
    assert tuple(embedding.shape) == (64, 32)


def test_layers_of_two_kinds_are_those_that_the_publisher_lists(tmp_path: Path) -> None:
    """The library lists them by another key; without it every second layer has linear attention."""
    content = {**LAYERS, "attn_type_list": [0, 0], "model_type": "minimax_text_01", "num_local_experts": 2}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    chain = build_model(f"hf:{tmp_path}", seed=0, empty=True)
    assert chain.name == "minimax"
    root: Any = chain.root
    assert root.config.layer_types == ["linear_attention"] * 2


def test_code_that_a_config_names_never_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KIMI), encoding="utf-8")
    (tmp_path / "configuration_deepseek.py").write_text("raise SystemExit('it ran')", encoding="utf-8")
    assert build_model(f"hf:{tmp_path}", seed=0, empty=True).name == "deepseek_v3"
