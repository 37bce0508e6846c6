"""Default data: what a model gets to be profiled with where no data is named."""

import pytest
import torch
from torch import Tensor

from pipeplan.errors import InvalidInputError
from worker_agent.models.chain import build_model
from worker_agent.models.data import MOST_TOKENS, SAMPLES, default_feed, open_data
from worker_agent.models.losses import build_loss


def test_a_language_model_gets_random_tokens_that_fit_its_config() -> None:
    chain = build_model("hf:gpt2?n_layer=1&n_embd=8&n_head=1&vocab_size=30&n_positions=12", seed=0)
    feed = default_feed(chain)
    inputs, _ = open_data(feed.data, microbatch_size=2, seed=0).microbatch(0)
    assert isinstance(inputs, Tensor) and inputs.shape == (2, 12) and int(inputs.max()) < 30
    assert feed.description == "random tokens, 12 a sequence"


def test_a_default_sequence_is_never_longer_than_512() -> None:
    chain = build_model("hf:gpt2?n_layer=1&n_embd=8&n_head=1&vocab_size=30&n_positions=2048", seed=0)
    assert default_feed(chain).description == "random tokens, 512 a sequence"


def test_a_chain_that_starts_with_a_linear_layer_gets_features_and_a_loss_without_targets() -> None:
    chain = build_model("worker_agent.models.presets:mlp?width=5&depth=2", seed=0)
    feed = default_feed(chain)
    inputs, targets = open_data(feed.data, microbatch_size=3, seed=0).microbatch(0)
    assert isinstance(inputs, Tensor) and inputs.shape == (3, 5)
    assert build_loss(feed.loss)(torch.ones(3, 5), targets).item() == 1.0


def test_any_other_chain_asks_for_data() -> None:
    with pytest.raises(InvalidInputError, match=r"data: must be named \(--data\) for a model that starts with _Split"):
        default_feed(build_model("tests.worker_agent.models.factories:two_streams", seed=0))


def test_a_sequence_has_the_length_asked_for() -> None:
    chain = build_model("hf:gpt2?n_layer=1&n_embd=8&n_head=1&vocab_size=30&n_positions=2048", seed=0)
    inputs, _ = open_data(default_feed(chain, 1024).data, microbatch_size=2, seed=0).microbatch(0)
    assert isinstance(inputs, Tensor) and inputs.shape == (2, 1024)
    with pytest.raises(InvalidInputError, match="sequence_length: must be at most the 2048 positions"):
        default_feed(chain, 2049)
    with pytest.raises(InvalidInputError, match="sequence_length: is for language models"):
        default_feed(build_model("preset:mlp", seed=0), 8)


@pytest.mark.parametrize("length", [1, 512, 2**14, 2**15, 2**20])
def test_random_tokens_take_little_memory_whatever_their_length(length: int) -> None:
    small = "num_hidden_layers=1&hidden_size=8&num_attention_heads=1&vocab_size=30"
    spec = f"hf:llama?{small}&max_position_embeddings={length}"
    feed = default_feed(build_model(spec, seed=0), length)
    samples = int(feed.data.rpartition("samples=")[2])
    assert 1 <= samples <= SAMPLES and samples * length <= MOST_TOKENS
