"""Own: the blocks of a module of one's own are the module, to the last bit; what cannot be cut is refused."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeplan.errors import InvalidInputError
from tests.worker_agent.models import own_modules
from tests.worker_agent.models.own_modules import TOKENS, WIDTH
from worker_agent.models.chain import build_model
from worker_agent.models.data import in_blocks
from worker_agent.models.own import cut

PLACE = "tests.worker_agent.models.own_modules"
DATA = f"{PLACE}:tokens"


def features(samples: int) -> tuple[Tensor, ...]:
    return (torch.randn(samples, WIDTH),)


def images(samples: int) -> tuple[Tensor, ...]:
    return (torch.randn(samples, 3, 6, 6),)


def sentences(samples: int) -> tuple[Tensor, ...]:
    drawn = torch.randint(1, TOKENS, (samples, 3 + samples))
    drawn[0, -1] = 0
    return (drawn,)


def both(samples: int) -> tuple[Tensor, ...]:
    return (*sentences(samples), *features(samples))


CASES: dict[type[nn.Module], tuple[Callable[[int], tuple[Tensor, ...]], str]] = {
    own_modules.Plain: (features, "body.0 body.3 body.6 body.9"),
    own_modules.Residual: (images, "stem convolutions.0 convolutions.1 convolutions.2 convolutions.3 head"),
    own_modules.Masked: (sentences, "embed layers.0 layers.1 layers.2"),
    own_modules.TorchsEncoder: (sentences, "embed encoder.layers.0 encoder.layers.1 encoder.layers.2 head"),
    own_modules.Nested: (
        sentences,
        "parts.embed.0 parts.embed.1.0 parts.groups.0.blocks.0 parts.groups.1.blocks.0 parts.groups.1.blocks.1 "
        "parts.head.1",
    ),
    own_modules.Tied: (features, "first middle.0 middle.1 last"),
    own_modules.Dropping: (features, "layers.0 layers.1 layers.2"),
    own_modules.Twice: (features, "layer layer:2 layer:3 head"),
    own_modules.Varied: (both, "embed frozen recurrent values"),
    own_modules.Experts: (sentences, "embed layers.0 layers.1 head"),
}


def in_order(parts: Sequence[nn.Module], *given: Tensor) -> Any:
    """What the blocks give one after the other. Between them go tensors alone."""
    values: Any = given
    for part in parts:
        values = part(*values)
        values = values if isinstance(values, tuple) else (values,)
        assert all(isinstance(value, Tensor) for value in values)
    return values


def run(forward: Callable[..., Any], given: tuple[Tensor, ...], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """Results, the parameters' gradients, and the random number that is drawn next."""
    torch.manual_seed(4)
    found = forward(*given)
    following = torch.rand(())
    results = found if isinstance(found, tuple) else (found,)
    along = [torch.randn(result.shape, generator=torch.Generator().manual_seed(5)) for result in results]
    gradients = torch.autograd.grad(results, parameters, along, allow_unused=True)
    return [*results, *gradients, following]


@pytest.mark.each_case
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_the_blocks_in_order_give_exactly_the_modules_outputs_and_gradients(kind: type[nn.Module]) -> None:
    sample, names = CASES[kind]
    torch.manual_seed(3)
    module = kind()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    parts, found = cut(module, sample(2))
    assert " ".join(found) == names
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for samples in (2, 5):  # the second has other shapes than those that were cut
        given = sample(samples)
        state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        theirs = run(module, given, parameters)
        noted = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        module.load_state_dict(state)
        ours = run(partial(in_order, parts), given, parameters)
        assert all(torch.equal(noted[name], tensor) for name, tensor in module.state_dict().items())
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) is (other is None) and (one is None or other is None or torch.equal(one, other))
    assert not any("forward" in vars(part) for part in module.modules())


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_a_block_holds_what_it_uses_and_every_tensor_is_in_one(kind: type[nn.Module]) -> None:
    module = kind()
    own = set(module.parameters()) | set(module.buffers())
    parts, _ = cut(module, CASES[kind][0](2))
    assert {tensor for part in parts for tensor in (*part.parameters(), *part.buffers())} == own


