"""Flow: what parts of a forward do alike, and what they cannot, is found when the forward is watched."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.errors import InvalidInputError
from worker_agent.models.flow import Flow, find_flow

Between = Callable[["Model", Tensor, Tensor, int], Tensor]


class Model(nn.Module):
    """An embedding, three layers and a head; `between` is done before every layer."""

    _no_split_modules = ("Linear",)

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norms = nn.ModuleList(nn.LayerNorm(3) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(3, 3)
        self.between = between

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """(B, 3) -> (B, 3)."""
        begun = hidden = self.first(x)
        for number, layer in enumerate(self.layers):
            hidden = layer(self.between(self, hidden, begun, number))
        return (self.last(hidden),)


def flow_of(between: Between) -> Flow:
    """The flow of the model, in training."""
    return find_flow(Model(between).to("meta"), {"x": torch.zeros(2, 3)})


def test_modules_in_a_list_beside_the_layers_are_called_one_by_one() -> None:
    flow = flow_of(lambda model, hidden, begun, number: model.norms[number](hidden))
    assert [call.module for call in flow.calls] == [
        *("first", "norms.0", "layers.0", "norms.1", "layers.1", "norms.2", "layers.2", "last")
    ]


def scaled_first(model: Model, hidden: Tensor, begun: Tensor, number: int) -> Tensor:
    return hidden.mul_(2) if number == 0 else hidden


def test_a_result_may_change_in_place_in_the_block_that_made_it() -> None:
    flow = flow_of(lambda model, hidden, begun, number: model.drop(scaled_first(model, hidden, begun, number)))
    assert flow.carried(flow.starts[1]) == ((1, 0),)


def test_a_result_that_changes_in_place_is_not_carried_across_a_cut() -> None:
    """Each of the two blocks would change it."""
    with pytest.raises(InvalidInputError, match=r"must not change in place what crosses a cut, .* got 'first'"):
        flow_of(scaled_first)
    with pytest.raises(InvalidInputError, match=r"must not change in place what crosses a cut, .* got 'layers.1'"):
        flow_of(lambda model, hidden, begun, number: hidden.view(-1).add_(1).view(2, 3) if number == 2 else hidden)


def test_what_is_drawn_between_modules_may_serve_one_block() -> None:
    flow = flow_of(lambda model, hidden, begun, number: functional.dropout(hidden, 0.5, training=True))
    assert len(flow.starts) == 5


def test_what_is_drawn_between_modules_may_not_serve_two_blocks() -> None:
    """Each of them runs what is between the modules, and would draw its own."""
    kept: list[Tensor] = []

    def same(model: Model, hidden: Tensor, begun: Tensor, number: int) -> Tensor:
        if number == 0:
            kept[:] = [functional.dropout(begun, 0.5, training=True)]
        return hidden + kept[0] if number < 2 else hidden

    with pytest.raises(InvalidInputError, match=r"must use what it draws at random .* in one block.* got 'layers.0'"):
        flow_of(same)


def test_a_module_that_draws_is_called_once_and_its_result_is_carried() -> None:
    """Dropout of what no module gave was taken for a maker, which every block calls again: each had its own mask."""
    kept: list[Tensor] = []

    def same(model: Model, hidden: Tensor, begun: Tensor, number: int) -> Tensor:
        if number == 0:
            kept[:] = [model.drop(torch.ones(3))]
        return hidden * kept[0]

    flow = flow_of(same)
    drop = next(n for n, call in enumerate(flow.calls) if call.module == "drop")
    assert all((drop, 0) in flow.carried(start) for start in flow.starts[1:-1])


def test_the_layer_that_fails_is_named_and_not_what_fails_after_it() -> None:
    model = Model(lambda model, hidden, begun, number: hidden)
    model.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(4, 5)])
    model.last = nn.Linear(5, 3)
    with pytest.raises(InvalidInputError, match=r"fails in layers\.1 \(RuntimeError: .*must have same reduction dim"):
        find_flow(model.to("meta"), {"x": torch.zeros(2, 3)})
