"""Batches by name: a mask reaches every block that needs it, and what is wrong with a batch is said."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pipeplan.errors import InvalidInputError
from tests.house.pages import DOCS, fences
from tests.worker_agent.models import batches
from tests.worker_agent.models.test_cut import OTHERS
from tests.worker_agent.models.test_hugging_face import NARROW, SPECS
from worker_agent.models.batches import IGNORED
from worker_agent.models.chain import Chain, build_model
from worker_agent.models.data import MicrobatchSource, open_data
from worker_agent.models.losses import default_loss

HERE = "tests.worker_agent.models.batches"
WHISPER = (
    "hf:whisper?encoder_layers=2&decoder_layers=2&d_model=32&encoder_attention_heads=2&decoder_attention_heads=2"
    "&encoder_ffn_dim=48&decoder_ffn_dim=48&vocab_size=50&max_source_positions=20&max_target_positions=12"
    "&num_mel_bins=8&pad_token_id=1&decoder_start_token_id=2&bos_token_id=2&eos_token_id=3&begin_suppress_tokens=null"
)
PAIRS = {
    "t5": "hf:t5?num_layers=2&num_decoder_layers=3&d_model=32&num_heads=2&d_kv=16&d_ff=48&vocab_size=50"
    "&decoder_start_token_id=0&pad_token_id=0",
    "bart": "hf:bart?encoder_layers=2&decoder_layers=2&d_model=32&encoder_attention_heads=2&decoder_attention_heads=2"
    "&encoder_ffn_dim=48&decoder_ffn_dim=48&vocab_size=50&max_position_embeddings=16&pad_token_id=1",
}
PAIRS["mbart"] = PAIRS["bart"].replace("bart", "mbart", 1)  # its decoder begins with the last token of the labels
WINDOW = f"hf:mistral?{NARROW}&sliding_window=3"
BLOOM = "hf:bloom?n_layer=2&hidden_size=32&n_head=2&vocab_size=50"
MPT = "hf:mpt?n_layers=2&d_model=32&n_heads=2&vocab_size=50&max_seq_len=16"
GIVEN = {
    **{f"{family}, {side}": (SPECS[family], f"padded?side={side}")
       for family in ("gpt2", "llama", "qwen2", "gemma", "phi", "gpt_neox", "opt") for side in ("right", "left")},
    "mistral's window, right": (WINDOW, "padded"),
    "mistral's window, left": (WINDOW, "padded?side=left"),
    "bert, masked": (SPECS["bert"], "masked"),
    "mamba, left": (OTHERS["mamba"], "padded?side=left"),
    "llama, packed": (SPECS["llama"], "packed"),
    "bloom, right": (BLOOM, "padded"),
    "mpt, right": (MPT, "padded"),
    "vit": (OTHERS["vit"], "images"),
    "resnet": (OTHERS["resnet"], "images"),
    "convnext": ("hf:convnext?hidden_sizes=[8,16]&depths=[1,2]&num_stages=2&num_labels=7&image_size=32",
                 "images?size=32"),
    "t5, right": (PAIRS["t5"], "padded?decoder=6"),
    "t5, left": (PAIRS["t5"], "padded?decoder=6&side=left"),
    "bart, right": (PAIRS["bart"], "padded?decoder=6"),
    "mbart, right": (PAIRS["mbart"], "padded?decoder=6"),
    "whisper": (WHISPER, "sounds"),
}  # fmt: skip


def passed(chain: Chain, inputs: Any) -> Tensor:
    """What the blocks give, each cut off from the one before as in another process."""
    values = inputs if isinstance(inputs, tuple) else (inputs,)
    for block in chain.blocks:
        given = block(*values)
        values = given if isinstance(given, tuple) else (given,)
    assert len(values) == 1
    last: Tensor = values[0]
    return last


def whole_loss(chain: Chain, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The uncut model's logits, and its loss without the rounding to float32 in the library's own."""
    logits, labels = chain.root(**batch).logits, batch["labels"]
    assert chain.batches is not None
    if chain.batches.labels == "next":
        logits_there, labels = logits[:, :-1], labels[:, 1:]
    else:
        logits_there = logits
    return logits, functional.cross_entropy(logits_there.reshape(-1, logits.shape[-1]), labels.reshape(-1))


