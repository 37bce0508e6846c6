"""SPECs and names: what no document may hold, because scripts, logs and terminals print it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import dump, parse, parse_plan, plan_document
from pipeplan.documents.names import MAX_LENGTH, on_one_line, parse_spec, query_of, require_line
from pipeplan.documents.profile import Model, Profile
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import PlanningProblem
from planner_service.overview.openapi import CLUSTER, PROFILE
from tests.planner_service.answers import halve

CONTROLS = ["\n", "\r", "\t", "\x1b", "\x7f", "\x85", "\x9b", "\u2028", "\u2029"]
NAMES = [
    "gpt2",
    "Modèle 7B (β)",
    "モデル",
    "نموذج",
    "می‌خواهم",
    "👩‍🔬 model",
    "a  b",
    "\u202egnp\u2066",
    "it's; $(x) `y` #",
]


@pytest.mark.parametrize("name", NAMES)
def test_ordinary_names_of_every_script_pass(name: str) -> None:
    assert Model(name=name).name == name


@pytest.mark.parametrize("character", [*CONTROLS, "\ud800"])
def test_a_name_that_does_not_print_as_one_line_is_refused_by_its_field(character: str) -> None:
    with pytest.raises(InvalidInputError, match="name: must hold no control character"):
        Model(name=f"a{character}b")


@pytest.mark.parametrize("character", [*CONTROLS, " ", "\u00a0", "\u202e", "\u2066", "\u200b", "\ud800"])
@pytest.mark.parametrize("place", ["hf:gpt2{}", "hf:gpt2?a={}1", "a.b:c?d=e{}", "hf:/a{}/config.json", "{}hf:gpt2"])
def test_a_spec_holds_printable_characters_and_no_spaces(place: str, character: str) -> None:
    with pytest.raises(InvalidInputError, match="model: must hold printable characters and no spaces"):
        parse_spec(place.format(character), field="model")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "must be hf:FAMILY"),
        ("hf:", "must be hf:FAMILY"),
        ("hf:/", "must be hf:FAMILY"),
        ("hf:os.system", "must be hf:FAMILY"),
        ("preset:", "must be hf:FAMILY"),
        ("a;b:c", "must be hf:FAMILY"),
        ("hf:$(reboot)", "must be hf:FAMILY"),
        ("hf:/a%0Ab/config.json", "must be hf:FAMILY"),
        ("hf:gpt2?a=%zz", "two hexadecimal digits"),
        ("hf:gpt2?a=50%", "two hexadecimal digits"),
        ("hf:gpt2?a=%ff", "escapes that are UTF-8"),
        ("hf:gpt2?a=[1", "must hold JSON"),
        ("a:b?" + "x" * MAX_LENGTH, "at most 2000 characters"),
    ],
)
def test_what_is_not_a_spec_is_refused_by_its_rule(text: str, rule: str) -> None:
    with pytest.raises(InvalidInputError, match=rule):
        parse_spec(text, field="model")


@pytest.mark.parametrize(
    ("field", "text", "meant"),
    [
        ("model", "config.json", "; hf:config.json is meant, if it is a config's file or a model's folder"),
        ("model", "./llama?n_layer=2", "; hf:./llama?n_layer=2 is meant, if"),
        (
            "model",
            "meta-llama/Llama-3-8B",
            "hf download meta-llama/Llama-3-8B config.json --local-dir Llama-3-8B`",
        ),
        ("model", "https://hub.example/a/b/tree/main", "; nothing is downloaded: `hf download a/b config.json"),
        ("model", "gpt2?n_layer=2", "; hf:gpt2?n_layer=2 is meant"),
        ("model", "mlp", "; preset:mlp is meant"),
        ("model", "mine.py", "; mine:FACTORY is meant"),
        ("model", "./models/mine.py:make", "; models.mine:make is meant"),
        ("model", "package.module", "; package.module:FACTORY is meant, if it is a module"),
        ("model", "llama-3-8b", " (near: hf:llama, preset:llama_7b)"),
        ("data", "train.bin", "; of a file of tokens: worker_agent.models.token_files:tokens?path=train.bin&"),
        ("data", "random_tokens", "; preset:random_tokens is meant"),
        ("data", "config.json", "key=value&..., got"),
        ("model", "config.yaml", "key=value&..., got"),
    ],
)
def test_what_is_nearly_a_spec_leads_to_one(field: str, text: str, meant: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_spec(text, field=field)
    assert meant in str(caught.value)


def test_a_path_names_a_file_or_a_folder_and_has_escapes() -> None:
    assert parse_spec("hf:/my%20models/config.json?n_layer=2", field="model").path == "/my models/config.json"
    assert parse_spec("hf:./folder", field="model").path == "./folder"
    assert parse_spec("hf:config.json", field="model").path == "config.json"
    assert parse_spec("hf:gpt2", field="model").path is None


def test_only_families_and_presets_are_built_in() -> None:
    built_in = {
        text: parse_spec(text, field="model").is_built_in
        for text in ("hf:gpt2?n_layer=4", "preset:mlp", "hf:gpt3", "preset:time", "hf:./gpt2", "subprocess:getoutput")
    }
    assert built_in == {
        "hf:gpt2?n_layer=4": True,
        "preset:mlp": True,
        "hf:gpt3": False,
        "preset:time": False,
        "hf:./gpt2": False,
        "subprocess:getoutput": False,
    }


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), VALUES | st.just("gelu"), max_size=4))
def test_a_query_reads_as_the_options_that_it_was_made_of(options: dict[str, Any]) -> None:
    assert parse_spec(f"hf:gpt2?{query_of(options)}", field="model").options == options


def test_a_text_that_would_read_as_a_number_makes_no_query() -> None:
    with pytest.raises(InvalidInputError, match="key: must be a value that a SPEC can hold, got '4'"):
        query_of({"key": "4"})


@given(st.text())
def test_whatever_a_text_holds_it_can_be_shown_on_one_line(text: str) -> None:
    shown = on_one_line(text)
    require_line("text", shown)
    assert len(shown.splitlines()) <= 1


def _with(document: dict[str, Any], path: str, value: str) -> str:
    place: Any = document
    *parents, last = path.split(".")
    for part in parents:
        place = place[int(part)] if part.isdigit() else place[part]
    place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize("path", ["model.name", "device.name", "blocks.1.name", "model.spec"])
def test_a_profile_with_a_line_break_in_a_text_is_refused_by_its_field(path: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{path}: must hold"):
        parse(Profile, _with(json.loads(dump(PROFILE)), path, "a:b\nreboot"))


def test_a_cluster_with_a_line_break_in_a_text_is_refused_by_its_field() -> None:
    with pytest.raises(InvalidInputError, match=r"^device\.name: must hold"):
        parse(Cluster, _with(json.loads(dump(CLUSTER)), "device.name", "a\u2028b"))


@pytest.mark.parametrize("path", ["model.name", "model.spec", "stages.0.device", "planner", "cost_model"])
def test_a_plan_with_a_line_break_in_a_text_is_refused_by_its_field(path: str) -> None:
    plan: Any = halve("pipedream-2bw", PlanningProblem(profile=PROFILE, cluster=CLUSTER, batch_size=16))
    with pytest.raises(InvalidInputError, match=f"^{path}: must hold"):
        parse_plan(_with(json.loads(dump(plan_document(plan))), path, "a:b\nreboot"))
