"""Models and data that do what most do not: they train as in one process, or are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeplan.errors import InvalidInputError
from tests.schedules import STASHING
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.test_executor import CUTS, DATA, distance
from tests.worker_agent.runtime.test_varied import execute, expected
from worker_agent.models.chain import build_model
from worker_agent.models.data import MicrobatchSource, open_data
from worker_agent.models.losses import build_loss

HERE = "tests.worker_agent.runtime.unusual"


@pytest.mark.each_case
@pytest.mark.parametrize("data", ["shuffled", "augmented"])
@pytest.mark.parametrize("options", [{}, {"replicas": 2}])
def test_data_may_draw_from_global_random_states(data: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The last stage once had the targets of other inputs than the first."""
    model, plan = "worker_agent.models.presets:mlp?width=8&depth=4", make_plan("1f1b", CUTS[2], **options)
    found = execute(plan, tmp_path, model, f"{HERE}:{data}")
    assert distance(found, expected(plan, model, f"{HERE}:{data}")) < 1e-12


@pytest.mark.parametrize("data", ["shuffled", "augmented"])
def test_a_microbatchs_random_numbers_do_not_depend_on_what_else_draws_or_is_read(data: str) -> None:
    def opened() -> MicrobatchSource:
        return open_data(f"{HERE}:{data}", microbatch_size=4, seed=3)

    def inputs(source: MicrobatchSource, number: int) -> torch.Tensor:
        found, _ = source.microbatch(number)
        assert isinstance(found, torch.Tensor)
        return found

    in_order = opened()
    every = [inputs(in_order, number) for number in range(14)]
    torch.manual_seed(1)
    assert torch.equal(inputs(opened(), 13), every[13])
    assert torch.equal(inputs(in_order, 7), every[7])
    assert not any(torch.equal(every[n], every[n + 6]) for n in range(6))


@pytest.mark.parametrize(("data", "first"), [("of_the_system", 1), ("of_the_system_later", 5)])
def test_data_that_differ_in_every_process_are_refused(data: str, first: int, tmp_path: Path) -> None:
    """Before the first instruction, or at the end at the latest."""
    plan = make_plan("1f1b", CUTS[2])
    rule = rf"data: must give the same inputs in every process .*microbatch {first} differs"
    with pytest.raises(AssertionError, match=rule):
        execute(plan, tmp_path, "worker_agent.models.presets:mlp?width=8&depth=4", f"{HERE}:{data}")


@pytest.mark.each_case
@pytest.mark.parametrize("unit", ["stage", "block"])
def test_blocks_that_draw_with_numpy_and_python_are_recomputed_with_the_same_numbers(unit: str, tmp_path: Path) -> None:
    kept = execute(make_plan("1f1b", CUTS[2]), tmp_path / "kept", f"{HERE}:skipping")
    plan = make_plan("1f1b", CUTS[4], recompute=True, recompute_unit=unit)
    assert distance(execute(plan, tmp_path / "recomputed", f"{HERE}:skipping"), kept) < 1e-13
    resumed = execute(make_plan("1f1b", CUTS[2]), tmp_path / "whole", f"{HERE}:skipping", checkpoint_every=2)
    assert distance(resumed, kept) == 0.0
    again = execute(make_plan("1f1b", CUTS[2]), tmp_path / "whole", f"{HERE}:skipping", first_step=2)
    assert distance(again, kept) == 0.0


@pytest.mark.each_case
@pytest.mark.parametrize("unit", ["block", "stage"])
def test_hooks_on_a_blocks_input_are_those_of_one_forward(unit: str, tmp_path: Path) -> None:
    """With recomputation, the hook of the first forward once halved the gradient as well."""
    plan = make_plan("1f1b", (0, 2, 4), recompute=True, recompute_unit=unit)
    reference = expected(plan, f"{HERE}:watching")
    assert distance(execute(plan, tmp_path, f"{HERE}:watching"), reference) < 1e-12


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", ["pipedream-2bw", "pipedream"])
def test_blocks_that_checkpoint_themselves_compute_again_with_the_version_of_their_forward(
    schedule: str, tmp_path: Path
) -> None:
    """They once took the newest version, and gave their gradient to it."""
    plan = make_plan(schedule, (0, 2, 4), microbatches=1 if schedule in STASHING else 4)
    once = execute(plan, tmp_path / "once", f"{HERE}:checkpointing?again=false")
    assert distance(execute(plan, tmp_path / "again", f"{HERE}:checkpointing"), once) < 1e-13


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("model", "schedule", "options", "sentence"),
    [
        (
            "borrowing",
            "1f1b",
            {},
            r"block 2 .* to block 3 \(3.borrowing\) must hold the weight 0.weight as a parameter",
        ),
        ("borrowing", "1f1b", {"recompute": True, "recompute_unit": "block"}, r"block 3 \(3.borrowing\) must hold"),
        ("kept_in_a_list", "pipedream-2bw", {}, "block 0 .* to block 1 .* must hold the weight 0.weight as a param"),
        ("hooked", "pipedream-2bw", {}, r"model\..*weight: must have no hook \(register_hook\) where several versions"),
        ("frozen", "1f1b", {}, "model: must have a weight that is trained: all are frozen"),
    ],
)
def test_weights_that_a_run_would_not_follow_are_refused(
    model: str, schedule: str, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """A borrowed weight was once the first one for ever; a hook was lost with its version."""
    with pytest.raises(AssertionError, match=sentence):
        execute(make_plan(schedule, (0, 2, 4), **options), tmp_path, f"{HERE}:{model}")


@pytest.mark.parametrize("model", ["borrowing", "hooked", "kept_in_a_list"])
def test_the_same_weights_train_where_a_run_follows_them(model: str, tmp_path: Path) -> None:
    plan = make_plan("1f1b", CUTS[1 if model == "borrowing" else 2])
    reference = _by_plain_torch(f"{HERE}:{model}")
    assert distance(execute(plan, tmp_path, f"{HERE}:{model}"), reference) < 1e-12


def _by_plain_torch(model: str) -> dict[str, torch.Tensor]:
    """The weights after five steps of four microbatches in one process."""
    chain = build_model(model, seed=3, dtype=torch.float64)
    source, loss = open_data(DATA, microbatch_size=2, seed=3), build_loss(None)
    optimizer = torch.optim.SGD(chain.root.parameters(), lr=0.2)
    for step in range(5):
        optimizer.zero_grad()
        for number in range(4 * step, 4 * step + 4):
            inputs, targets = (t.double() for t in source.microbatch(number) if isinstance(t, torch.Tensor))
            torch.autograd.backward(loss(chain.root(inputs), targets) / 4)
        optimizer.step()
    return {name: weight.detach() for name, weight in chain.root.named_parameters()}


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("bounded", "model: must have embeddings without max_norm"),
        ("hooked?after=true", "model: must have no hooks that run after a gradient is added"),
        ("of_one_memory", "model.1.weight: must be one parameter with 0.weight, in whose memory it lies"),
    ],
)
def test_weights_that_other_code_changes_are_refused_before_a_run(model: str, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        build_model(f"{HERE}:{model}", seed=0)


def test_a_loss_that_trains_nothing_or_has_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"loss: must have no weights of its own.*got 'scale'"):
        build_loss(f"{HERE}:Scaled")
    with pytest.raises(AssertionError, match="a loss must follow from what is trained, and this one has no gradient"):
        model = "worker_agent.models.presets:mlp?width=8&depth=4"
        execute(make_plan("1f1b", CUTS[2]), tmp_path, model, loss=f"{HERE}:without_gradient")