@pytest.mark.each_case
@pytest.mark.parametrize("case", sorted(GIVEN))
def test_the_blocks_give_the_uncut_models_outputs_and_gradients_for_batches_by_name(case: str) -> None:
    spec, data = GIVEN[case]
    chain = build_model(spec, seed=0, dtype=torch.float64)
    chain.root.eval()
    name, _, options = data.partition("?")
    given = dict(pair.split("=") for pair in options.split("&") if pair)
    made: Any = getattr(batches, name)
    batch = made(microbatch_size=4, seed=1, **{k: int(v) if v.isdigit() else v for k, v in given.items()})[0]
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    assert chain.batches is not None
    inputs, targets = chain.batches.pair("data.0", batch, 4)
    ours = passed(chain, inputs)
    theirs, loss = whole_loss(chain, batch)
    assert torch.equal(ours, theirs)
    parameters = [p for p in chain.root.parameters() if p.requires_grad]
    found = torch.autograd.grad(default_loss(ours, targets), parameters, allow_unused=True)
    expected = torch.autograd.grad(loss, parameters, allow_unused=True)
    assert sum(gradient is not None for gradient in expected) > 10
    for one, other in zip(found, expected, strict=True):
        assert (one is None) is (other is None) and (one is None or other is None or (one - other).abs().max() < 1e-12)


@pytest.mark.each_case
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_that_compute_in_float32_alone_take_masks_as_well(family: str) -> None:
    chain = build_model(SPECS[family], seed=0)
    chain.root.eval()
    batch = batches.padded(microbatch_size=4, seed=1)[0]
    assert chain.batches is not None
    inputs, targets = chain.batches.pair("data.0", batch, 4)
    ours, (theirs, loss) = passed(chain, inputs), whole_loss(chain, batch)
    assert torch.equal(ours, theirs) and torch.allclose(default_loss(ours, targets), loss)


@pytest.mark.each_case
@pytest.mark.parametrize("case", ["llama, left", "t5, right", "gpt2, right"])
def test_a_stage_needs_its_own_blocks_alone_whatever_the_batch_holds(case: str) -> None:
    spec, data = GIVEN[case]
    source = open_data(f"{HERE}:{data}", microbatch_size=4, seed=1, form=build_model(spec, seed=4, empty=True).batches)
    inputs, _ = source.microbatch(0)
    whole = build_model(spec, seed=4)
    whole.root.eval()
    values = inputs if isinstance(inputs, tuple) else (inputs,)
    for number in range(len(whole.blocks)):
        alone = build_model(spec, seed=4, empty=True)
        alone.materialise(number, number + 1)
        alone.root.eval()
        given = alone.blocks[number](*values)
        values = given if isinstance(given, tuple) else (given,)
    assert torch.equal(values[0], passed(whole, inputs))


def test_a_mask_that_masks_nothing_leaves_one_tensor_between_blocks() -> None:
    chain = build_model(SPECS["llama"], seed=0)
    tokens = torch.randint(3, 50, (2, 6))
    assert chain.batches is not None
    inputs, _ = chain.batches.pair("data", {"input_ids": tokens, "attention_mask": tokens * 0 + 1, "labels": tokens}, 2)
    assert inputs is tokens
    kept, _ = chain.batches.pair(
        "data",
        {
            "input_ids": tokens,
            "attention_mask": tokens * 0 + 1,
            "position_ids": torch.arange(6).expand(2, -1),
            "labels": tokens,
        },
        2,
    )
    assert len(kept) == 3