def test_a_forward_of_new_shapes_saves_what_one_of_known_shapes_saves() -> None:
    parts, _ = cut(own_modules.Tied(), features(2))
    saved: list[list[torch.Size]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved[-1].append(tensor.shape)
        return tensor

    for _ in range(2):
        saved.append([])
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            in_order(parts, *features(5))
    assert saved[0] == saved[1]


def test_what_crosses_a_cut_is_what_is_used_later() -> None:
    """In a residual network it is one tensor, and two from where the long skip begins; never the image."""
    parts, names = cut(own_modules.Residual(), images(2))
    values: Any = images(2)
    crossing = {}
    for name, part in zip(names[1:], parts, strict=False):
        values = part(*values)
        crossing[name] = [tuple(value.shape) for value in values if value.numel()]
    image = (2, 4, 6, 6)
    assert crossing["convolutions.0"] == [image]
    assert crossing["convolutions.2"] == [image, image]
    assert crossing["head"] == [(2, 4)]


def test_weights_that_two_blocks_use_are_in_both() -> None:
    module = own_modules.Masked()
    parts, _ = cut(module, sentences(2))
    holders = [[n for n, part in enumerate(parts) if p in set(part.parameters())] for p in module.parameters()]
    places = dict(zip((name for name, _ in module.named_parameters()), holders, strict=True))
    assert places["embed.weight"] == [0, 3] and places["positions"] == [0] and places["scale"] == [3]


def test_a_layer_called_again_is_not_cut_from_itself_where_it_counts_its_calls() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(self.layer(x)))  # type: ignore[no-any-return]

    assert cut(Counting(), features(3))[1] == ("layer.0", "head")


@pytest.mark.parametrize(
    ("kind", "place", "rule"),
    [
        (
            "Branching",
            "Branching, own_modules.py line ",
            "must not look into tensors outside of its layers, as __bool",
        ),
        ("Remembering", "Remembering", "must keep no tensor from one forward to the next, as in its attribute state"),
        ("Hooked", "Hooked, own_modules.py line ", "must not call register_hook outside of its layers"),
        ("Single", "Single with 1", "must call at least two modules with weights"),
        ("Named", "Named", "must return a tensor or a tuple of tensors, and returns dict"),
    ],
)
def test_what_cannot_be_cut_says_where_and_why_and_what_to_write(kind: str, place: str, rule: str) -> None:
    module = getattr(own_modules, kind)()
    with pytest.raises(InvalidInputError) as caught:
        cut(module, features(2))
    assert str(caught.value).startswith(f"model: {rule}") and "def blocks()" in str(caught.value)
    assert str(caught.value.value).startswith(place)
    module(*features(2))


def test_the_refusal_names_the_line_that_looks() -> None:
    lines = Path(own_modules.__file__ or "").read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, start=1) if "if x.sum() > 0:" in text)
    with pytest.raises(InvalidInputError) as caught:
        cut(own_modules.Branching(), features(2))
    assert caught.value.value == f"Branching, own_modules.py line {line}"


def test_a_layer_that_raises_says_what_it_was_given() -> None:
    with pytest.raises(InvalidInputError, match=r"call body\.0 with what it takes: it raises RuntimeError: mat1"):
        cut(own_modules.Plain(), (torch.randn(2, WIDTH + 1),))


def test_blocks_begin_where_one_says() -> None:
    spec = f'{PLACE}:with_cuts?cuts=["embed","layers.1"]'
    whole = build_model(spec, seed=0)
    assert whole.uncut and whole.blocks == (whole.root,)
    chain = in_blocks(whole, DATA, microbatch_size=2, seed=0, dtype=torch.float32)
    assert chain.block_names == ("embed", "layers.1") and not chain.uncut
    given = sentences(3)
    assert torch.equal(in_order(chain.blocks, *given)[0], chain.root(*given))


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ('["embed"]', "must be a list of at least two names"),
        ('["layers.1","embed"]', "must name modules in the order in which the forward calls them: embed, layers.0"),
        ('["embed","layer.1"]', "must name modules in the order"),
    ],
)
def test_cuts_that_are_not_possible_are_refused(cuts: str, message: str) -> None:
    chain = build_model(f"{PLACE}:with_cuts?cuts={cuts}", seed=0)
    with pytest.raises(InvalidInputError, match=rf"model\.cuts: {message}"):
        in_blocks(chain, DATA, microbatch_size=2, seed=0, dtype=torch.float32)


def test_a_module_that_is_there_already_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="must be a class or a factory: the seed gives no weights"):
        build_model(f"{PLACE}:MADE", seed=0)


def test_the_seed_gives_the_weights() -> None:
    one, same, other = (build_model(f"{PLACE}:Masked", seed=seed).root.state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert not torch.equal(one["embed.weight"], other["embed.weight"])


def test_a_forward_that_takes_another_way_for_other_shapes_is_refused() -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers if len(x) > 2 else self.layers[:2]:
                x = layer(x)
            return x

    parts, _ = cut(Short(), features(4))
    in_order(parts, *features(3))
    with pytest.raises(InvalidInputError, match=r"must call layers\.2 for inputs of all shapes"):
        in_order(parts, *features(2))
