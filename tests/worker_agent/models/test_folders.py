"""Folders: what is no model to train is named as what it is, with what to do."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeplan.errors import InvalidInputError
from tests.worker_agent.models.test_hugging_face import SPECS
from worker_agent.models.chain import build_model
from worker_agent.models.folders import files_beside

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 50,
}
LORA = {"peft_type": "LORA", "base_model_name_or_path": "big/model", "r": 8}
QUANTISED = "must have weights that can be trained, and these are quantised"


def made(folder: Path, files: Mapping[str, object]) -> Path:
    """A folder with these files: JSON documents, files of weights, and others with some text."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors"):
            save_file({"weight": torch.zeros(2, dtype=torch.uint8)}, path)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (
            {"adapter_config.json": LORA, "adapter_model.safetensors": 0},
            "must be a whole model's folder, and this is an adapter's (LORA of big/model): name its base model's",
        ),
        (
            {"adapter_config.json": "{", "config.json": LLAMA, "model.safetensors": 0},
            "must be a whole model's folder, and this is an adapter's (PEFT): name its base model's folder",
        ),
        ({"config.json": LORA}, "must be a whole model's folder, and this is an adapter's (LORA of big/model)"),
        (
            {"config.json": LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "model.safetensors": 0},
            f"{QUANTISED} (quantization_config of its config.json: gptq): load them in a floating-point type",
        ),
        (
            {"config.json": LLAMA | {"quantization": {"bits": 4}}, "model-00001-of-00002.safetensors": 0},
            f"{QUANTISED} (quantization of its config.json): load them",
        ),
        (
            {"config.json": LLAMA, "quantize_config.json": {}, "model.bin": ""},
            f"{QUANTISED} (it has a quantize_config.json)",
        ),
        ({"config.json": LLAMA, "tiny.Q4_0.gguf": ""}, "must have its weights in model.safetensors or in the files of"),
        ({"tiny.Q4_0.gguf": ""}, "must be a model's folder, with a config.json as save_pretrained writes it; this has"),
        ({"checkpoints/step-1/manifest.json": "{}"}, "must be a model's folder, with a config.json as save_pretrained"),
        ({"model_index.json": "{}"}, "must be a model's folder, with a config.json as save_pretrained writes it; this"),
        ({"README.md": ""}, "must be a model's folder, with a config.json as save_pretrained writes it, got"),
        (
            {"config.json": {"blocks": []}},
            "must name a Hugging Face config: a JSON object with a model_type; this is a",
        ),
    ],
)
def test_a_folder_of_something_else_is_named(files: Mapping[str, object], sentence: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "it", files)
    with pytest.raises(InvalidInputError) as caught:
        build_model(f"hf:{folder}", seed=0, empty=True)
    assert str(caught.value).startswith(f"model: {sentence}")


def test_a_file_of_weights_is_not_taken_for_a_config(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.Q4.gguf", "pytorch_model.bin"):
        made(tmp_path, {name: ""})
        with pytest.raises(InvalidInputError, match="model: must be the folder of these weights, with their config"):
            build_model(f"hf:{tmp_path / name}", seed=0)


def test_a_hubs_id_is_said_to_need_its_config() -> None:
    with pytest.raises(InvalidInputError) as caught:
        build_model("hf:meta-llama/Llama-3-8B", seed=0)
    assert "`hf download meta-llama/Llama-3-8B config.json --local-dir Llama-3-8B`" in str(caught.value)
    assert "then hf:Llama-3-8B/config.json" in str(caught.value)


def test_a_quantised_models_config_is_planned_with_random_weights(tmp_path: Path) -> None:
    """They are not quantised, and the model's own config says so."""
    folder = made(tmp_path, {"config.json": LLAMA | {"quantization_config": {"quant_method": "fp8"}}})
    for spec in (f"hf:{folder}", f"hf:{folder}/config.json"):
        config = build_model(spec, seed=0, empty=True).root.config
        assert getattr(config, "quantization_config", None) is None


def test_what_lies_beside_weights_is_all_that_an_export_does_not_write(tmp_path: Path) -> None:
    kept = ["1_Pooling/config.json", "README.md", "generation_config.json", "tokenizer.json"]
    others = (".cache/x", "checkpoint-5/model.safetensors", "checkpoint-5/state.json", "config.json", "training.bin")
    files = dict.fromkeys((*kept, *others, "model.safetensors", "model.safetensors.index.json"), "{}")
    assert [str(path) for path in files_beside(made(tmp_path, files))] == kept


def test_a_saved_model_is_read_as_before(tmp_path: Path) -> None:
    build_model(SPECS["llama"], seed=0).root.save_pretrained(tmp_path)  # type: ignore[operator]
    assert build_model(f"hf:{tmp_path}", seed=0, empty=True).spec == f"hf:{tmp_path}"
