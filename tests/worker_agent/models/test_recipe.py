"""Recipe: a factory's weights, made without its whole model, are those of the whole model to the last bit."""

from collections.abc import Callable
from hashlib import blake2b
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeplan.errors import InvalidInputError
from tests.worker_agent.models.test_papers import SMALL
from worker_agent.models.chain import build_model
from worker_agent.models.recipe import Construction, WeightRecipe, require_stages
from worker_agent.models.spec import call_factory, parse_spec

SEED = 7


class Numbered(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has every random operation draw from its number, as a recipe does; all else is torch's own."""

    draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            digest = blake2b(f"{SEED} {self.draws}".encode(), digest_size=8).digest()
            self.draws += 1
            torch.default_generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        return func(*args, **(kwargs or {}))


def made_whole(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]), Numbered():  # type: ignore[no-untyped-call]
        return make()


def noted(make: Callable[[], nn.Module]) -> Construction:
    recipe = WeightRecipe(SEED)
    with recipe.noting():
        root = make()
    require_stages(root)
    return Construction(root=root, recipe=recipe)


def require_equal(made: nn.Module, whole: nn.Module) -> None:
    found, expected = made.state_dict(), whole.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.each_case
@pytest.mark.parametrize("model", SMALL)
def test_a_presets_blocks_are_those_of_the_whole_made_one_by_one(model: str) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*call_factory(parse_spec(f"preset:{model}?{SMALL[model]}", field="model"), field="model"))

    construction = noted(make)
    blocks = construction.root
    assert isinstance(blocks, nn.Sequential)
    for number in reversed(range(len(blocks))):
        made = {p for block in list(blocks)[number + 1 :] for p in block.parameters()}  # a later block may share them
        assert all(p.is_meta for p in blocks[number].parameters() if p not in made)
        construction.materialise([blocks[number]])
    require_equal(blocks, made_whole(make))


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
        self.bounded = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
        self.turned = nn.utils.parametrizations.orthogonal(nn.Linear(5, 5))  # an operation that meta tensors lack
        self.turning = nn.utils.parametrizations.orthogonal(nn.Linear(5, 3))


class Initialised(nn.Module):
    """By functions of torch.nn.init, some of which leave meta tensors alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)  # copies
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        self.a, self.b, self.c = (nn.Linear(4, 5) for _ in range(3))
        nn.init.orthogonal_(self.a.weight)
        nn.init.trunc_normal_(self.b.weight, std=0.02)
        nn.init.sparse_(self.c.weight, 0.5)
        self.embed = nn.Embedding(5, 4, padding_idx=2)
        with torch.no_grad():
            self.embed.weight[1] = 3.0


class Computed(nn.Module):
    """Weights that follow from one draw, from literals, and from what the constructor reads."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(4, 4)
        self.one, self.two = nn.Parameter(drawn.clone()), nn.Parameter(drawn * 2)
        self.rates = [float(rate) for rate in torch.linspace(0, 0.2, 3)] + torch.linspace(0, 1, 3).tolist()
        self.largest = float(self.one.detach().abs().max())
        self.one.data /= self.largest
        self.register_buffer("literal", torch.tensor([1.0, 2.0, 3.0]) * torch.randn(3))
        self.mask = torch.tril(torch.ones(3, 3))
        self.lstm = nn.LSTM(4, 5, 2, bidirectional=True)
        self.narrow = nn.Linear(3, 3).half()
        self.list = [torch.tensor([1.0, 2.0])]


@pytest.mark.parametrize("kind", [Parametrized, Initialised, Computed])
def test_what_a_constructor_computes_is_computed(kind: type[nn.Module]) -> None:
    construction = noted(kind)
    construction.materialise([construction.root])
    require_equal(construction.root, made_whole(kind))


def test_what_a_module_holds_beside_its_parameters_is_filled_too() -> None:
    made, whole = noted(Computed), made_whole(Computed)
    made.materialise([made.root])
    assert isinstance(made.root, Computed) and isinstance(whole, Computed)
    assert (made.root.rates, made.root.largest) == (whole.rates, whole.largest)
    assert torch.equal(made.root.mask, whole.mask) and torch.equal(made.root.list[0], whole.list[0])
    x = torch.ones(2, 4)
    assert torch.equal(made.root.lstm(x)[0], whole.lstm(x)[0])


@pytest.mark.each_case
@pytest.mark.parametrize("model", ["preset:gpt_1_3b?" + SMALL["gpt_1_3b"], "preset:gnmt?" + SMALL["gnmt"]])
def test_weights_depend_on_the_seed_and_not_on_the_cut(model: str) -> None:
    whole = build_model(model, seed=3, dtype=torch.float64)
    for start, stop in combinations(range(len(whole.blocks) + 1), 2):
        chain = build_model(model, seed=3, dtype=torch.float64, empty=True)
        assert all(parameter.is_meta for parameter in chain.root.parameters())
        assert chain.weight_bytes() == whole.weight_bytes()
        chain.materialise(start, stop)
        for made, expected in zip(chain.blocks[start:stop], whole.blocks[start:stop], strict=True):
            require_equal(made, expected)
        own = {p for block in chain.blocks[start:stop] for p in block.parameters()}
        assert all(p.is_meta for p in chain.root.parameters() if p not in own)
    other = build_model(model, seed=4, dtype=torch.float64)
    assert not torch.equal(next(other.root.parameters()), next(whole.root.parameters()))


class Unfilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        nn.init.normal_(self.weight, generator=torch.Generator().manual_seed(1))


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(4)
        self.one, self.two = nn.Parameter(both[:2]), nn.Parameter(both[2:])


class Hooked(nn.Module):
    """Made anew, the weight once lost the hook."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]


CHANGED = torch.ones(3)
"""A tensor with contents that a constructor changes."""


class Changed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.weight.data.copy_(CHANGED)
        CHANGED.add_(1)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (Unfilled, r"model: must be a factory that gives every tensor a value, got 'weight'"),
        (OwnGenerator, r"without a torch.Generator"),
        (Overlapping, r"must have tensors with memory of their own .*'one and two'"),
        (Hooked, r"must have no hooks on weights \(register_hook\) to be built by stages.*got 'weight'"),
        (Changed, r"must not change a tensor after it gave its values to a weight"),
    ],
)
def test_what_cannot_be_made_in_parts_is_refused(kind: type[nn.Module], rule: str) -> None:
    with pytest.raises(InvalidInputError, match=rule):
        construction = noted(kind)
        construction.materialise([construction.root])


class ByStage(nn.Module):
    by_stage = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x).relu() + self.shift)
        return found


def test_a_class_may_ask_to_be_built_by_stages() -> None:
    model = f"{__name__}:ByStage"
    whole = build_model(model, seed=3).root
    chain = build_model(model, seed=3, empty=True).cut([torch.zeros(5, 4)])
    assert all(tensor.is_meta for tensor in chain.root.state_dict().values())
    chain.materialise(1, 2)
    assert [p.is_meta for p in chain.root.parameters()] == [True, True, False, False]
    chain.materialise()
    require_equal(chain.root, whole)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    values: Any = (x,)
    for block in chain.blocks:
        found = block(*values)
        values = found if isinstance(found, tuple) else (found,)
    assert torch.equal(values[0], whole(x))
