"""Export: what a run trained comes out as others load it, to the last bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeplan.documents.plan import Plan
from pipeplan.errors import InvalidInputError
from tests.schedules import chunks_of
from tests.worker_agent.commands import finish
from tests.worker_agent.models.test_hugging_face import SPECS
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import train
from tests.worker_agent.runtime.test_executor import checkpoint_weights, distance
from tests.worker_agent.runtime.test_run_command import command
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.runtime.export import export_checkpoint
from worker_agent.runtime.job import RunJob

TOKENS = "preset:random_tokens?vocab_size=50&sequence_length=8&samples=64"
FEATURES = "preset:regression?width=8&samples=64"


OPTIONS: dict[str, Any] = {"steps": 3, "seed": 3, "learning_rate": 0.1, "checkpoint_every": 3, "device": "cpu"}


def planned(schedule: str, **options: Any) -> Plan:
    """A plan for two ranks and four blocks, in two stages or in four."""
    several = chunks_of(schedule)
    cuts = (0, 1, 2, 3, 4) if several > 1 else (0, 2, 4)
    return make_plan(schedule, cuts, microbatches=1 if schedule == "pipedream" else 4, chunks=several, **options)


def trained(out: Path, model: str, cuts: tuple[int, ...] = (0, 2, 4), **options: Any) -> Path:
    """A run of four steps in this process, with a checkpoint after every second one."""
    plan = make_plan("1f1b", cuts, **options)
    data = TOKENS if model.startswith("hf:") else FEATURES
    job = RunJob(plan=plan, model=model, data=data, steps=4, seed=3, checkpoint_every=2, out=str(out), device="cpu")
    run_ranks(job)
    return out / "checkpoints"


def loaded(folder: Path) -> Any:
    """The model that the library loads from a folder, as its config says."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=config.dtype)


@pytest.mark.each_case
@pytest.mark.parametrize("family", ["mixtral", "bert"])
def test_every_checkpoint_of_a_hugging_face_model_loads_as_it_was(family: str, tmp_path: Path) -> None:
    checkpoints = trained(tmp_path, SPECS[family], dtype="float32")
    before = build_model(SPECS[family], seed=3).root.state_dict()
    for step in (2, 4):
        assert export_checkpoint(checkpoints, tmp_path / f"to-{step}", step=step) == step
        saved, found = checkpoint_weights(tmp_path, step), loaded(tmp_path / f"to-{step}").state_dict()
        assert found.keys() >= saved.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
        assert any(not torch.equal(found[name], before[name]) for name in saved)
        before = found


@pytest.mark.campaign
def test_tied_weights_come_out_tied_and_in_the_type_of_the_plan(tmp_path: Path) -> None:
    checkpoints = trained(tmp_path, f"{SPECS['gpt2']}&tie_word_embeddings=true", dtype="bfloat16")
    assert export_checkpoint(checkpoints, tmp_path / "to") == 4
    model = loaded(tmp_path / "to")
    assert model.lm_head.weight is model.transformer.wte.weight and model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, checkpoint_weights(tmp_path, 4)["transformer.wte.weight"])


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("model", "cuts"),
    [
        ("preset:mlp?width=8&depth=4", (0, 2, 4)),
        ("tests.worker_agent.runtime.awkward:tied?width=8", (0, 2, 4)),
        ("tests.worker_agent.runtime.export_factories:with_buffers", (0, 1, 3)),
    ],
)
def test_a_factorys_model_comes_out_by_the_names_of_its_state_dict(
    model: str, cuts: tuple[int, ...], tmp_path: Path
) -> None:
    checkpoints = trained(tmp_path, model, cuts)
    export_checkpoint(checkpoints, tmp_path / "to")
    found = load_file(tmp_path / "to" / "model.safetensors")
    chain = build_model(model, seed=3, dtype=torch.float64)
    saved, names = checkpoint_weights(tmp_path, 4), chain.names()
    for name, tensor in chain.root.state_dict(keep_vars=True).items():
        assert torch.equal(found[name], saved[names[tensor]])
    chain.root.load_state_dict(found)


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", ["gpipe", "pipedream-2bw", "pipedream", "1f1b-interleaved", "zb-v"])
def test_a_folders_weights_train_as_the_same_weights_do_that_a_seed_gave(schedule: str, tmp_path: Path) -> None:
    """A file's memory cannot be released: runs that keep versions once failed at their first checkpoint."""
    begun: Any = build_model(SPECS["llama"], seed=3).root
    begun.save_pretrained(tmp_path / "begun")
    plan = planned(schedule, dtype="float32")
    for model in (f"hf:{tmp_path / 'begun'}", SPECS["llama"]):
        run_ranks(RunJob(plan=plan, model=model, data=TOKENS, out=str(tmp_path / model[-5:]), **OPTIONS))
    one, other = (checkpoint_weights(tmp_path / name, 3) for name in ("begun", SPECS["llama"][-5:]))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", ["gpipe", "pipedream-2bw", "pipedream", "zb-v"])
def test_weights_in_the_memory_of_arrays_are_trained(schedule: str, tmp_path: Path) -> None:
    model, plan = "tests.worker_agent.runtime.export_factories:of_arrays", planned(schedule)
    run_ranks(RunJob(plan=plan, model=model, data=FEATURES, out=str(tmp_path), **OPTIONS))
    expected = train(plan, model, FEATURES, steps=3, seed=3, learning_rate=0.1)
    assert distance(checkpoint_weights(tmp_path, 3), expected) < 1e-13


