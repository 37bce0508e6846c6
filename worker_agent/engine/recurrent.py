"""Recurrent: torch's recurrent networks written out in linear layers, whose weights' gradients can wait for p2.

torch runs LSTM, GRU and RNN as one function, whose backward gives all gradients at once. Written out, the function is a
linear layer on the inputs of all steps together, and one on the state of each step. The formulas, and their order, are
those of torch's own implementation on a CPU (`aten/src/ATen/native/RNN.cpp`): in float64 no bit changes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

State = tuple[Tensor, ...]
"""A layer's hidden state in one direction; of an LSTM also its cells'."""

Step = Callable[[Tensor, Tensor, State], State]
"""The state after a step, from the input's part of the gates, the state's part, and the state before."""


def _lstm_step(of_input: Tensor, of_state: Tensor, state: State) -> State:
    into, forget, cell, out = (of_state + of_input).chunk(4, 1)
    new = torch.sigmoid(forget) * state[1] + torch.sigmoid(into) * torch.tanh(cell)
    return torch.sigmoid(out) * torch.tanh(new), new


def _gru_step(of_input: Tensor, of_state: Tensor, state: State) -> State:
    # In place as torch does it: the gates stay where `of_state` was, and a step keeps no more than torch's own.
    (reset_i, update_i, new_i), (reset_h, update_h, new_h) = of_input.chunk(3, 1), of_state.unsafe_chunk(3, 1)
    reset, update = reset_h.add_(reset_i).sigmoid_(), update_h.add_(update_i).sigmoid_()
    new = (new_i + new_h.mul_(reset)).tanh_()
    return ((state[0] - new).mul_(update).add_(new),)


def _plain_step(activation: Callable[[Tensor], Tensor]) -> Step:
    return lambda of_input, of_state, state: (activation(of_state + of_input),)


def _network(step: Step) -> Callable[..., Any]:
    """The function of a network whose cells take such steps, as `torch.lstm`, `torch.gru` and `torch.rnn_tanh` are."""

    def run(
        x: Tensor,
        first: Tensor | Sequence[Tensor],
        weights: Sequence[Tensor],
        biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        states = (first,) if isinstance(first, Tensor) else tuple(first)
        directions = 2 if bidirectional else 1
        each = len(weights) // (layers * directions)
        x = x.transpose(0, 1) if batch_first else x
        last: list[State] = []
        for number in range(layers):
            outputs = []
            for backwards in range(directions):
                place = number * directions + backwards
                own = weights[place * each : (place + 1) * each]
                output, state = layer(step, x, tuple(s[place] for s in states), own, biases, bool(backwards))
                outputs.append(output)
                last.append(state)
            x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            if dropout and train and number < layers - 1:
                x = torch.dropout(x, dropout, train)
        return x.transpose(0, 1) if batch_first else x, *(torch.stack(parts) for parts in zip(*last, strict=True))

    return run


def layer(
    step: Step, x: Tensor, state: State, weights: Sequence[Tensor], biases: bool, backwards: bool
) -> tuple[Tensor, State]:
    """A layer in one direction over (steps, B, in): the output of every step, and the last state."""
    of_inputs = functional.linear(x, weights[0], weights[2] if biases else None)
    project = weights[-1] if len(weights) in (3, 5) else None
    outputs = []
    steps = of_inputs.unbind(0)
    for of_input in reversed(steps) if backwards else steps:
        state = step(of_input, functional.linear(state[0], weights[1], weights[3] if biases else None), state)
        if project is not None:
            state = (functional.linear(state[0], project), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _cell(step: Step) -> Callable[..., Any]:
    """The function of one cell, as `torch.lstm_cell`, `torch.gru_cell` and `torch.rnn_tanh_cell` are."""

    def run(
        x: Tensor,
        first: Tensor | Sequence[Tensor],
        of_input: Tensor,
        of_state: Tensor,
        input_bias: Tensor | None = None,
        state_bias: Tensor | None = None,
    ) -> Any:
        state = (first,) if isinstance(first, Tensor) else tuple(first)
        made = step(
            functional.linear(x, of_input, input_bias), functional.linear(state[0], of_state, state_bias), state
        )
        return made[0] if len(made) == 1 else made

    return run


WRITTEN_OUT: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: _network(_lstm_step),
    torch.gru: _network(_gru_step),
    torch.rnn_tanh: _network(_plain_step(torch.tanh)),
    torch.rnn_relu: _network(_plain_step(torch.relu)),
    torch.lstm_cell: _cell(_lstm_step),
    torch.gru_cell: _cell(_gru_step),
    torch.rnn_tanh_cell: _cell(_plain_step(torch.tanh)),
    torch.rnn_relu_cell: _cell(_plain_step(torch.relu)),
}
"""torch's functions, written out."""


_NETWORK_ARGUMENTS = 9
"""The number of arguments of a network's function, with packed sequences or without. A cell's takes fewer."""


def written_out(func: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any] | None:
    """The function that runs in place of torch's; None if torch's own runs.

    On a GPU cuDNN runs a whole network as one kernel, which is worth more than the split. Packed sequences are left to
    torch as well.
    """
    run = WRITTEN_OUT.get(func)
    if run is None or not isinstance(args[0], Tensor) or args[0].device.type != "cpu" or args[0].numel() == 0:
        return None
    packed = len(args) == _NETWORK_ARGUMENTS and not isinstance(args[3], bool)
    return None if packed else run
