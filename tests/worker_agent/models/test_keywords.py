"""Modules of one's own that take a batch's tensors by name."""

from typing import Any

import pytest
import torch

from pipeplan.errors import InvalidInputError
from tests.worker_agent.models import keyword_modules
from worker_agent.models.chain import Chain, build_model
from worker_agent.models.data import MicrobatchSource, in_blocks, open_data
from worker_agent.models.values import as_values

PLACE = keyword_modules.__name__
DATA = f"{PLACE}:mappings"


def opened(model: str, data: str = DATA) -> tuple[Chain, MicrobatchSource]:
    whole = build_model(f"{PLACE}:{model}", seed=3, dtype=torch.float64)
    chain = in_blocks(whole, data, microbatch_size=2, seed=1, dtype=torch.float64)
    return chain, open_data(data, microbatch_size=2, seed=1, form=chain.batches)


@pytest.mark.parametrize("model", ["Tagger", "PredictorByStage"])
@pytest.mark.parametrize(
    "keys", [None, ["labels", "input_ids"], ["shift", "labels", "input_ids"], ["attention_mask", "input_ids", "labels"]]
)
def test_the_blocks_equal_the_module_called_by_name(model: str, keys: list[str] | None) -> None:
    query = "" if keys is None else "?keys=" + str(keys).replace("'", '"').replace(" ", "")
    chain, source = opened(model, DATA + query)
    assert chain.block_names == ("embed", "layers.0", "layers.1", "layers.2", "head")
    batches = keyword_modules.mappings(microbatch_size=2, seed=1, keys=keys)
    for number, batch in zip(range(4), batches, strict=False):
        inputs, targets = source.microbatch(number)
        assert isinstance(targets, torch.Tensor) and targets.shape == batch.pop("labels").shape
        assert source.labels_tokens
        values: Any = as_values(inputs)
        for block in chain.blocks:
            values = as_values(block(*values))
        expected = chain.root(**batch)
        chain.root.zero_grad()
        found_gradients = torch.autograd.grad(values[0].square().sum(), list(chain.root.parameters()))
        gradients = torch.autograd.grad(expected.square().sum(), list(chain.root.parameters()))
        assert torch.equal(values[0], expected)
        assert all(map(torch.equal, found_gradients, gradients))


def test_labels_of_the_next_token_are_shifted_once() -> None:
    _, source = opened("Predictor")
    batch = next(keyword_modules.mappings(microbatch_size=2, seed=1))
    targets = source.microbatch(0)[1]
    assert isinstance(targets, torch.Tensor)
    assert torch.equal(targets[:, :-1], batch["labels"][:, 1:]) and bool((targets[:, -1] == -100).all())


@pytest.mark.parametrize(
    ("model", "data", "number", "rule"),
    [
        ("Unsaid", DATA, 0, r"model\.labels of Unsaid: must be said by an attribute `labels`"),
        ("Tagger", f'{DATA}?keys=["input_ids"]', 0, r"data\.0\.labels: must be in every batch that is a mapping"),
        ("Tagger", f'{DATA}?keys=["labels"]', 0, r"data\.0: must hold an input beside the labels"),
        (
            "Tagger",
            f"{PLACE}:without_masks_later",
            1,
            r"data\.1: must have the inputs of the first microbatch",
        ),
        ("Tagger", f"{PLACE}:pair_later", 1, r"data\.1: must be a mapping, as the first microbatch"),
    ],
)
def test_batches_that_could_mean_something_else_are_refused(model: str, data: str, number: int, rule: str) -> None:
    with pytest.raises(InvalidInputError, match=rule):
        opened(model, data)[1].microbatch(number)


def test_an_input_that_the_forward_does_not_take_is_refused() -> None:
    form = build_model(f"{PLACE}:Tagger", seed=0).batches
    assert form is not None
    with pytest.raises(InvalidInputError, match=r"data\.0\.tokens: must be one of those that Tagger\.forward takes"):
        form.given("data.0", {"tokens": torch.zeros(2, 3)}, 2)
    with pytest.raises(InvalidInputError, match=r"data\.0\.input_ids: must be a tensor, got 'list'"):
        form.given("data.0", {"input_ids": [[1]]}, 1)
    with pytest.raises(InvalidInputError, match=r"data\.0\.input_ids: must have the microbatch size 3"):
        form.given("data.0", {"input_ids": torch.zeros(2, 3)}, 3)
