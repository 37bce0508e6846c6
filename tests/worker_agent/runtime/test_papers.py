"""The papers' models in the runtime: two stages train as one process does."""

from pathlib import Path

import pytest

from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import train
from tests.worker_agent.runtime.test_executor import RATE, SEED, STEPS, checkpoint_weights, distance
from worker_agent.models.chain import build_model
from worker_agent.models.data import default_feed
from worker_agent.runtime.job import RunJob

MODELS = {
    "gnmt": "preset:gnmt?hidden=8&layers=3&vocabulary=20&length=5&dropout=0",
    "vgg16": "preset:vgg16?scale=0.125&image_size=32&classes=5&dropout=0",
    "mamba": "preset:mamba_1_4b?hidden=16&layers=2&states=3&vocabulary=20&sequence_length=6",
    "s2vt": "preset:s2vt?features=12&frames=4&words=3&vocabulary=20&embedding=6&hidden=10",
}


@pytest.mark.each_case
@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_two_stages_equal_one_process(name: str, split_backward: bool, tmp_path: Path) -> None:
    """Of GNMT, a cut passes on hidden states and token numbers, and both stages hold the shared embedding."""
    model = MODELS[name]
    chain = build_model(model, seed=SEED)
    count = len(chain.blocks)
    data = default_feed(chain).data
    plan = make_plan("1f1b", (0, count // 2, count), split_backward=split_backward)
    job = RunJob(
        plan=plan,
        model=model,
        data=data,
        steps=STEPS,
        checkpoint_every=STEPS,
        seed=SEED,
        learning_rate=RATE,
        out=str(tmp_path),
        device="cpu",
    )
    run_ranks(job)
    expected = train(plan, model, data, steps=STEPS, seed=SEED, learning_rate=RATE)
    assert distance(checkpoint_weights(tmp_path, STEPS), expected) < 1e-11
