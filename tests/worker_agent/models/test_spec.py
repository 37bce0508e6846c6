"""SPECs: what they say, and what is said about those that cannot be."""

import pytest

from pipeplan.documents.names import PRESETS as BUILT_IN_PRESETS
from pipeplan.errors import InvalidInputError
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.spec import PRESETS, Value, call_factory, load_factory, parse_spec


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("-1", -1),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("true", True),
        ("False", False),
        ("null", None),
        ("gelu", "gelu"),
        ("a%26b%3Dc", "a&b=c"),
        ("1+1", "1+1"),
        ("", ""),
    ],
)
def test_a_value_reads_as_what_it_looks_like(text: str, value: Value) -> None:
    assert parse_spec(f"package.module:factory?key={text}", field="model").options == {"key": value}


def test_a_spec_names_a_family_or_a_callable_and_its_options() -> None:
    family = parse_spec("hf:gpt2?n_layer=4&n_embd=128", field="model")
    assert (family.is_hugging_face, family.name, family.options) == (True, "gpt2", {"n_layer": 4, "n_embd": 128})
    factory = parse_spec("package.module:factory?depth=2", field="model")
    assert (factory.is_hugging_face, factory.target) == (False, "package.module:factory")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("factory", "must be hf:FAMILY"),
        ("package.module:", "must be hf:FAMILY"),
        ("package/module.py:factory", "must be hf:FAMILY"),
        ("a:b?depth", "must have a query of key=value"),
        ("a:b?2=depth", "must have a query of key=value"),
        ("a:b?depth=1&depth=2", "must not name an option twice"),
    ],
)
def test_what_is_not_a_spec_is_refused_by_its_rule(text: str, rule: str) -> None:
    with pytest.raises(InvalidInputError, match=rule) as caught:
        parse_spec(text, field="data")
    assert caught.value.field == "data"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "no_such_package.models:mlp",
            "model: must name a module that exists, in the current folder or installed, got 'no_such_package.models'",
        ),
        (
            "worker_agent.none_such:mlp",
            "model: must name a module that exists, in the current folder or installed, got 'worker_agent.none_such'",
        ),
        (
            "net.py:mlp",
            "model: must name a module that exists, in the current folder or installed: net:mlp is meant, got 'net.py'",
        ),
        (
            "HF:gpt2",
            "model: must name a module that exists, in the current folder or installed: hf:gpt2 is meant, got 'HF'",
        ),
        ("json:mlp", "model: must name something that module json holds, got 'mlp'"),
        (
            "string:digits",
            "model: must name a function or a class that makes it, and this is a str, got 'string:digits'",
        ),
    ],
)
def test_what_does_not_exist_is_said_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        load_factory(parse_spec(text, field="model"), field="model")
    assert str(caught.value) == sentence


def test_options_that_a_factory_does_not_take_are_refused_before_it_is_called() -> None:
    with pytest.raises(InvalidInputError) as caught:
        call_factory(parse_spec("preset:mlp?dept=3", field="model"), field="model")
    assert str(caught.value) == "model: must fit the parameters of preset:mlp: width, depth (near: depth), got 'dept'"
    with pytest.raises(InvalidInputError, match="missing a required argument: 'template'"):
        call_factory(parse_spec("string:Template", field="model"), field="model")


def test_a_factory_gets_of_the_offered_arguments_those_that_it_takes() -> None:
    spec = parse_spec("builtins:dict?seed=1", field="data")
    assert load_factory(spec, field="data") is dict
    assert call_factory(parse_spec("fractions:Fraction?numerator=3", field="data"), field="data", seed=1) == 3


def test_presets_are_pipeplans_own_and_no_more() -> None:
    """The modules that hold them hold `time` and `torch` as well."""
    assert tuple(sorted(name for names in PRESETS.values() for name in names)) == BUILT_IN_PRESETS
    for field, names in PRESETS.items():
        for name in names:
            assert callable(load_factory(parse_spec(f"preset:{name}", field=field), field=field))
    assert len(call_factory(parse_spec("preset:mlp?depth=3", field="model"), field="model")) == 3
    with pytest.raises(InvalidInputError, match=r"data: must be one of random_features, .*, got 'mlp'"):
        load_factory(parse_spec("preset:mlp", field="data"), field="data")
    with pytest.raises(InvalidInputError, match=r"model: must be one of alexnet, amoebanet_d, .*, got 'time\.sleep'"):
        load_factory(parse_spec("preset:time.sleep", field="model"), field="model")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("loader", "must name a function or a class that makes it, and this is a DataLoader"),
        ("samples", "must name a function or a class that makes it, and this is a list"),
        ("zip", "must name a function or a class that makes it, whose parameters Python can tell"),
    ],
)
def test_data_that_are_made_already_or_have_no_signature_are_refused(name: str, rule: str) -> None:
    module = "builtins" if name == "zip" else "tests.worker_agent.models.losses"
    with pytest.raises(InvalidInputError, match=rule):
        open_data(f"{module}:{name}", microbatch_size=2, seed=0)


@pytest.mark.parametrize("name", ["criterion", "blocks"])
def test_a_model_that_is_made_already_is_refused(name: str) -> None:
    rule = "model: must (be a class or a factory|name a function or a class that makes it, and this is a list)"
    with pytest.raises(InvalidInputError, match=rule):
        build_model(f"tests.worker_agent.models.losses:{name}", seed=0)