def trained_and_exported_here(model: str, plan: Plan, folder: Path) -> None:
    """Three steps by ranks that are forked, and the export in this process."""
    out = str(folder / "out")
    job = RunJob(
        plan=plan,
        model=model,
        data=TOKENS,
        steps=3,
        seed=3,
        learning_rate=0.01,
        checkpoint_every=1,
        out=out,
        device="cpu",
    )
    run_ranks(job)
    assert export_checkpoint(folder / "out" / "checkpoints", folder / "ended") == 3


def trained_and_exported_by_commands(model: str, plan: Plan, folder: Path) -> None:
    """Three steps by real torchrun, and the export, by commands."""
    arguments = command(plan, folder, model=model, steps=3)
    arguments[arguments.index("--data") + 1] = TOKENS
    ended = finish([*arguments, "--lr", "0.01", "--checkpoint-every", "1"])
    assert ended.returncode == 0, ended.stderr
    answer = finish(["export", str(folder / "out"), "--to", str(folder / "ended")])
    assert answer.returncode == 0 and "after step 3" in answer.stderr, answer.stderr


@pytest.mark.each_case
@pytest.mark.parametrize("way", [trained_and_exported_here, trained_and_exported_by_commands])
def test_a_saved_model_trained_in_two_stages_and_exported_equals_one_processs_steps(
    way: Callable[[str, Plan, Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "begun"
    begun: Any = build_model(f"{SPECS['llama']}&tie_word_embeddings=true", seed=9).root
    begun.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    plan = make_plan("1f1b", (0, 2, 4), optimizer="adam")
    way(f"hf:{folder}", plan, tmp_path)
    assert (tmp_path / "ended" / "tokenizer.json").read_text() == "{}"

    import transformers

    one: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    optimizer = torch.optim.Adam(one.parameters(), lr=0.01)
    data = open_data(TOKENS, microbatch_size=2, seed=3)
    for step in range(3):
        optimizer.zero_grad()
        for k in range(4):
            inputs, targets = data.microbatch(4 * step + k)
            assert isinstance(inputs, Tensor) and isinstance(targets, Tensor)
            logits = one(input_ids=inputs).logits
            torch.autograd.backward(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / 4)
        optimizer.step()
    expected, found = one.state_dict(), loaded(tmp_path / "ended").state_dict()
    assert found.keys() == expected.keys()
    assert max(float((found[name] - expected[name]).abs().max()) for name in found) < 1e-9
    assert found["model.embed_tokens.weight"].dtype == torch.float64


def test_an_export_keeps_what_lies_beside_the_weights(tmp_path: Path) -> None:
    """The names of labels, the limits of generation, and all that the library does not write."""
    folder = tmp_path / "begun"
    begun: Any = build_model(SPECS["llama"], seed=9).root
    begun.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    labels = {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}
    (folder / "config.json").write_text(json.dumps(config | labels))
    others = {"generation_config.json": '{"max_new_tokens": 7}', "README.md": "mine", "1_Pooling/config.json": "{}"}
    for name, text in others.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    checkpoints = trained(tmp_path / "run", f"hf:{folder}")
    export_checkpoint(checkpoints, tmp_path / "to")
    assert {name: (tmp_path / "to" / name).read_text() for name in others} == others
    written = json.loads((tmp_path / "to" / "config.json").read_text())
    assert {key: written[key] for key in labels} == labels
    loaded(tmp_path / "to")


def test_an_export_leaves_other_files_where_they_are(tmp_path: Path) -> None:
    """A folder TO.part beside TO was once emptied; an empty folder may be one that cannot be replaced."""
    checkpoints = trained(tmp_path / "run", "preset:mlp?width=8&depth=4")
    mine = tmp_path / "to.part" / "mine"
    mine.parent.mkdir()
    mine.write_text("mine")
    (tmp_path / "to").mkdir()
    before = (tmp_path / "to").stat().st_ino
    export_checkpoint(checkpoints, tmp_path / "to")
    assert (tmp_path / "to").stat().st_ino == before
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["model.safetensors"]
    assert mine.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "to", "to.part"]


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = trained(tmp_path, "preset:mlp?width=8&depth=4")
    to = tmp_path / "to"

    def refused(sentence: str, where: Path = checkpoints, **options: Any) -> None:
        with pytest.raises(InvalidInputError, match=sentence):
            export_checkpoint(where, to, **options)
        assert not any(path.name.startswith(".") for path in tmp_path.iterdir())

    refused("step: must be that of a checkpoint; there are 2, 4, got 3", step=3)
    refused(r"run: must have a whole checkpoint: there is none in .*checkpoints, got", tmp_path / "no" / "checkpoints")
    (checkpoints / "step-2" / "manifest.json").unlink()
    refused("step: must be a whole checkpoint: step-2 was not finished, got 2", step=2)
    damaged = checkpoints / "step-4" / "stage-1.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    refused("step: must be a whole checkpoint: step-4 is damaged", step=4)
    refused("run: must have a whole checkpoint: step-4 is damaged .*; step-2 was not finished")
    to.mkdir()
    (to / "mine").write_text("")
    refused("to: must be a new folder, or an empty one")
    assert [path.name for path in to.iterdir()] == ["mine"]
