"""Cores: which part of a wait for a core is due to other programs, and which to other ranks."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from worker_agent.engine.cores import CoresUsed, busy_s, shares_of_others
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.measured import RunMeasurements

RANK = CoresUsed(node="here", cores=(0, 1), busy_s=20.0, processor_s=4.0)
"""One of several ranks on two cores, which executed 20 s in a run of 10 s."""


def test_ranks_with_cores_of_their_own_wait_for_other_programs_only() -> None:
    assert shares_of_others([RANK, RANK]) == [1.0, 1.0]
    elsewhere = replace(RANK, node="there")
    assert shares_of_others([RANK, RANK, elsewhere, elsewhere]) == [1.0] * 4
    pinned = [replace(RANK, cores=(core,)) for core in range(4)]
    assert shares_of_others(pinned) == [1.0] * 4


@pytest.mark.parametrize(("ranks", "share"), [(5, 0.0), (4, 4 / 16), (3, 8 / 16)])
def test_ranks_that_share_cores_wait_for_each_other_too(ranks: int, share: float) -> None:
    """All of it counted as other programs' before. Of 20 s, ranks of 4 s each leave the rest to other programs."""
    assert shares_of_others([RANK] * ranks) == [share] * ranks


def test_who_used_shared_cores_is_unknown_if_the_system_does_not_say() -> None:
    unknown = replace(RANK, busy_s=None)
    assert shares_of_others([unknown] * 3) == [None] * 3
    assert shares_of_others([unknown] * 2) == [1.0] * 2
    assert shares_of_others([None, RANK]) == [None, 1.0]


def test_this_systems_cores_have_been_busy() -> None:
    assert (busy_s(tuple(os.sched_getaffinity(0))) or 0.0) > 0.0
    assert busy_s(()) is None


def test_eight_ranks_on_two_cores_are_not_each_others_other_programs(tmp_path: Path) -> None:
    """Real ranks: two cores for eight. What they wait for each other is left out of what other programs took."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    try:
        plan = make_plan("gpipe", (0, 8), replicas=8, microbatches=4)
        model = "worker_agent.models.presets:mlp?width=256&depth=8"
        data = "worker_agent.models.presets:regression?width=256&samples=64"
        job = RunJob(plan=plan, model=model, data=data, steps=20, seed=1, out=str(tmp_path), device="cpu")
        results = run_ranks(job)
    finally:
        os.sched_setaffinity(0, before)
    off = [result.off_processor_fraction for result in results]
    assert len(off) == 8 and all(each is not None and each > 0.2 for each in off), off
    for result, fraction, took in zip(results, off, RunMeasurements(job, results).others(off), strict=True):
        assert result.cores is not None and len(result.cores.cores) < 4  # a rank keeps to its core
        assert took is not None and fraction is not None
        assert 0 <= took < fraction
