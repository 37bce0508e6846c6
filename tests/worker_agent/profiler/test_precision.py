"""Linear layers in 8 and 4 bits: what is cast, computed and kept, by the operations of a model's layers."""

import pytest

from pipeplan.documents.forms import WHOLE, Form
from pipeplan.errors import InvalidInputError
from pipeplan.protocol.estimates import FormsAsked
from tests.worker_agent.profiler.test_forms import task
from worker_agent.profiler.datasheets import DATASHEETS
from worker_agent.profiler.forms import profile_with_forms
from worker_agent.profiler.precision import RECIPES, in_recipe
from worker_agent.profiler.sharded import FormCounts, count_form, shape_model

HIDDEN, FFN, HEADS, TOKENS = 96, 192, 12, 64
LLAMA = (
    f"hf:llama?num_hidden_layers=2&hidden_size={HIDDEN}&intermediate_size={FFN}&num_attention_heads={HEADS}"
    f"&num_key_value_heads={HEADS}&vocab_size=96&max_position_embeddings=64"
)


def counted(form: Form = WHOLE) -> FormCounts:
    return count_form(shape_model(LLAMA, "bfloat16"), form, microbatch_sizes=(1,), sequence_length=TOKENS)


@pytest.mark.parametrize("precision", RECIPES)
def test_linear_layers_alone_are_narrow_and_each_tensor_is_cast_once(precision: str) -> None:
    recipe, counts = RECIPES[precision], counted()
    narrow = in_recipe(counts, recipe)
    layer = narrow.kinds[narrow.blocks[1]].by_size[1]
    products = [op for op in (*layer.forward, *layer.backward) if op.dtype == recipe.dtype]
    assert len(products) == 3 * 7, "queries, keys, values, output, gate, up and down, each forward and twice backward"
    assert all(op.name in ("mm", "addmm") for op in products)
    casts = [[op.moved_bytes for op in each if op.name == "cast"] for each in (layer.forward, layer.backward)]
    element_bytes = 2 + 2 * recipe.element_bytes
    assert casts[0] == [round(TOKENS * width * element_bytes) for width in (HIDDEN, HIDDEN, HIDDEN, FFN)]
    gradients = [*[HIDDEN] * 5, *[FFN] * 2]
    assert sorted(casts[1]) == [round(TOKENS * width * element_bytes) for width in gradients]
    head, wide = (each.kinds[each.blocks[-1]].by_size[1] for each in (narrow, counts))
    assert head == wide


@pytest.mark.parametrize("precision", RECIPES)
def test_the_backward_keeps_the_inputs_columns_and_attentions_result_beside_them(precision: str) -> None:
    recipe, counts = RECIPES[precision], counted()
    narrow = in_recipe(counts, recipe)
    wide_layer, layer = (each.kinds[each.blocks[1]].by_size[1] for each in (counts, narrow))
    replaced, beside = 2 * HIDDEN + FFN, HIDDEN  # of attention and of the gates, of down; of attention's output
    expected = TOKENS * (replaced * (recipe.element_bytes - 2) + beside * recipe.element_bytes)
    assert layer.activation_bytes - wide_layer.activation_bytes == round(expected)


def test_of_frozen_layers_no_input_is_kept_and_none_is_saved() -> None:
    model = shape_model(LLAMA, "bfloat16")
    for block in model.chain.blocks[:-1]:
        block.requires_grad_(False)
    counts = count_form(model, WHOLE, microbatch_sizes=(1,), sequence_length=TOKENS)
    narrow = in_recipe(counts, RECIPES["fp8"])
    assert [kind.by_size[1].activation_bytes for kind in narrow.kinds] == [
        kind.by_size[1].activation_bytes for kind in counts.kinds
    ]


def test_a_profile_says_what_it_computes_in_and_large_layers_are_faster() -> None:
    large = LLAMA.replace(f"hidden_size={HIDDEN}", "hidden_size=6144").replace(str(FFN), "16384")
    sheet, asked = DATASHEETS["h100-sxm"], task(large).model_copy(update={"sequence_length": 64})
    wide, narrow = (profile_with_forms(FormsAsked(precision=precision), asked, sheet) for precision in (None, "fp8"))
    assert (wide.precision, narrow.precision) == (None, "fp8")
    times = [each.forms[0].kinds[each.forms[0].blocks[1]].at(2) for each in (wide, narrow)]
    assert times[1].forward_s < times[0].forward_s


@pytest.mark.parametrize(
    ("key", "precision", "rule"),
    [
        ("a100-80gb", "fp8", "must be left out on A100-SXM4-80GB, which has 16 bits and more"),
        ("h100-sxm", "mxfp8", "must be left out on H100-SXM5-80GB, or be one of fp8"),
        ("h100-sxm", "nvfp4", "must be left out on H100-SXM5-80GB, or be one of fp8"),
    ],
)
def test_a_device_that_lacks_a_precision_says_so(key: str, precision: str, rule: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        profile_with_forms(FormsAsked(precision=precision), task(), DATASHEETS[key])
    assert (raised.value.field, raised.value.rule) == ("precision", rule)


def test_experts_are_narrow_and_keep_nothing_of_what_comes_back() -> None:
    """Three products of each pass have their weights' shapes; the router's weights multiply between these products."""
    experts, chosen, inner = 8, 2, 48
    spec = (
        f"hf:mixtral?num_hidden_layers=2&hidden_size={HIDDEN}&intermediate_size={inner}&num_attention_heads={HEADS}"
        f"&num_key_value_heads={HEADS}&vocab_size=96&num_local_experts={experts}&num_experts_per_tok={chosen}"
    )
    counts = count_form(
        shape_model(spec, "bfloat16"), WHOLE, microbatch_sizes=(1,), sequence_length=TOKENS, fusion="all"
    )
    narrow = in_recipe(counts, RECIPES["fp8"])
    wide_layer, layer = (each.kinds[each.blocks[1]].by_size[1] for each in (counts, narrow))
    products = [op for op in (*layer.forward, *layer.backward) if op.name == "bmm"]
    assert len(products) == 3 * 2 and all(op.dtype == RECIPES["fp8"].dtype for op in products)
    rows = TOKENS * chosen
    dense = HIDDEN - HIDDEN + HIDDEN  # the norms' outputs; attention keeps its own result whole beside the narrow one
    assert wide_layer.activation_bytes - layer.activation_bytes == TOKENS * dense + rows * (HIDDEN + inner)
    kept = 2 * TOKENS * (3 * HIDDEN + 5 * HIDDEN + HIDDEN) + 2 * rows * (HIDDEN + 3 * inner)
    others = TOKENS * (4 * HEADS + 40 * chosen + 8 * HIDDEN // HEADS)  # statistics, tokens' numbers, weights, angles
    assert wide_layer.activation_bytes <= kept + others < kept + 2 * rows * HIDDEN
