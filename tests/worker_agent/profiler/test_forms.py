"""Forms of a profile: what the worker estimates of models whose blocks several devices share."""

import itertools
import subprocess
import sys

import pytest

from pipeplan.documents.forms import WHOLE, Form
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError
from pipeplan.protocol.estimates import FormsAsked
from pipeplan.protocol.jobs import ProfileTask
from worker_agent.profiler.datasheets import find_datasheet
from worker_agent.profiler.forms import profile_with_forms

SHEET = find_datasheet("a100-80gb")
LLAMA = (
    "hf:llama?num_hidden_layers=3&hidden_size=96&intermediate_size=192&num_attention_heads=12&num_key_value_heads=12"
    "&vocab_size=96&max_position_embeddings=64"
)


def task(model: str = LLAMA) -> ProfileTask:
    return ProfileTask(model=model, microbatch_sizes=(1, 2), dtype="bfloat16", optimizer="adamw", sequence_length=32)


def estimated(asked: FormsAsked, model: str = LLAMA) -> Profile:
    return profile_with_forms(asked, task(model), SHEET)


def test_the_form_of_one_device_has_the_bytes_of_whole_blocks() -> None:
    profile = estimated(FormsAsked(most_tensor=1))
    (whole,) = profile.forms
    assert whole.form == WHOLE
    for block, kind in zip(profile.blocks, whole.blocks, strict=True):
        one, other = block.at(2), whole.kinds[kind].at(2)
        assert (one.output_bytes, one.activation_bytes) == (other.output_bytes, other.activation_bytes)
        assert one.forward_s == pytest.approx(max(other.forward_s, other.forward_operations * SHEET.launch_s))
        assert 0 < other.forward_operations <= other.backward_operations
        assert block.weight_bytes == 2 * whole.kinds[kind].parameters


def test_degrees_that_the_model_cannot_have_are_left_out() -> None:
    """12 heads can be shared by 1, 2 and 4 devices, not by 8."""
    profile = estimated(FormsAsked(most_tensor=8, most_context=2))
    assert {each.form.tensor for each in profile.forms} == {1, 2, 4}
    assert {each.form.context for each in profile.forms} == {1, 2}
    assert all(each.form.sequence_parallel == (each.form.tensor > 1) for each in profile.forms)


def test_the_profile_names_the_degrees_that_have_no_form_and_why() -> None:
    sentence = "tensor 8 not considered: must divide num_attention_heads, which is 12"
    assert estimated(FormsAsked(most_tensor=8, most_expert=2)).notes == (sentence,)


def test_layers_of_no_known_kind_cost_the_tensor_degree_and_not_the_answer() -> None:
    bert = "hf:bert?num_hidden_layers=2&hidden_size=32&num_attention_heads=2&intermediate_size=48&vocab_size=64"
    profile = estimated(FormsAsked(most_tensor=2), bert)
    assert [each.form for each in profile.forms] == [WHOLE]
    rule = "needs a sharding plan, and none is known for bert.encoder.layer.0.attention.self.query of bert"
    assert list(profile.notes) == [f"tensor 2 not considered: {rule}"]


def test_a_degree_that_is_asked_for_must_be_possible() -> None:
    assert [each.form for each in estimated(FormsAsked(tensor=3, sequence_parallel=False)).forms] == [Form(tensor=3)]
    with pytest.raises(InvalidInputError, match="divide") as raised:
        estimated(FormsAsked(tensor=8))
    assert raised.value.field == "tensor"
    with pytest.raises(InvalidInputError) as raised:
        estimated(FormsAsked(expert=2))
    assert raised.value.field == "expert"


def test_what_devices_share_is_less_for_each() -> None:
    profile = estimated(FormsAsked(most_tensor=4))
    layers = [each.kinds[each.blocks[1]] for each in profile.forms]
    for fewer, more in itertools.pairwise(layers):
        assert more.parameters < fewer.parameters
        assert more.at(2).activation_bytes < fewer.at(2).activation_bytes
    assert not layers[0].at(1).forward_collectives
    assert {each.kind for each in layers[1].at(1).forward_collectives} == {"all-gather", "reduce-scatter"}


def test_only_language_models_have_forms() -> None:
    with pytest.raises(InvalidInputError, match="language model"):
        profile_with_forms(FormsAsked(), ProfileTask(model="preset:mlp?depth=3", microbatch_sizes=(1,)), SHEET)


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("tensor", ("--analytic", "a100-80gb", "--tensor", "2")),
        ("most_context", ("--analytic", "a100-80gb", "--most-context", "2")),
        ("forms", ("--forms",)),
        ("data", ("--analytic", "a100-80gb", "--forms", "--data", "preset:random_tokens?vocab_size=96")),
        ("rounds", ("--analytic", "a100-80gb", "--rounds", "3")),
    ],
)
def test_an_option_that_the_others_leave_no_use_for_is_refused(field: str, options: tuple[str, ...]) -> None:
    """A degree without --forms was ignored."""
    command = [sys.executable, "-m", "worker_agent", "profile", "--model", LLAMA, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --{field.replace('_', '-')}: ")
