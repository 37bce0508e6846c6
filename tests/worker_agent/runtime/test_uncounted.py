"""Bytes of tensors that are not plain memory: counted where torch tells their parts, else unknown."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan.documents.files import dump, plan_document
from pipeplan.errors import InvalidInputError
from tests.worker_agent.commands import finish
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.test_executor import CUTS, STEPS, distance
from tests.worker_agent.runtime.test_varied import execute, expected
from tests.worker_agent.runtime.uncounted import COUNTED, UNCOUNTED, WIDTH, model
from worker_agent.models.chain import build_model
from worker_agent.models.losses import default_loss
from worker_agent.models.values import parts_of
from worker_agent.profiler.block_memory import measure_memory, measure_split_memory
from worker_agent.runtime.stage import StageBlocks
from worker_agent.runtime.stage_by_block import StageByBlock
from worker_agent.runtime.stage_memory import untrained_bytes

HERE = "tests.worker_agent.runtime.uncounted"
CPU = torch.device("cpu")
DATA = f"worker_agent.models.presets:regression?width={WIDTH}"


def made(kind: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return model(kind)


def gradients(blocks: Sequence[nn.Module]) -> list[Tensor]:
    return [p.grad for block in blocks for p in block.parameters() if p.grad is not None]


def trained(kind: str, **options: Any) -> tuple[list[Tensor], list[int | None]]:
    """The gradients of a stage, and the bytes held after each of its instructions."""
    blocks, by_block = made(kind), options.pop("by_block", False)
    given: dict[str, Any] = {"first_block": 0, "criterion": None, "seed": 0, "device": CPU}
    stage = StageByBlock(blocks, **given) if by_block else StageBlocks(blocks, **given | {"recompute": False} | options)
    x, held = torch.linspace(0, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_(), []
    stage.forward(1, (x,))
    if options.get("recompute"):
        stage.recompute_forward(1)
    held.append(stage.memory.held_bytes())
    stage.backward(1, (torch.ones(4, WIDTH),))
    held.append(stage.memory.held_bytes())
    if options.get("split_backward"):
        stage.backward_weight([1])
    held.append(stage.memory.held_bytes())
    assert x.grad is not None
    return [x.grad, *gradients(blocks)], held


def in_one_go(kind: str) -> list[Tensor]:
    blocks = made(kind)
    x = torch.linspace(0, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_()
    nn.Sequential(*blocks)(x).sum().backward()
    assert x.grad is not None
    return [x.grad, *gradients(blocks)]


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning", "ignore:.*quant:DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"split_backward": True}, {"by_block": True}])
@pytest.mark.parametrize("kind", [*COUNTED, *UNCOUNTED])
def test_a_stage_trains_what_it_cannot_count(kind: str, options: dict[str, Any]) -> None:
    found, held = trained(kind, **options)
    for one, other in zip(found, in_one_go(kind), strict=True):
        torch.testing.assert_close(one, other)
    known = kind in COUNTED
    backward = "by_block" in options  # whose graphs are there only then
    assert [size is not None for size in held] == [known or backward, known or not backward, True]


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("kind", "schedule"), [("gradient", "1f1b"), ("coo", "1f1b"), ("opaque", "zb-h1"), ("composed", "gpipe")]
)
def test_a_run_trains_what_it_cannot_count(kind: str, schedule: str, tmp_path: Path) -> None:
    plan = make_plan(schedule, CUTS[2], recompute=schedule == "gpipe")
    spec = f"{HERE}:model?kind={kind}"
    assert distance(execute(plan, tmp_path, spec, DATA), expected(plan, spec, DATA)) < 1e-12


def test_what_cannot_be_counted_is_unknown_wherever_a_run_reports_it(tmp_path: Path) -> None:
    plan = make_plan("1f1b", CUTS[2])
    (tmp_path / "plan.json").write_text(dump(plan_document(plan)))
    options = ("--plan", str(tmp_path / "plan.json"), "--out", str(tmp_path / "out"), "--steps", "3", "--device", "cpu")
    done = finish(("run", "--model", f"{HERE}:model?kind=opaque", "--data", DATA, *options))
    assert done.returncode == 0, done.stderr
    assert "unknown" in done.stdout
    report = json.loads((tmp_path / "out" / "run.json").read_text())
    assert [stage["peak_memory_bytes"] is None for stage in report["stages"]] == [False, True]
    assert [rank["peak_memory_bytes"] is None for rank in report["ranks"]] == [False, True]
    lanes = json.loads((tmp_path / "out" / "timeline.json").read_text())["lanes"]
    assert [len(lane["memory_bytes"]) == len(lane["instructions"]) for lane in lanes] == [True, False]
    assert lanes[1]["memory_bytes"] == []
    with (tmp_path / "out" / "steps.csv").open(newline="") as file:
        steps = list(csv.DictReader(file))
    assert {row["peak_memory_bytes_rank_1"] for row in steps} == {""}
    assert all(int(row["peak_memory_bytes_rank_0"]) > 0 for row in steps)
    said = (tmp_path / "out" / "logs" / "rank-1.log").read_text()
    assert (
        "the bytes that this rank holds are unknown: a graph keeps a tensor of torch.strided and class Opaque" in said
    )


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("kind", ["coo", "csr", "composed_buffer"])
def test_a_checkpoint_holds_what_is_not_dense_in_parts(kind: str, tmp_path: Path) -> None:
    plan, spec = make_plan("1f1b", CUTS[2]), f"{HERE}:model?kind={kind}&persistent=true"
    weights = execute(plan, tmp_path, spec, DATA, checkpoint_every=1)
    buffer = build_model(spec, seed=0, dtype=torch.float64).root.state_dict()["1.odd"]
    parts = parts_of(buffer)
    assert parts is not None
    assert all(torch.equal(weights[f"1.odd/{i}"], part) for i, part in enumerate(parts))
    resumed = execute(plan, tmp_path, spec, DATA, first_step=STEPS - 1, checkpoint_every=1)
    assert distance(resumed, weights) == 0


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("kind", ["quantized", "opaque_buffer"])
def test_what_no_checkpoint_can_hold_is_refused_at_the_start(kind: str) -> None:
    rule = r"model.1.odd: must be of parts that a checkpoint can hold; register a buffer with persistent=False"
    with pytest.raises(InvalidInputError, match=rule):
        build_model(f"{HERE}:model?kind={kind}&persistent=true", seed=0)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [*COUNTED, *UNCOUNTED])
def test_a_profile_measures_what_it_cannot_count(kind: str) -> None:
    blocks = made(kind)
    data = torch.linspace(0, 1, 4 * WIDTH).reshape(4, WIDTH), torch.zeros(4, WIDTH)
    found = measure_memory(blocks, default_loss, data, CPU)
    assert [block.uncounted for block in found] == [False, kind in UNCOUNTED, False, False]
    held = [block.activation_bytes for block in found]
    split = measure_split_memory(blocks, default_loss, data, CPU)
    assert all(block.split_activation_bytes > 0 for block in split)
    stage = StageBlocks(blocks[1:2], first_block=1, criterion=None, recompute=False, seed=0, device=CPU)
    stage.forward(1, (torch.ones(4, WIDTH, requires_grad=True),))
    assert stage.memory.tensors_bytes(1) == (held[1] if kind in COUNTED else None)


def test_frozen_weights_and_buffers_count_once_in_their_parts_or_are_unknown() -> None:
    layer = nn.Linear(4, 4).requires_grad_(False)
    layer.register_buffer("sparse", torch.eye(4).to_sparse())
    parts_bytes = 2 * 4 * 8 + 4 * 4  # the places, and the numbers
    assert untrained_bytes([[layer, layer], [layer, nn.Linear(4, 4)]]) == [4 * (16 + 4) + parts_bytes, 0]
    layer.register_buffer("elsewhere", torch.eye(4).to_mkldnn())
    assert untrained_bytes([[nn.Linear(4, 4)], [layer]]) == [0, None]
