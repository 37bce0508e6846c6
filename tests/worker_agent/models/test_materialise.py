"""Materialise: weights of a folder or random ones, a few blocks at a time, whatever the cut."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeplan.errors import InvalidInputError
from tests.worker_agent.models.test_cut import OTHERS
from tests.worker_agent.models.test_hugging_face import SPECS, in_order
from worker_agent.models.chain import build_model

GPT2 = SPECS["gpt2"]
TOKENS = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(1))


def written(folder: Path, spec: str, **options: Any) -> Any:
    """A model that `save_pretrained` wrote to the folder, with values that its initialisation would not give."""
    model: Any = build_model(spec, seed=5).root
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.each_case
@pytest.mark.parametrize("seed", [0, 20_260_102, 2**31 - 1])
def test_random_weights_depend_on_the_seed_and_not_on_the_cut(seed: int) -> None:
    """Every part that a cut of the four blocks can have, on its own."""
    whole = build_model(GPT2, seed=seed).root.state_dict()
    for start, stop in combinations(range(5), 2):
        chain = build_model(GPT2, seed=seed, empty=True)
        chain.materialise(start, stop)
        parts = {name: t for name, t in chain.root.state_dict().items() if not t.is_meta}
        assert parts and all(torch.equal(whole[name], tensor) for name, tensor in parts.items())
    other = build_model(GPT2, seed=seed + 1).root.state_dict()
    assert not torch.equal(whole["transformer.wte.weight"], other["transformer.wte.weight"])


@pytest.mark.each_case
@pytest.mark.parametrize("family", sorted(SPECS))
def test_every_family_is_built_empty_and_filled_block_by_block(family: str) -> None:
    whole = build_model(SPECS[family], seed=3)
    chain = build_model(SPECS[family], seed=3, empty=True)
    assert all(parameter.is_meta for parameter in chain.root.parameters())
    assert chain.weight_bytes() == whole.weight_bytes()
    for number in reversed(range(len(chain.blocks))):
        chain.materialise(number, number + 1)
    assert torch.equal(in_order(_evaluating(chain), TOKENS), in_order(_evaluating(whole), TOKENS))


def test_other_blocks_stay_empty_and_what_is_filled_stays() -> None:
    chain = build_model(GPT2, seed=0, empty=True)
    chain.materialise(1, 2)
    assert [any(p.is_meta for p in block.parameters()) for block in chain.blocks] == [True, False, True, True]
    with torch.no_grad():
        for parameter in chain.blocks[1].parameters():
            parameter.zero_()
    chain.materialise()
    assert all(not p.any() for p in chain.blocks[1].parameters())
    assert chain.materialise() == ()


def test_what_init_weights_leaves_out_has_what_its_constructor_gives_it() -> None:
    """They had no value, and the models were refused."""
    chain = build_model(OTHERS["apertus"], seed=0, dtype=torch.float64)
    real: Any = type(chain.root)(chain.root.config)
    computed = {name: tensor for name, tensor in real.state_dict().items() if "act_fn" in name}
    assert len(computed) == 8
    for name, tensor in computed.items():
        assert torch.equal(chain.root.state_dict()[name], tensor.double()), name


def test_what_a_constructor_draws_does_not_depend_on_the_cut() -> None:
    whole = build_model(OTHERS["openai-gpt"], seed=3)
    weights = [tensor for name, tensor in whole.root.state_dict().items() if name.endswith("c_attn.weight")]
    assert all(0.017 < tensor.std() < 0.023 for tensor in weights) and not torch.equal(weights[0], weights[1])
    chain = build_model(OTHERS["openai-gpt"], seed=3, empty=True)
    for number in reversed(range(len(chain.blocks))):
        chain.materialise(number, number + 1)
    for name, tensor in whole.root.state_dict().items():
        assert torch.equal(chain.root.state_dict()[name], tensor), name
    assert not any(buffer.is_meta for buffer in chain.root.buffers())


def test_weights_have_the_spread_that_the_library_gives_them() -> None:
    chain = build_model("hf:gpt2?n_layer=2&n_embd=128&n_head=2&vocab_size=500&n_positions=64", seed=0)
    for name, parameter in chain.root.named_parameters():
        if parameter.dim() == 2:  # GPT-2 draws what is added to the residuals less widely
            spread = 0.02 / 2 if "c_proj" in name else 0.02
            assert 0.9 * spread < parameter.std() < 1.1 * spread, name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, float("ln" in name and "weight" in name))), name
    blocks = [dict(block.named_parameters()) for block in chain.blocks[1:3]]
    assert not torch.equal(blocks[0]["quick.layer.mlp.c_fc.weight"], blocks[1]["quick.layer.mlp.c_fc.weight"])


@pytest.mark.each_case
@pytest.mark.parametrize("size", ["5GB", "40KB"])
@pytest.mark.parametrize("family", sorted(SPECS))
def test_a_folders_weights_are_the_models_sharded_or_not(family: str, size: str, tmp_path: Path) -> None:
    model = written(tmp_path, SPECS[family], max_shard_size=size)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or size == "40KB"
    chain = build_model(f"hf:{tmp_path}", seed=0)
    assert chain.spec == f"hf:{tmp_path}"
    expected = model.state_dict()
    assert chain.root.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in chain.root.state_dict().items())
    assert torch.equal(in_order(_evaluating(chain), TOKENS), model.eval()(TOKENS).logits)


@pytest.mark.each_case
@pytest.mark.parametrize("family", sorted(SPECS))
def test_a_stage_reads_its_own_tensors_and_no_others(family: str, tmp_path: Path) -> None:
    expected = written(tmp_path, SPECS[family]).state_dict()
    every: list[str] = []
    for start, stop in ((0, 2), (2, 3), (3, 4)):
        chain = build_model(f"hf:{tmp_path}", seed=0, empty=True)
        read = chain.materialise(start, stop)
        layers = {int(part) for name in read for part in name.split(".") if part.isdigit() and "experts" not in name}
        assert layers <= set(range(start - 1, stop - 1))
        real = {name: t for name, t in chain.root.state_dict().items() if not t.is_meta}
        assert all(torch.equal(tensor, expected[name]) for name, tensor in real.items())
        every += read
    assert sorted(every) == sorted(load_file(tmp_path / "model.safetensors"))


@pytest.mark.each_case
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(SPECS))
def test_a_folders_weights_are_filled_block_by_block(family: str, tied: bool, tmp_path: Path) -> None:
    """Each block once emptied those before it: no folder could be profiled, and none be run in interleaved stages."""
    spec = f"{SPECS[family]}&tie_word_embeddings={str(tied).lower()}"
    expected = written(tmp_path, spec, max_shard_size="40KB").state_dict()
    chain = build_model(f"hf:{tmp_path}", seed=0, empty=True)
    for number in range(len(chain.blocks)):
        chain.materialise(number, number + 1)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in chain.root.state_dict().items())
    assert chain.root.state_dict().keys() == expected.keys()


def test_damage_in_another_stages_file_is_not_seen(tmp_path: Path) -> None:
    """What is not opened cannot be noticed: the tensors of the last layer are cut off their file."""
    written(tmp_path, GPT2)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    start, stop = header["transformer.h.1.mlp.c_fc.weight"]["data_offsets"]
    first = len(content) - max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
    path.write_bytes(content[: first + start] + b"\xff" * (stop - start) + content[first + stop :])
    chain = build_model(f"hf:{tmp_path}", seed=0, empty=True)
    chain.materialise(0, 2)
    assert all(not p.isnan().any() for p in chain.blocks[1].parameters())
    chain.materialise(2, 3)
    assert any(p.isnan().any() for p in chain.blocks[2].parameters())


def test_tied_weights_are_read_by_both_stages_and_are_one_in_a_whole_model(tmp_path: Path) -> None:
    model = written(tmp_path, f"{GPT2}&tie_word_embeddings=true")
    whole = build_model(f"hf:{tmp_path}", seed=0)
    assert whole.root.get_parameter("lm_head.weight") is whole.root.get_parameter("transformer.wte.weight")
    assert torch.equal(in_order(_evaluating(whole), TOKENS), model.eval()(TOKENS).logits)
    last = build_model(f"hf:{tmp_path}", seed=0, empty=True)
    assert "transformer.wte.weight" in last.materialise(3, 4)
    assert torch.equal(last.blocks[3].get_parameter("quick.1.weight"), model.get_parameter("lm_head.weight"))
    assert last.blocks[3].get_parameter("quick.1.weight") is last.blocks[0].get_parameter("quick.tokens.weight")


def test_tied_weights_that_differ_in_the_file_are_refused(tmp_path: Path) -> None:
    written(tmp_path, GPT2)
    with pytest.raises(InvalidInputError, match=r"model\..*: must be one tensor with those that it is tied to"):
        build_model(f"hf:{tmp_path}?tie_word_embeddings=true", seed=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_are_read_in_the_type_that_is_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = written(tmp_path, GPT2).state_dict()
    chain = build_model(f"hf:{tmp_path}", seed=0, dtype=dtype)
    assert all(torch.equal(p, expected[name].to(dtype)) for name, p in chain.root.named_parameters())


def test_a_config_file_beside_weights_stands_for_random_ones(tmp_path: Path) -> None:
    written(tmp_path, GPT2)
    random, same = build_model(f"hf:{tmp_path}/config.json", seed=0), build_model(GPT2, seed=0)
    assert torch.equal(in_order(_evaluating(random), TOKENS), in_order(_evaluating(same), TOKENS))


def test_weights_that_do_not_fit_their_config_are_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path, GPT2)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)

    def refused(changed: dict[str, Tensor], sentence: str) -> None:
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(InvalidInputError) as caught:
            build_model(f"hf:{tmp_path}", seed=0)
        assert str(caught.value).startswith(sentence)

    name, rule = "transformer.h.0.attn.c_attn.bias", "must have the weights of its config"
    without = {key: tensor for key, tensor in tensors.items() if key != name}
    refused(without, f"model: {rule}: this tensor is missing, got '{name}")
    refused(tensors | {"transformer.x": torch.ones(1)}, f"model: {rule}: this tensor has no place in GPT2LMHeadModel")
    refused(tensors | {name: torch.ones(3)}, f"model.{name}: {rule}, of shape (96,), got (3,)")


def test_a_folder_whose_weights_cannot_be_read_is_refused(tmp_path: Path) -> None:
    written(tmp_path, GPT2, max_shard_size="40KB")
    shard = next(tmp_path.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(InvalidInputError, match="model: must have readable weights"):
        build_model(f"hf:{tmp_path}", seed=0)
    shard.unlink()
    with pytest.raises(InvalidInputError, match=r"must have every file of model.safetensors.index.json"):
        build_model(f"hf:{tmp_path}", seed=0)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(InvalidInputError, match=r"must have every file of .*, got '../elsewhere.safetensors'"):
        build_model(f"hf:{tmp_path}", seed=0)
    index.write_text("[]")
    with pytest.raises(InvalidInputError, match="with a weight_map"):
        build_model(f"hf:{tmp_path}", seed=0)
    index.unlink()
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InvalidInputError, match=r"must have its weights in model.safetensors .*'pytorch_model.bin'"):
        build_model(f"hf:{tmp_path}", seed=0)


def _evaluating(chain: Any) -> Any:
    chain.root.eval()
    return chain
