"""What launcher and ranks write for each other is read back as it was, and without the libraries of the service."""

from typing import Any

import pytest

from pipeplan.documents.identity import canonical_json
from pipeplan.documents.records import read_record
from pipeplan.errors import InvalidInputError
from tests.worker_agent.runtime.plans import make_plan
from worker_agent.engine.results import RankFailure
from worker_agent.runtime.job import RunJob


def test_a_job_comes_back_as_it_was() -> None:
    plan = make_plan("1f1b-interleaved", (0, 1, 2, 3, 4), chunks=2, recompute=True, spec="preset:mlp")
    job = RunJob(plan=plan, model="preset:mlp", data="preset:x", steps=3, out="/out", clip_norm=1.0, tied=((0, 1),))
    again = read_record(RunJob, canonical_json(job))
    assert again == job
    assert again.manifest(3) == job.manifest(3)


@pytest.mark.parametrize("content", [{}, {"kind": "other", "message": "m"}, {"kind": "error", "message": None}])
def test_a_failure_that_no_rank_writes_is_refused(content: Any) -> None:
    with pytest.raises(InvalidInputError):
        read_record(RankFailure, canonical_json(content))
