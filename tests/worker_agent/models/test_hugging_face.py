"""Hugging Face families: the blocks in a row are the library's model, to the last bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from pipeplan.documents.names import FAMILIES, parse_spec
from pipeplan.errors import InvalidInputError
from worker_agent.models.chain import Chain, build_model
from worker_agent.models.losses import default_loss
from worker_agent.models.values import as_values

NARROW = (
    "num_hidden_layers=2&hidden_size=32&num_attention_heads=2&num_key_value_heads=1&intermediate_size=48&vocab_size=50"
    "&max_position_embeddings=16"
)
SPECS = {
    "gpt2": "hf:gpt2?n_layer=2&n_embd=32&n_head=2&vocab_size=50&n_positions=16",
    "llama": f"hf:llama?{NARROW}&head_dim=16",
    "mistral": f"hf:mistral?{NARROW}&sliding_window=null",
    "qwen2": f"hf:qwen2?{NARROW}",
    "qwen3": f"hf:qwen3?{NARROW}&head_dim=16",
    "mixtral": f"hf:mixtral?{NARROW}&sliding_window=null&num_local_experts=4",
    "qwen3_moe": f"hf:qwen3_moe?{NARROW}&num_experts=4&num_experts_per_tok=2&moe_intermediate_size=24",
    "gemma": f"hf:gemma?{NARROW}&head_dim=16",
    "gpt_neox": f"hf:gpt_neox?{NARROW.replace('&num_key_value_heads=1', '')}",
    "opt": "hf:opt?num_hidden_layers=2&hidden_size=32&num_attention_heads=2&ffn_dim=48&vocab_size=50"
    "&word_embed_proj_dim=32&max_position_embeddings=16",
    "phi": f"hf:phi?{NARROW}",
    "ministral3": f"hf:ministral3?{NARROW}&head_dim=16",  # its layers scale queries by positions that they only hand on
    "bert": "hf:bert?num_hidden_layers=2&hidden_size=32&num_attention_heads=2&intermediate_size=48&vocab_size=50"
    "&max_position_embeddings=16",
}


def in_order(chain: Chain, tokens: Tensor) -> Tensor:
    values: tuple[Tensor, ...] = (tokens,)
    for block in chain.blocks:
        values = as_values(block(*values))
    return values[0]


def gradients(chain: Chain, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    chain.root.zero_grad()
    torch.autograd.backward(default_loss(logits, targets))
    return {name: p.grad.clone() for name, p in chain.root.named_parameters() if p.grad is not None}


@pytest.mark.each_case
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", sorted(SPECS))
def test_the_blocks_in_order_give_exactly_the_models_logits_and_gradients(family: str, attention: str) -> None:
    chain = build_model(f"{SPECS[family]}&attn_implementation={attention}", seed=0)
    chain.root.eval()
    drawn = torch.randint(50, (3, 17), generator=torch.Generator().manual_seed(1))
    tokens, targets = drawn[:, :-1], drawn[:, 1:]
    ours, theirs = in_order(chain, tokens), chain.root(input_ids=tokens).logits
    assert torch.equal(ours, theirs)
    expected = gradients(chain, theirs, targets)
    found = gradients(chain, ours, targets)
    assert found.keys() == expected.keys() and len(found) > 10
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.each_case
@pytest.mark.parametrize("family", sorted(SPECS))
def test_every_parameter_is_in_one_block_under_the_whole_models_name(family: str) -> None:
    chain = build_model(SPECS[family], seed=0)
    assert chain.block_names == ("embedding", "layer.0", "layer.1", "head")
    in_blocks = [p for block in chain.blocks for p in block.parameters()]
    assert len(in_blocks) == len(set(in_blocks))
    assert {chain.names()[p] for p in in_blocks} == {name for name, _ in chain.root.named_parameters()}


def test_dropout_stays_as_the_family_configures_it() -> None:
    chain = build_model(SPECS["gpt2"], seed=0)
    assert {m.p for m in chain.root.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}
    assert chain.root.training


def test_rotary_frequencies_stay_exact_in_a_model_of_16_bits() -> None:
    chain = build_model(SPECS["llama"], seed=0, dtype=torch.bfloat16)
    assert {p.dtype for p in chain.root.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in chain.root.buffers()} == {torch.float32}
    assert in_order(chain, torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("hf:gpt2?n_layers=2", "model.n_layers: is not a key of gpt2's config that can be set, got 2"),
        ("hf:gpt2?n_layer=-1", "model.n_layer: must be at least 1, got -1"),
        ("hf:gpt2?n_head=0", "model.n_head: must be at least 1, got 0"),
        ("hf:llama?num_hidden_layers=0", "model.num_hidden_layers: must be at least 1, got 0"),
        (
            "hf:gemma3?num_hidden_layers=2",
            "model.num_hidden_layers: is not a key of gemma3's config that can be set; its language model is "
            "hf:gemma3_text, got 2",
        ),
        ("hf:gpt2?use_cache=true", "model.use_cache: is not a key of gpt2's config that can be set, got True"),
        (
            "hf:gpt5",
            f"model: must be one of {', '.join(sorted(FAMILIES))}, or another one of transformers",
        ),
        ("hf:gpt2?tie_word_embeddings=1", "model.tie_word_embeddings: must be true or false, got 1"),
        ("hf:gpt2?attn_implementation=fast", "model.attn_implementation: must be one of sdpa, eager, got 'fast'"),
        ("hf:gpt2?n_head=5", "model: must be possible for gpt2 (`embed_dim` must be divisible by num_heads"),
        ("hf:gpt2?n_layer=two", "model: must be possible for gpt2 (Validation error for field 'n_layer'"),
        ("hf:mllama", "model: must be a model of one part, or be cut by a factory of your own"),
        ("hf:emu3", "model: must be possible for emu3 ('Emu3Config' object has no attribute"),
        (
            f"{SPECS['mixtral']}&output_router_logits=true",
            "model.output_router_logits: must be false: the loss has no term for the load of experts, got True",
        ),
        ("hf:bamba?z_loss_coefficient=0.1", "model.z_loss_coefficient: must be 0: the loss has no term for the size"),
        ("hf:vit?problem_type=regression", "model.problem_type: must be single_label_classification, or left out, got"),
        ("hf:vit?num_labels=1", "model.num_labels: must be at least 2: the library takes one label for a regression"),
        ("hf:kyutai_speech_to_text?vocab_size=64", "model: must be possible for kyutai_speech_to_text (Padding_idx"),
        ("hf:gemma4_assistant", "model: must be possible for gemma4_assistant (Class validation error"),
        (
            "hf:big_bird?num_hidden_layers=1&hidden_size=32&num_attention_heads=2&intermediate_size=48&vocab_size=50",
            "model: must have the same modules for every length of its input",
        ),
        (
            f"hf:deepseek_v3?{NARROW}&q_lora_rank=16&kv_lora_rank=16&qk_rope_head_dim=8&first_k_dense_replace=1",
            "model: must run without weights, and fails in model.layers.0 (RuntimeError: The size of tensor a",
        ),
        ("hf:pp_lcnet", "model: must have a whole number as num_channels in its config, or be cut by a factory"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_name(spec: str, sentence: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        build_model(spec, seed=0)
    assert str(caught.value).startswith(sentence)


def test_a_config_file_names_family_and_options_and_the_query_goes_over_them(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "intermediate_size": 48, "vocab_size": 50, "tie_word_embeddings": True}
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192}
    other = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "use_cache": True}
    path.write_text(json.dumps(config | other | {"rope_scaling": rope, "rope_theta": 500000.0, "_name_or_path": "x"}))
    chain = build_model(f"hf:{path}?num_hidden_layers=1", seed=0)
    assert chain.name == "llama" and chain.block_names == ("embedding", "layer.0", "head")
    assert {p.dtype for p in chain.root.parameters()} == {torch.float32}
    assert chain.tokens is not None and chain.tokens.vocab_size == 50
    assert in_order(chain, torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 50)
    assert chain.spec.startswith("hf:llama?") and str(tmp_path) not in chain.spec
    same = build_model(chain.spec, seed=0)
    assert same.spec == chain.spec
    tokens = torch.arange(4).reshape(1, 4)
    assert torch.equal(in_order(same, tokens), in_order(chain, tokens))


def test_a_folder_stands_for_its_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}')
    chain = build_model(f"hf:{tmp_path}?vocab_size=50&n_positions=8&attn_implementation=eager", seed=0)
    assert parse_spec(chain.spec, field="model").options == {
        "n_layer": 1,
        "n_embd": 8,
        "n_head": 2,
        "vocab_size": 50,
        "n_positions": 8,
        "tie_word_embeddings": True,
        "attn_implementation": "eager",
    }


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_a_file_ties_the_embeddings_as_the_library_does(
    family: str, said: bool | None, asked: bool | None, tmp_path: Path
) -> None:
    """A file that tied them was estimated and trained untied, without a word."""
    config: dict[str, Any] = {"model_type": family, "vocab_size": 50}
    if family == "t5":
        config |= {"d_model": 32, "num_layers": 1, "num_heads": 2, "d_kv": 16, "d_ff": 48, "decoder_start_token_id": 0}
    else:
        config |= {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 16}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | ({} if said is None else {"tie_word_embeddings": said})))
    query = "" if asked is None else f"?tie_word_embeddings={str(asked).lower()}"
    chain = build_model(f"hf:{path}{query}", seed=0, empty=True)

    wanted = said if asked is None else asked
    theirs = AutoConfig.for_model(**config, **({} if wanted is None else {"tie_word_embeddings": wanted}))
    assert bool(chain.tied_weights()) == theirs.tie_word_embeddings
    assert getattr(chain.root.config, "scale_decoder_outputs", None) == getattr(theirs, "scale_decoder_outputs", None)
    same = build_model(chain.spec, seed=0, empty=True)
    configs: list[Any] = [same.root.config, chain.root.config]
    assert str(tmp_path) not in chain.spec and configs[0].to_dict() == configs[1].to_dict()
    assert same.tied_weights() == chain.tied_weights()


def test_a_family_without_a_file_is_untied_unless_the_spec_ties_it() -> None:
    assert not build_model(SPECS["gpt2"], seed=0, empty=True).tied_weights()
    assert build_model(f"{SPECS['gpt2']}&tie_word_embeddings=true", seed=0, empty=True).tied_weights()


def test_a_config_that_no_spec_can_hold_keeps_its_path(tmp_path: Path) -> None:
    """Here it is too long; a text that looks like a number could not be written either."""
    path = tmp_path / "config.json"
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 50, "n_positions": 8}
    path.write_text(json.dumps(config | {"activation_function": "gelu", "summary_type": "x" * 2000}))
    assert build_model(f"hf:{path}", seed=0).spec == f"hf:{path}"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            '{"model_type": "gpt5", "n_layer": 2}',
            f"model.model_type: must be one of {', '.join(sorted(FAMILIES))}, or another one of transf",
        ),
        ('{"n_layer": 2}', "model: must name a Hugging Face config: a JSON object with a model_type, got"),
        ("[]", "model: must name a Hugging Face config: a JSON object with a model_type, got"),
        ("{", "model: must name a file with a JSON document ("),
        ('{"model_type": "gpt2", "n_head": 5}', "model: must be possible for gpt2 (`embed_dim` must be divisible"),
        ('{"model_type": "gpt2", "n_layer": "two"}', "model: must be possible for gpt2 (Validation error for"),
        (
            '{"model_type": "gpt2", "tie_word_embeddings": "yes"}',
            "model.tie_word_embeddings: must be true or false, got 'yes'",
        ),
        (None, "model: must be a file or folder on this machine: there is none of this name, and nothing is"),
    ],
)
def test_a_config_file_that_cannot_be_is_refused(content: str | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidInputError) as caught:
        build_model(f"hf:{path}", seed=0)
    assert str(caught.value).startswith(sentence)


def test_a_heads_size_that_attention_reads_can_be_set_though_the_config_has_no_key_for_it() -> None:
    """Qwen3-30B-A3B's heads have 128 features, where its hidden size over its heads is 64."""
    sizes = "num_hidden_layers=1&hidden_size=32&num_attention_heads=4&num_key_value_heads=2&vocab_size=64"
    built = build_model(
        f"hf:qwen3_moe?{sizes}&head_dim=16&num_experts=4&num_experts_per_tok=2&moe_intermediate_size=16", seed=0
    )
    queries = [weight.shape for name, weight in built.root.named_parameters() if "q_proj" in name]
    assert queries == [(4 * 16, 32)]
    with pytest.raises(InvalidInputError, match="head_dim: is not a key of gpt2"):
        build_model("hf:gpt2?n_layer=1&head_dim=16", seed=0)
