"""The papers' models: their published parameters, and what a cut may not change."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

from pipeplan.errors import InvalidInputError
from pipeplan.protocol.jobs import ProfileTask
from worker_agent.cli import app
from worker_agent.models.chain import Chain, build_model
from worker_agent.models.data import default_feed, open_data
from worker_agent.models.losses import default_loss
from worker_agent.models.papers import PAPERS
from worker_agent.models.papers.convolutions import scaled
from worker_agent.models.papers.language_models import scan
from worker_agent.models.spec import call_factory, parse_spec
from worker_agent.models.values import as_values
from worker_agent.profiler.analytic import estimate_profile
from worker_agent.profiler.datasheets import DATASHEETS
from worker_agent.profiler.job import ProfileJob

PUBLISHED = {
    "alexnet": 61_100_840,  # torchvision's table of models
    "vgg16": 138_357_544,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "inception_v3": 27_161_264 - 3_326_696,  # without the auxiliary classifier, of which torchvision's count is
    "gnmt": 160_671_297,  # MLPerf's GNMT, as in the tests of NVIDIA's apex
    "awd_lm": 24_221_600,  # what the authors' code prints; 24 million in Merity et al. 2017, table 1
    "bert_large": 335_174_458,  # transformers' BertForMaskedLM with the config of bert-large-uncased
    "llama_7b": 6_738_415_616,  # transformers' LlamaForCausalLM; 6.7 billion in Touvron et al. 2023, table 2
    "mamba_1_4b": 1_372_178_432,  # the checkpoint state-spaces/mamba-1.4b
}

SMALL = {
    "alexnet": "scale=0.125&image_size=63&classes=5",
    "amoebanet_d": "layers=3&filters=16&image_size=32&classes=5",
    "awd_lm": "vocabulary=20&embedding=8&hidden=12&sequence_length=6",
    "bert_large": "hidden=16&layers=2&heads=2&vocabulary=20&sequence_length=6",
    "gnmt": "hidden=8&layers=3&vocabulary=20&length=5",
    "gpt_1_3b": "hidden=16&layers=2&heads=2&vocabulary=20&sequence_length=6",
    "gpt_2_2b": "hidden=16&layers=2&heads=2&vocabulary=20&sequence_length=6",
    "gpt_3_8b": "hidden=16&layers=2&heads=2&vocabulary=20&sequence_length=6",
    "inception_v3": "scale=0.05&image_size=75&classes=5",
    "llama_7b": "hidden=16&layers=2&heads=2&ffn=24&vocabulary=20&sequence_length=6",
    "mamba_1_4b": "hidden=16&layers=2&states=3&vocabulary=20&sequence_length=6",
    "resnet152": "scale=0.125&image_size=32&classes=5",
    "resnet50": "scale=0.125&image_size=32&classes=5",
    "s2vt": "features=12&frames=4&words=3&vocabulary=20&embedding=6&hidden=10",
    "vgg16": "scale=0.125&image_size=32&classes=5",
}


def parameters(model: str) -> int:
    with torch.device("meta"):
        blocks = call_factory(parse_spec(f"preset:{model}", field="model"), field="model")
    return sum(parameter.numel() for parameter in nn.Sequential(*blocks).parameters())


@pytest.mark.parametrize("model", PUBLISHED)
def test_full_size_has_the_published_parameters(model: str) -> None:
    assert parameters(model) == PUBLISHED[model]


@pytest.mark.parametrize(("model", "billions"), [("gpt_1_3b", 1.3), ("gpt_2_2b", 2.2), ("gpt_3_8b", 3.8)])
def test_gpts_have_the_billions_that_2bws_paper_gives(model: str, billions: float) -> None:
    assert round(parameters(model) / 1e9, 1) == billions


@pytest.mark.parametrize(
    ("layers", "filters", "millions"), [(18, 208, 82), (18, 416, 318), (18, 544, 542), (36, 544, 1050), (72, 512, 1800)]
)
def test_amoebanets_have_the_parameters_of_gpipes_table_1(layers: int, filters: int, millions: int) -> None:
    """The table gives two or three digits."""
    found = parameters(f"amoebanet_d?layers={layers}&filters={filters}") / 1e6
    assert found == pytest.approx(millions, rel=0.026)


def test_s2vt_is_as_large_as_the_authors_file_of_weights() -> None:
    """s2vt_vgg_rgb.caffemodel has 349,436,137 bytes: 4 a parameter, and 17 kB of names; PipeDream says 349 MB.

    An LSTM of torch has a second bias (4 * 1000), which Caffe's has not.
    """
    ours = 4 * (parameters("s2vt") - 2 * 4 * 1000)
    assert 0 <= 349_436_137 - ours < 20_000


def test_every_paper_is_a_preset_and_is_tested_here() -> None:
    assert PAPERS.keys() == SMALL.keys()
    assert list(PAPERS) == sorted(PAPERS)


def test_the_command_lists_them_with_their_options() -> None:
    listed = CliRunner().invoke(app, ["models", "--json"])
    assert listed.exit_code == 0
    found = json.loads(listed.stdout)
    assert [paper["model"] for paper in found["papers"]] == [f"preset:{name}" for name in PAPERS]
    (vgg,) = (paper for paper in found["papers"] if paper["model"] == "preset:vgg16")
    assert vgg["options"] == {"scale": 1.0, "image_size": 224, "classes": 1000, "dropout": 0.5}
    assert "hf:llama" in found["families"]
    assert "preset:vgg16: VGG-16" in CliRunner().invoke(app, ["models"]).stdout


def small(model: str) -> Chain:
    return build_model(f"preset:{model}?{SMALL[model]}", seed=0, dtype=torch.float64)


def microbatch(chain: Chain) -> tuple[tuple[Tensor, ...], Tensor]:
    inputs, targets = open_data(default_feed(chain).data, microbatch_size=2, seed=1).microbatch(0)
    assert isinstance(targets, Tensor)
    return tuple(v.double() if v.is_floating_point() else v for v in as_values(inputs)), targets


def passed(blocks: tuple[nn.Module, ...], values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    for block in blocks:
        values = as_values(block(*values))
    return values


def gradients(chain: Chain) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in chain.root.named_parameters() if p.grad is not None}


@pytest.mark.each_case
@pytest.mark.parametrize("model", SMALL)
def test_a_chain_cut_anywhere_equals_the_whole(model: str) -> None:
    """What crosses the cut is detached, as if it were sent: no block may reach around it."""
    chain = small(model)
    inputs, targets = microbatch(chain)
    torch.manual_seed(3)
    whole = default_loss(passed(chain.blocks, inputs)[0], targets)
    torch.autograd.backward(whole)
    expected = gradients(chain)
    assert len(expected) == len(list(chain.root.parameters()))

    count = len(chain.blocks)
    for cut in sorted({1, count // 3, count // 2, count - 1}):
        chain.root.zero_grad()
        torch.manual_seed(3)  # the same dropout
        sent = passed(chain.blocks[:cut], inputs)
        received = tuple(v.detach().requires_grad_(v.is_floating_point()) for v in sent)
        loss = default_loss(passed(chain.blocks[cut:], received)[0], targets)
        torch.autograd.backward(loss)
        arrived = [(v, r.grad) for v, r in zip(sent, received, strict=True) if v.requires_grad and r.grad is not None]
        torch.autograd.backward([v for v, _ in arrived], [g for _, g in arrived])
        assert torch.equal(loss, whole)
        for name, gradient in gradients(chain).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.each_case
@pytest.mark.parametrize("model", SMALL)
def test_estimates_need_no_data_and_no_device(model: str) -> None:
    """Of 2 images: of one that a network makes 1 x 1, batch norm has no variance."""
    task = ProfileTask(model=f"preset:{model}?{SMALL[model]}", microbatch_sizes=(2,))
    profile = estimate_profile(ProfileJob(task=task), DATASHEETS["a100-80gb"])
    assert len(profile.blocks) == len(small(model).blocks)
    assert sum(block.weight_bytes for block in profile.blocks) == 4 * parameters(f"{model}?{SMALL[model]}")
    assert all(m.forward_s > 0 and m.backward_s > 0 for m in profile.at(2))


@given(st.integers(1, 9), st.integers(0, 3))
def test_a_scan_and_its_gradients_are_the_recurrences(length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    decay, added = torch.rand(2, 2, length, 3, dtype=torch.float64, generator=generator).requires_grad_()
    weighing = torch.rand(2, length, 3, dtype=torch.float64, generator=generator)
    state, states = torch.zeros(2, 3, dtype=torch.float64), []
    for t in range(length):
        state = decay[:, t] * state + added[:, t]
        states.append(state)
    expected, found = torch.stack(states, dim=1), scan(decay, added)
    torch.testing.assert_close(found, expected)
    gradients_expected, gradients_found = (
        torch.autograd.grad((values * weighing).sum(), (decay, added)) for values in (expected, found)
    )
    torch.testing.assert_close(gradients_found, gradients_expected)


def test_mambas_tokens_see_none_that_follow() -> None:
    chain = small("mamba_1_4b")
    tokens = torch.arange(6).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 4] = 9
    first, second = (passed(chain.blocks, (t,))[0][0] for t in (tokens, changed))
    assert torch.equal(first[:4], second[:4])
    assert not torch.equal(first[4:], second[4:])


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("vgg16?image_size=31", "model.image_size: must be at least 32, got 31"),
        ("vgg16?scale=0", "model.scale: must be above 0, got 0"),
        ("resnet50?classes=0", "model.classes: must be a whole number of at least 1, got 0"),
        ("amoebanet_d?layers=4", "model.layers: must be a multiple of 3, got 4"),
        ("gnmt?layers=1", "model.layers: must be at least 2, got 1"),
        ("awd_lm?dropout=1", "model.dropout: must be below 1, got 1"),
        ("bert_large?heads=3", "model.heads: must divide the 1024 hidden features, got 3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(model: str, sentence: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parameters(model)
    assert str(caught.value) == sentence


def test_scaled_channels_are_multiples_of_8() -> None:
    assert [scaled(64, scale) for scale in (1.0, 0.5, 0.3, 0.01)] == [64, 32, 16, 8]


def test_transformers_own_models_have_the_same_parameters() -> None:
    """Where the same model is in transformers, it is counted and not recalled."""
    import transformers

    configs: dict[str, tuple[Any, Any]] = {
        "bert_large": (
            transformers.BertForMaskedLM,
            transformers.BertConfig(
                hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
            ),
        ),
        "llama_7b": (transformers.LlamaForCausalLM, transformers.LlamaConfig()),
        "mamba_1_4b": (
            transformers.MambaForCausalLM,
            transformers.MambaConfig(hidden_size=2048, num_hidden_layers=48, time_step_rank=128),
        ),
    }
    for name, (model, config) in configs.items():
        with torch.device("meta"):
            assert sum(p.numel() for p in model(config).parameters()) == PUBLISHED[name], name
