"""Forms: what one device does of a model whose blocks are shared out."""

from dataclasses import replace

import pytest

from pipeplan.documents.files import dump, parse
from pipeplan.documents.forms import BlockKind, Collective, Form, FormMeasurement, ModelForm, Selective
from pipeplan.documents.identity import content_id
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError
from tests.pipeplan.builders import Cell, profile

MEASURED = FormMeasurement(
    microbatch_size=1,
    forward_s=0.5,
    backward_s=1.0,
    input_bytes=4,
    output_bytes=8,
    activation_bytes=16,
    forward_collectives=(Collective(kind="all-gather", axis="tensor", size_bytes=8, count=2),),
    selective=Selective(recompute_s=0.1, activation_bytes=12),
)
LAYER = BlockKind(name="layer", parameters=100, measurements=(MEASURED,))
HALVED = ModelForm(form=Form(tensor=2, sequence_parallel=True), kinds=(LAYER,), blocks=(0, 0))


def test_a_profile_with_forms_is_read_as_it_was_written() -> None:
    held = replace(profile([Cell(), Cell()]), forms=(HALVED,))
    assert parse(Profile, dump(held)) == held


def test_a_profile_without_forms_has_the_id_that_it_always_had() -> None:
    plain = profile([Cell(), Cell()])
    assert content_id(replace(plain, forms=())) == content_id(plain)
    assert content_id(replace(plain, forms=(HALVED,))) != content_id(plain)


def test_other_ways_to_run_a_part_again_are_in_an_id_only_where_there_are_some() -> None:
    core = MEASURED.every_selective
    way = Selective(recompute_s=0.05, activation_bytes=14, unit="modules", modules=("layernorm", "moe_act"))
    both = replace(MEASURED, other_selective=(way,))
    assert content_id(replace(MEASURED, other_selective=())) == content_id(MEASURED) != content_id(both)
    assert both.selective_by("modules") is way and (both.selective_by("attention"),) == core
    form = replace(HALVED, kinds=(replace(LAYER, measurements=(both,)),))
    assert form.modules == ("layernorm", "moe_act") and HALVED.modules == ()
    held = replace(profile([Cell(), Cell()]), forms=(form,))
    assert parse(Profile, dump(held)) == held


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("sequence_parallel", lambda: Form(sequence_parallel=True)),
        ("tensor", lambda: Form(tensor=0)),
        ("kind", lambda: Collective(kind="gossip", axis="tensor", size_bytes=1)),
        ("axis", lambda: Collective(kind="ring", axis="pipeline", size_bytes=1)),
        ("blocks", lambda: replace(HALVED, blocks=(0, 1))),
        ("kinds", lambda: replace(HALVED, kinds=(LAYER, LAYER))),
        ("forms", lambda: replace(profile([Cell(), Cell()]), forms=(HALVED, HALVED))),
        ("forms.0.blocks", lambda: replace(profile([Cell()]), forms=(HALVED,))),
        ("backward_input_s", lambda: replace(MEASURED, backward_input_s=0.5)),
        ("modules", lambda: Selective(recompute_s=0.1, activation_bytes=1, modules=("moe_act",))),
        ("modules", lambda: Selective(recompute_s=0.1, activation_bytes=1, unit="modules")),
        ("modules", lambda: Selective(recompute_s=0.1, activation_bytes=1, unit="modules", modules=("mlp",))),
        ("other_selective", lambda: replace(MEASURED, other_selective=MEASURED.every_selective)),
    ],
)
def test_what_is_wrong_is_named(field: str, wrong: object) -> None:
    with pytest.raises(InvalidInputError) as raised:
        wrong()  # type: ignore[operator]
    assert raised.value.field == field
