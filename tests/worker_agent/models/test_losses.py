"""Losses: the default by the targets' type, and named ones in either form."""

import pytest
import torch
from torch.nn import functional

from pipeplan.errors import InvalidInputError
from worker_agent.models.losses import build_loss, default_loss, mean_of_squares
from worker_agent.models.spec import UserCodeError

HERE = "tests.worker_agent.models.losses"
OUTPUTS = torch.tensor([[1.0, 3.0], [2.0, 0.0]])
FLOATING = torch.tensor([[0.0, 3.0], [2.0, 4.0]])


def test_whole_number_targets_give_the_mean_cross_entropy_over_all_positions() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    expected = -torch.log_softmax(logits, dim=-1).gather(-1, targets[..., None]).mean()
    assert torch.allclose(default_loss(logits, targets), expected)


def test_floating_targets_give_the_mean_squared_error() -> None:
    assert default_loss(OUTPUTS, FLOATING).item() == (1 + 0 + 0 + 16) / 4


def test_outputs_of_16_bits_lose_nothing_in_the_cross_entropy() -> None:
    loss = default_loss(OUTPUTS.bfloat16(), torch.tensor([0, 1]))
    assert loss.dtype == torch.float32
    assert torch.equal(loss, functional.cross_entropy(OUTPUTS, torch.tensor([0, 1])))


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("torch.nn.functional:l1_loss", 5 / 4),
        ("torch.nn.functional:l1_loss?reduction=sum", 5.0),
        ("torch.nn:L1Loss", 5 / 4),
        ("torch.nn:L1Loss?reduction=sum", 5.0),
        ("tests.worker_agent.models.factories:absolute_error", 5 / 4),
        ("tests.worker_agent.models.factories:absolute_error?scale=2", 5 / 2),
        (f"{HERE}:criterion", 5 / 4),
        (f"{HERE}:summed", 5.0),
        (f"{HERE}:part", 5.0),
        (f"{HERE}:part_of_a_class", 5.0),
        (f"{HERE}:scaled", 5 / 2),
        (f"{HERE}:scaled?more=1", 7 / 2),
        (f"{HERE}:Scaled?scale=4", 5.0),
        (f"{HERE}:factory", 5 / 4),
        (f"{HERE}:factory?scale=2", 5 / 2),
        (f"{HERE}:hidden", 5 / 4),
        (f"{HERE}:hidden_factory", 15 / 4),
        (f"{HERE}:Required?scale=4", 5.0),
        ("torch:dist", float(torch.dist(OUTPUTS, FLOATING))),
    ],
)
def test_a_loss_is_named_itself_or_by_its_factory(spec: str, value: float) -> None:
    assert build_loss(spec)(OUTPUTS, FLOATING).item() == value


def test_shapes_that_do_not_fit_are_refused_with_both() -> None:
    with pytest.raises(InvalidInputError, match=r"without their last dimension, \(2,\), got \(3,\)"):
        default_loss(OUTPUTS, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InvalidInputError, match=r"the shape of the outputs, \(2, 2\), got \(2,\)"):
        default_loss(OUTPUTS, torch.zeros(2))
    with pytest.raises(InvalidInputError, match="must be named where outputs or targets are not one tensor"):
        default_loss((OUTPUTS, OUTPUTS), FLOATING)


def test_a_loss_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"must be callable as json:load\(outputs, targets\)"):
        build_loss("json:load?nothing=1")


def test_the_neutral_loss_needs_no_targets() -> None:
    assert mean_of_squares(OUTPUTS, None).item() == (1 + 9 + 4 + 0) / 4
    assert mean_of_squares((OUTPUTS, torch.tensor([7])), None).item() == (1 + 9 + 4 + 0) / 4


def test_the_tensors_of_a_loss_that_is_made_already_have_the_models_type() -> None:
    loss, logits, targets = build_loss(f"{HERE}:weighted", dtype=torch.float64), OUTPUTS.double(), torch.tensor([0, 1])
    weight = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert torch.equal(loss(logits, targets), functional.cross_entropy(logits, targets, weight=weight))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "criterion?reduction=sum",
            r"must be callable as .*:criterion\(outputs, targets\) \(got an unexpected keyword",
        ),
        (
            "with_defaults",
            r"which requires \(outputs, targets\), or a factory of one, but .*:with_defaults gave, got 0.0",
        ),
        ("of_a_class", r"must be a loss, .* but .*:of_a_class gave, got <class"),
        ("of_outputs_alone", r"must be callable as .*\(outputs, targets\) \(too many positional arguments\)"),
        ("Required", r"must fit the parameters of .*:Required \(missing a required argument: 'scale'\)"),
        ("trained", r"must be callable as .*:trained\(outputs, targets\) \(too many positional arguments\)"),
        ("blocks", "must name a function or a class that makes it, and this is a list"),
    ],
)
def test_what_is_no_loss_is_refused_before_anything_runs(name: str, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        build_loss(f"{HERE}:{name}")


def test_a_factory_that_fails_is_named() -> None:
    with pytest.raises(UserCodeError, match=r"no scale is right, in the loss.s factory .*:failing_factory"):
        build_loss(f"{HERE}:failing_factory")
