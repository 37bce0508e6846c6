"""Runs on batches by name: what stages train is what one process trains that calls the uncut model on whole batches."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pipeplan.errors import InvalidInputError
from tests.worker_agent.commands import finish
from tests.worker_agent.models.test_batches import HERE, PAIRS, WINDOW
from tests.worker_agent.models.test_hugging_face import SPECS
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.test_executor import checkpoint_weights, distance
from tests.worker_agent.runtime.test_run_command import command
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.spec import call_factory, parse_spec
from worker_agent.runtime.export import export_checkpoint
from worker_agent.runtime.feed import TokenMeans
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.resume import resumed

STEPS = 3


def one_process(model: str, data: str, *, microbatch_size: int, microbatches: int) -> dict[str, Tensor]:
    """The weights after some steps of SGD on the uncut model, each on a whole batch by its mean over all labels."""
    root: Any = build_model(model, seed=3, dtype=torch.float64).root
    root.eval()
    items = list(call_factory(parse_spec(data, field="data"), field="data", microbatch_size=microbatch_size, seed=3))
    optimizer = torch.optim.SGD(root.parameters(), lr=0.1)
    for step in range(STEPS):
        rows = [items[(step * microbatches + k) % len(items)] for k in range(microbatches)]
        batch = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
        batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
        logits, labels = root(**batch).logits, batch["labels"]
        if "ForCausalLM" in type(root).__name__ or "LMHead" in type(root).__name__:
            logits, labels = logits[:, :-1], labels[:, 1:]
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(logits.flatten(0, -2), labels.flatten()))
        optimizer.step()
    return {name: p.detach() for name, p in root.named_parameters() if p.requires_grad}


def without_dropout(spec: str) -> str:
    """The model's SPEC, with nothing dropped in training."""
    family = spec.partition("?")[0]
    keys = {
        "hf:gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "hf:bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        "hf:t5": ("dropout_rate",),
    }
    return spec + "".join(f"&{key}=0.0" for key in keys.get(family, ()))


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("model", "data", "cuts", "options"),
    [
        (SPECS["llama"], "padded?side=left", (0, 2, 4), {}),
        (SPECS["gpt2"], "padded", (0, 1, 3, 4), {"recompute": True}),
        (SPECS["bert"], "masked", (0, 2, 4), {"replicas": 2, "microbatches": 2}),
        (WINDOW, "streamed", (0, 3, 4), {"schedule": "gpipe"}),
        (PAIRS["t5"], "padded?decoder=6", (0, 2, 5, 8), {}),
        (PAIRS["t5"], "padded?decoder=6", (0, 4, 8), {"split_backward": True}),
        (SPECS["llama"], "packed", (0, 2, 4), {"recompute": True, "recompute_unit": "block"}),
        (SPECS["llama"], "padded", (0, 1, 2, 3, 4), {"schedule": "1f1b-interleaved", "chunks": 2}),
    ],
)
def test_stages_train_as_the_uncut_model_does_on_whole_batches(
    model: str, data: str, cuts: tuple[int, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    model = without_dropout(model)
    schedule = options.pop("schedule", "1f1b")
    plan = make_plan(schedule, cuts, **options)
    run_ranks(
        RunJob(
            plan=plan,
            model=model,
            data=f"{HERE}:{data}",
            steps=STEPS,
            seed=3,
            learning_rate=0.1,
            checkpoint_every=STEPS,
            out=str(tmp_path),
            device="cpu",
        )
    )
    found = checkpoint_weights(tmp_path, STEPS)
    replicas = plan.replicas[0]
    expected = one_process(model, f"{HERE}:{data}", microbatch_size=2, microbatches=plan.microbatches * replicas)
    begun = build_model(model, seed=3, dtype=torch.float64).root.state_dict()
    assert max(float((expected[name] - begun[name]).abs().max()) for name in expected) > 1e-3
    assert distance({name: found[name] for name in expected}, expected) < 1e-9


def test_a_batchs_labels_weigh_the_same_in_whichever_microbatch_they_are() -> None:
    form = build_model(SPECS["bert"], seed=0, empty=True).batches
    source = open_data(f"{HERE}:masked", microbatch_size=2, seed=1, form=form)
    plain: list[Any] = [source.microbatch(i)[1] for i in range(4)]
    means: Any = TokenMeans(source, 4)
    for index in (0, 2, 3, 1):
        labels, count, microbatches = means.microbatch(index)[1]
        assert torch.equal(labels, plain[index])
        assert int(count) == sum(int((each != -100).sum()) for each in plain)
        assert int(microbatches) == 4


def test_a_batch_without_any_label_is_refused() -> None:
    form = build_model(SPECS["bert"], seed=0, empty=True).batches
    source = open_data(f"{HERE}:broken?key=ignored", microbatch_size=2, seed=1, form=form)
    with pytest.raises(InvalidInputError, match=r"data\.4\.labels: must have labels that are not -100 in a batch, and"):
        TokenMeans(source, 4).microbatch(5)


BART: dict[str, Any] = {
    "plan": make_plan("1f1b", (0, 4, 7), optimizer="adam"),
    "model": PAIRS["bart"],
    "data": f"{HERE}:padded?side=left&decoder=6",
    "checkpoint_every": 2,
}
"""BART drops between its modules, and has embeddings that nothing uses where they are not tied."""


def test_a_padded_run_resumes_and_exports(tmp_path: Path) -> None:
    """A run in one piece and one that goes on from a checkpoint end alike."""
    job = RunJob(**BART, steps=4, seed=3, out=str(tmp_path / "out"), device="cpu")
    run_ranks(job)
    whole = checkpoint_weights(tmp_path / "out", 4)
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-4")
    going_on = resumed(job)
    assert going_on.first_step == 2
    run_ranks(going_on)
    assert distance(whole, checkpoint_weights(tmp_path / "out", 4)) == 0
    export_checkpoint(tmp_path / "out" / "checkpoints", tmp_path / "to")
    require_loads_as(tmp_path / "to", whole)


@pytest.mark.campaign
def test_the_commands_resume_and_export_a_padded_run(tmp_path: Path) -> None:
    """With real torchrun; the weights are those of a run without the commands."""
    run_ranks(RunJob(**BART, steps=4, seed=3, out=str(tmp_path / "whole"), device="cpu"))
    whole = checkpoint_weights(tmp_path / "whole", 4)
    for number, until in enumerate((2, 4)):
        arguments = command(BART["plan"], tmp_path, model=BART["model"], steps=until)
        arguments[arguments.index("--data") + 1] = BART["data"]
        ended = finish([*arguments, "--checkpoint-every", "2", *(["--resume"] if number else [])])
        assert ended.returncode == 0, ended.stderr
    assert distance(whole, checkpoint_weights(tmp_path / "out", 4)) == 0
    exported = finish(["export", str(tmp_path / "out"), "--to", str(tmp_path / "to")])
    assert exported.returncode == 0, exported.stderr
    require_loads_as(tmp_path / "to", whole)


def require_loads_as(folder: Path, weights: dict[str, Tensor]) -> None:
    """The library loads these weights from an exported BART."""
    import transformers

    model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float64)
    found = model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.campaign
def test_a_wrong_batch_ends_a_run_with_one_sentence(tmp_path: Path) -> None:
    arguments = command(make_plan("1f1b", (0, 2, 4)), tmp_path, model=SPECS["llama"])
    arguments[arguments.index("--data") + 1] = f"{HERE}:broken?key=shorter"
    ended = finish(arguments)
    assert ended.returncode == 2, ended.stderr
    assert "data.11.attention_mask: must have the shape of the tokens, (2, 9), got (2, 8)" in ended.stderr
    assert "Traceback" not in ended.stderr
