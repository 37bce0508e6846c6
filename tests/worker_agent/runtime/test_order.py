"""The executor runs chains."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan.errors import InvalidInputError
from tests.worker_agent.runtime.plans import make_plan
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.run import execute


def test_a_plan_that_reorders_a_graphs_blocks_is_refused(tmp_path: Path) -> None:
    plan = replace(make_plan("1f1b", (0, 1, 3)), order=(0, 2, 1))
    job = RunJob(plan=plan, model="a:b", data="a:b", steps=1, out=str(tmp_path))
    rule = r"plan.order: must be the blocks' own order, or none: the executor runs chains, got \(0, 2, 1\)"
    with pytest.raises(InvalidInputError, match=rule):
        execute(job, lambda _: None)
