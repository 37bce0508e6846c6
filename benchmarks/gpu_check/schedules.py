"""Schedules: all of them, on two and on four ranks that share one GPU, their transfers through the host."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu_check.exactness import DATA, MODEL, RATE, SEED, STEPS, Exact, block_by_block
from benchmarks.gpu_check.findings import Case, Findings
from benchmarks.gpu_check.here import is_short
from benchmarks.gpu_check.ranks import Ranks
from pipeplan.documents.plan import Plan
from pipeplan.schedules.registry import BUILT_IN, schedule_named
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.reference import Weights, train_in_turn, train_on_replicas

CUTS = {1: (0, 8), 2: (0, 3, 8), 4: (0, 1, 3, 5, 8), 8: tuple(range(9))}
AWKWARD = "tests.worker_agent.runtime.awkward:awkward?width=8"
"""Four blocks with dropout, several tensors between them, whole numbers among these."""

SHORT = ("1f1b on 2 ranks", "pipedream-2bw on 2 ranks", "1f1b resumed", "dropout and odd tensors, recomputing")


def check(findings: Findings) -> None:
    """Runs them all; of the short form a few."""
    with Ranks() as ranks:
        cases = dict(cases_over("host", ranks))
        if is_short(findings):
            others = [name for name in cases if name not in SHORT]
            findings.leave_out(f"{len(others)} cases: {'; '.join(others)}", "the short form has a few")
            cases = {name: cases[name] for name in SHORT}
        findings.run(cases)


def cases_over(transport: str, ranks: Ranks) -> Iterator[tuple[str, Case]]:
    """By name: every schedule on two ranks, what else there is, and every schedule on four."""
    for schedule in BUILT_IN:
        yield f"{schedule} on 2 ranks", on_ranks(schedule, 2, transport, ranks)
    yield from _variants(partial(Exact, transport=transport, ranks=ranks))
    for schedule in BUILT_IN:
        yield f"{schedule} on 4 ranks", on_ranks(schedule, 4, transport, ranks)


def on_ranks(schedule: str, count: int, transport: str, ranks: Ranks) -> Case:
    """A schedule's case on so many ranks: stages, replicas of the one stage, or two stages a rank."""
    exact = partial(Exact, transport=transport, ranks=ranks)
    laws = schedule_named(schedule)
    if laws.update == "replica":
        return exact(plan=make_plan(schedule, CUTS[1], replicas=count), reference=_in_turn)
    if laws.single_stage:
        return exact(plan=make_plan(schedule, CUTS[1], replicas=count))
    if laws.chunked:
        return exact(plan=make_plan(schedule, CUTS[2 * count], microbatches=2 * count, chunks=2))
    microbatches = 1 if laws.update == "minibatch" else 4
    return exact(plan=make_plan(schedule, CUTS[count], microbatches=microbatches))


def _variants(exact: "partial[Exact]") -> Iterator[tuple[str, Case]]:
    yield "1f1b resumed", exact(plan=make_plan("1f1b", CUTS[2], optimizer="momentum"), resume=True)
    yield "pipedream-2bw, two replicas, resumed", exact(plan=_plan("pipedream-2bw", replicas=2), resume=True)
    yield "1f1b, recomputing", exact(plan=_plan("1f1b", recompute=True))
    yield (
        "pipedream-2bw, recomputing, two replicas, adam",
        exact(plan=_plan("pipedream-2bw", recompute=True, replicas=2, optimizer="adam")),
    )
    for concatenate in (False, True):
        for schedule in ("1f1b", "gpipe"):
            name = f"{schedule}, 2BP{' concatenated' if concatenate else ''}"
            yield name, exact(plan=_plan(schedule, split_backward=True), concatenate=concatenate)
    yield "1f1b, 2BP half-way, two replicas", exact(plan=_plan("1f1b", split_backward=True, half_way=True, replicas=2))
    yield "data-parallel, 2BP", exact(plan=make_plan("data-parallel", CUTS[1], replicas=2, split_backward=True))
    yield "zb-h1, recomputing", exact(plan=_plan("zb-h1", recompute=True, microbatches=6))
    yield "1f1b, clipped", exact(plan=_plan("1f1b"), clip_norm=1e9)
    odd = {
        "fused": make_plan("1f1b", (0, 2, 4)),
        "recomputing": make_plan("1f1b", (0, 2, 4), recompute=True),
        "2BP": make_plan("1f1b", (0, 2, 4), split_backward=True),
    }
    for name, plan in odd.items():
        yield f"dropout and odd tensors, {name}", exact(plan=plan, reference=block_by_block(AWKWARD), model=AWKWARD)
    for schedule in sorted(name for name in BUILT_IN if schedule_named(name).update == "minibatch"):
        plan = make_plan(schedule, CUTS[2], replicas=(2, 1), microbatches=1)
        yield f"{schedule} on unequal replicas", exact(plan=plan, reference=_on_replicas)


def _plan(schedule: str, **options: Any) -> Plan:
    """Two stages."""
    return make_plan(schedule, CUTS[2], **options)


def _in_turn(plan: Plan) -> Weights:
    return train_in_turn(plan, MODEL, DATA, steps=STEPS, seed=SEED, learning_rate=RATE)


def _on_replicas(plan: Plan) -> Weights:
    minibatches = STEPS * plan.batch_size // plan.microbatch_size
    return train_on_replicas(plan, MODEL, DATA, minibatches=minibatches, seed=SEED, learning_rate=RATE)