def test_targets_are_the_labels_at_the_places_that_predict_them() -> None:
    labels = torch.tensor([[5, 6, 7], [8, 9, -100]])
    batch = {"input_ids": labels.clamp(min=0), "labels": labels}
    for family, expected in {"gpt2": [[6, 7, -100], [9, -100, -100]], "bert": labels.tolist()}.items():
        form = build_model(SPECS[family], seed=0, empty=True).batches
        assert form is not None and form.pair("data", batch, 2)[1].tolist() == expected
    unshifted = "hf:xlnet?n_layer=2&d_model=32&n_head=2&d_inner=48&vocab_size=50"  # as the library's own loss
    form = build_model(unshifted, seed=0, empty=True).batches
    assert form is not None and form.pair("data", batch, 2)[1] is labels
    form = build_model(PAIRS["bart"], seed=0, empty=True).batches
    assert form is not None
    (_, begun), targets = form.pair("data", batch, 2)
    assert begun.tolist() == [[2, 5, 6], [2, 8, 9]] and targets is labels


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("unknown", r"data.0.sentence_ids: must be one of those that llama takes: input_ids, attention_mask, pos"),
        ("input_ids", r"data.0.input_ids: must be in every batch that is a mapping, got \['attention_mask'\]"),
        ("labels", r"data.0.labels: must be in every batch that is a mapping, got \['attention_mask', 'input_ids'\]"),
        ("shorter", r"data.0.attention_mask: must have the shape of the tokens, \(4, 9\), got \(4, 8\)"),
        ("four", r"data.0.attention_mask: must be of shape \(samples, tokens\), got \(4, 1, 1, 9\)"),
        ("additive", r"data.0.attention_mask: must hold 1 where a token is, and 0 where none is, got \[-1000\]"),
        ("real", r"data.0.attention_mask: must be whole numbers, got torch.float32"),
        ("list", r"data.0.attention_mask: must be a tensor, got 'list'"),
        ("short", r"data.0.labels: must have the shape of the tokens that predict them, \(4, 9\), got \(4, 8\)"),
        ("far", r"data.0.position_ids: must be from 0 to below the 16 positions of the model's config, got \[10"),
    ],
)
def test_a_batch_that_breaks_a_rule_is_refused_by_name(key: str, sentence: str) -> None:
    form = build_model(SPECS["llama"], seed=0, empty=True).batches
    source = open_data(f"{HERE}:broken?key={key}", microbatch_size=4, seed=1, form=form)
    with pytest.raises(InvalidInputError, match=sentence):
        source.microbatch(0)


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (torch.zeros(2, 17, dtype=torch.int64), r"data.0.input_ids: must have at most 16 tokens, the positions .* 17"),
        (torch.zeros(2, 9), "data.0.input_ids: must be whole numbers, got torch.float32"),
        (torch.zeros(2, dtype=torch.int64), r"data.0.input_ids: must be of shape \(samples, tokens\), got \(2,\)"),
    ],
)
def test_a_pairs_tokens_that_break_a_rule_are_refused_by_name(tokens: Tensor, sentence: str) -> None:
    """Pairs longer than the model's positions ended in an IndexError of its first block."""
    form = build_model(SPECS["llama"], seed=0, empty=True).batches
    targets = torch.zeros(2, 17, dtype=torch.int64)
    source = MicrobatchSource(lambda: [(tokens, targets)], microbatch_size=2, name="mydata:pairs", form=form)
    with pytest.raises(InvalidInputError, match=sentence):
        source.microbatch(0)


def test_a_model_that_takes_no_mask_or_nothing_by_name_refuses_it() -> None:
    form = build_model(OTHERS["resnet"], seed=0, empty=True).batches
    assert form is not None
    images = batches.images(microbatch_size=2, seed=0)[0]
    with pytest.raises(InvalidInputError, match="attention_mask: must be one of those that resnet takes: pixel_values"):
        form.pair("data.0", images | {"attention_mask": torch.ones(2, 4)}, 2)
    with pytest.raises(InvalidInputError, match="this model takes no inputs by name, got"):
        open_data(f"{HERE}:padded", microbatch_size=2, seed=0).microbatch(0)


def test_the_documents_factory_of_mappings_gives_a_model_its_masked_batches() -> None:
    fence = next(each for each in fences(DOCS / "models.md") if "def mappings(" in each.text)
    found: dict[str, Any] = {}
    exec(compile(fence.text, fence.page, "exec"), found)
    chain = build_model("hf:gpt2?n_layer=1&n_embd=8&n_head=2", seed=0)
    given, targets = MicrobatchSource(
        lambda: found["mappings"](microbatch_size=4, seed=0),
        microbatch_size=4,
        name="mydata:mappings",
        form=chain.batches,
    ).microbatch(0)
    assert chain.batches is not None and isinstance(targets, Tensor)
    mask = given[chain.batches.inputs.index("attention_mask")]
    assert 4 * 64 <= int(mask.sum()) < 4 * 128
    assert torch.equal(targets != IGNORED, functional.pad(mask, (0, 1))[:, 1:] == 1)
    values: Any = given
    with torch.no_grad():
        for block in chain.blocks:
            values = block(*values) if isinstance(values, tuple) else block(values)
    assert values.shape == (4, 128, 50257)
