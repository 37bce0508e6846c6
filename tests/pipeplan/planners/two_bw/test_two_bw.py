"""PipeDream-2BW's planner against appendix A, tried on every configuration, split and orientation there is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import Options, PlanningProblem
from tests.pipeplan.builders import Cell, again_bytes, cells, cluster, clusters, inputs_kept, kept_bytes, profile
from tests.pipeplan.planners.every_partition import STATES, compositions
from tests.pipeplan.planners.on_paper import on_paper
from tests.properties import examples

SIZES = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One configuration with one split on one orientation."""

    schedule: str
    width: int
    depth: int
    size: int
    throughput: float
    worst_bytes: int
    fits: bool


def every_configuration(
    blocks: Sequence[Cell], machines: Cluster, batch_size: int, options: Options
) -> Iterator[Tried]:
    for w in range(1, machines.devices + 1):
        for d in range(1, min(machines.devices // w, len(blocks)) + 1):
            for b in SIZES:
                if batch_size % (w * b):
                    continue
                m = batch_size // (w * b)
                for schedule, modes in executions(d, m, options):
                    for sizes in compositions(len(blocks), d):
                        for pipelines_in_a_row in (True, False):
                            split = Split(blocks, machines, w, b, m, sizes, pipelines_in_a_row)
                            yield from tried(split, schedule, modes, options)


def tried(split: "Split", schedule: str, modes: tuple[bool, ...], options: Options) -> Iterator[Tried]:
    """Every stage with recomputation or without, whatever mixture."""
    for recompute in product(modes, repeat=split.d):
        held = [split.held_bytes(s, schedule, recompute[s], options) for s in range(split.d)]
        yield Tried(
            schedule=schedule,
            width=split.w,
            depth=split.d,
            size=split.b,
            throughput=split.w * split.b / split.time_s(schedule, recompute, options.recompute_factor),
            worst_bytes=max(held),
            fits=max(held) <= split.machines.device.memory_bytes,
        )


def executions(d: int, m: int, options: Options) -> Iterator[tuple[str, tuple[bool, ...]]]:
    """Algorithm 1 and its three executions; or one schedule alone, at any depth that it has."""
    if options.schedule is None:
        schedules = ["data-parallel" if d == 1 else "naive"] + (["pipedream-2bw"] if d > 1 else [])
    else:
        schedules = [options.schedule] if d == 1 or options.schedule != "data-parallel" else []
    for schedule in schedules:
        if schedule == "pipedream-2bw" and m < d:
            continue
        modes = (False, True) if options.recompute is None else (options.recompute,)
        yield schedule, (True,) if schedule == "gpipe" and options.recompute is None else modes


@dataclass(frozen=True)
class Split:
    """Appendix A.1 on one split and orientation, a worker and an edge at a time."""

    blocks: Sequence[Cell]
    machines: Cluster
    w: int
    b: int
    m: int
    sizes: tuple[int, ...]
    pipelines_in_a_row: bool

    @property
    def d(self) -> int:
        return len(self.sizes)

    def rank(self, stage: int, replica: int) -> int:
        return replica * self.d + stage if self.pipelines_in_a_row else stage * self.w + replica

    def stage(self, s: int) -> Sequence[Cell]:
        start = sum(self.sizes[:s])
        return self.blocks[start : start + self.sizes[s]]

    def edge_s(self, s: int) -> float:
        """2 |A(b)| / bandwidth between the stages s and s + 1."""
        size_bytes = 2 * self.stage(s)[-1].output_bytes * self.b
        ranks = [(self.rank(s, r), self.rank(s + 1, r)) for r in range(self.w)]
        return max(size_bytes / self.machines.link(pair).bandwidth_bytes_per_s for pair in ranks)

    def stage_s(self, s: int, recompute: bool, factor: float | None) -> float:
        forward_s = sum(cell.forward_s for cell in self.stage(s)) * self.b
        compute_s = forward_s + sum(cell.backward_s for cell in self.stage(s)) * self.b
        if recompute:
            compute_s = compute_s * factor if factor else compute_s + forward_s
        transfer_s = (self.edge_s(s - 1) if s else 0.0) + (self.edge_s(s) if s < self.d - 1 else 0.0)
        group = self.machines.link(self.rank(s, r) for r in range(self.w))
        weights = sum(cell.weight_bytes for cell in self.stage(s))
        reduce_s = 2 * (self.w - 1) / self.w * weights / group.bandwidth_bytes_per_s
        return max(compute_s + transfer_s, reduce_s / self.m)

    def time_s(self, schedule: str, recompute: Sequence[bool], factor: float | None) -> float:
        stages_s = [self.stage_s(s, recompute[s], factor) for s in range(self.d)]
        if schedule in ("naive", "data-parallel"):
            return sum(stages_s)
        flush = (self.m + self.d - 1) / self.m if schedule in ("1f1b", "gpipe") else 1.0
        return max(stages_s) * flush

    def held_bytes(self, s: int, schedule: str, recompute: bool, options: Options) -> int:
        weights = sum(cell.weight_bytes for cell in self.stage(s))
        activations = kept_bytes(self.stage(s)) * self.b
        start = sum(self.sizes[:s])
        inputs = self.blocks[start - 1].output_bytes * self.b if s else 0
        versions = 2 if schedule == "pipedream-2bw" else 1
        if options.memory == "paper":
            kept = {"gpipe": self.m, "pipedream-2bw": self.d, "1f1b": self.d}.get(schedule, 1)
            return versions * weights + (1 if recompute else kept) * activations + kept * inputs
        kept = self.in_flight(s, schedule)
        always = (versions + 1 + STATES[options.optimizer_or_default]) * weights
        transient = max(cell.workspace_bytes for cell in self.stage(s)) * self.b
        # Two receives ahead on each edge, a gradient in use, and what was sent and may be under way.
        buffers = (2 + self.in_flight(s - 1, schedule)) * inputs if s else 0
        if s < self.d - 1:
            buffers += (2 + 1 + kept) * self.stage(s)[-1].output_bytes * self.b
        if not recompute:
            if s < self.d - 1:  # the outputs that were sent, as far as they are among the activations
                buffers -= kept * self.stage(s)[-1].kept_output_bytes * self.b
            # A stage that keeps all of a batch keeps it before the first gradients, which replace activations.
            if schedule in ("gpipe", "1f1b", "naive", "data-parallel") and kept >= self.m:
                added = [cell.activation_bytes - (cell.shared_bytes or 0) for cell in self.stage(s)]
                pairs = zip(self.stage(s), added, strict=True)
                always += sum(max(cell.weight_bytes - own * self.b, 0) for cell, own in pairs) - weights
                buffers += 2 * inputs  # the memory of the input, and its gradient
            return always + transient + buffers + kept * activations
        first = inputs // self.b
        reads = [first, *(cell.output_bytes for cell in self.stage(s)[:-1])]
        by_block = kept * inputs_kept(self.stage(s), first) + max(map(again_bytes, self.stage(s), reads))
        ways = {"stage": kept * inputs + activations, "block": by_block * self.b}
        units = [options.recompute_unit] if options.recompute_unit else ["stage", "block"]
        return always + transient + buffers + min(ways[unit] for unit in units)

    def in_flight(self, s: int, schedule: str) -> int:
        return {"gpipe": self.m, "pipedream-2bw": self.d - s, "1f1b": min(self.d - s, self.m)}.get(schedule, 1)


def answer_for(blocks: Sequence[Cell], machines: Cluster, batch_size: int, options: Options) -> Plan | Infeasible:
    measured = profile(blocks, sizes=SIZES)
    return on_paper(
        "pipedream-2bw", PlanningProblem(profile=measured, cluster=machines, batch_size=batch_size, options=options)
    )


def _options(**asked: Any) -> Options:
    """Some options; without a unit of recomputation where they leave no use for it."""
    if asked["recompute"] is False or asked["memory"] == "paper":
        asked["recompute_unit"] = None
    return Options(**asked)


options_of_all_kinds = st.builds(
    _options,
    schedule=st.sampled_from([None, None, "pipedream-2bw", "1f1b", "gpipe", "data-parallel", "naive"]),
    memory=st.sampled_from(["training", "paper"]),
    optimizer=st.sampled_from(sorted(STATES)),
    recompute_factor=st.sampled_from([None, 1.5]),
    recompute=st.sampled_from([None, None, False, True]),
    recompute_unit=st.sampled_from([None, None, "stage", "block"]),
)


LATE = [Cell(activation_bytes=0, weight_bytes=0), Cell(activation_bytes=1, weight_bytes=1)]
"""Blocks that hold the least with two replicas, whose one microbatch has gone when gradients come."""

ONE_BY_ONE = [Cell(workspace_bytes=1, weight_bytes=0, activation_bytes=0), Cell(weight_bytes=1, activation_bytes=1)]
"""The same on two stages that work one after the other: one microbatch is in flight, however deep the pipeline is."""


@examples(150)
@example(LATE, cluster((2, 0.5), memory_bytes=1), 2, Options(optimizer="adam"))
@example(ONE_BY_ONE, cluster((4, 0.5), memory_bytes=1), 2, Options(optimizer="adam"))
@given(st.lists(cells(), min_size=1, max_size=4), clusters(6), st.sampled_from([1, 2, 4, 6, 12]), options_of_all_kinds)
def test_the_search_finds_what_trying_every_configuration_finds(
    blocks: list[Cell], machines: Cluster, batch_size: int, options: Options
) -> None:
    every = list(every_configuration(blocks, machines, batch_size, options))
    fitting = [tried for tried in every if tried.fits]
    answer = answer_for(blocks, machines, batch_size, options)
    if isinstance(answer, Infeasible):
        assert not fitting
        missing = [reason.missing_bytes for reason in answer.reasons if reason.missing_bytes is not None]
        assert missing == sorted(missing)
        assert missing[0] == min(tried.worst_bytes for tried in every) - machines.device.memory_bytes
        return
    best = max(tried.throughput for tried in fitting)
    assert answer.closed_form.throughput_samples_per_s == pytest.approx(best, rel=1e-9)
    as_good = {(t.schedule, t.width, t.depth, t.size) for t in fitting if t.throughput > best * (1 - 1e-9)}
    shape = (answer.schedule, answer.width, answer.depth, answer.microbatch_size)
    assert shape in as_good
    assert all(stage.memory_bytes <= machines.device.memory_bytes for stage in answer.stages)
    assert answer.microbatch_size * answer.microbatches * (answer.width or 0) == batch_size


def test_a_blocks_number_that_depth_does_not_divide_is_split_at_the_best_place() -> None:
    # Three blocks of 3 s on two stages, 2BW: 6 and 3 seconds, whichever way.
    options = Options(schedule="pipedream-2bw", stages=2, recompute=False, microbatch_size=1)
    plan = answer_for([Cell()] * 3, cluster((2, 1.0)), 4, options)
    assert isinstance(plan, Plan)
    assert plan.closed_form.time_per_microbatch_s == 6.0
    assert [(s.start, s.stop) for s in plan.stages] == [(0, 1), (1, 3)]


def test_widths_are_compared_on_the_whole_jobs_rate() -> None:
    """Erratum: b / t is one pipeline's. Four replicas without communication do four times as much."""
    plan = answer_for([Cell()], cluster((4, 1.0)), 8, Options(microbatch_size=1))
    assert isinstance(plan, Plan)
    assert (plan.width, plan.closed_form.throughput_samples_per_s) == (4, 4 / 3.0)


def test_a_width_that_fills_a_server_exchanges_gradients_inside_it() -> None:
    """Erratum: replicas in a row cross only the fast links; pipelines in a row would cross the slow ones."""
    blocks = [Cell(weight_bytes=8), Cell(weight_bytes=8)]
    options = Options(schedule="pipedream-2bw", stages=2, microbatch_size=1, recompute=False)
    plan = answer_for(blocks, cluster((2, 100.0), (2, 0.5)), 4, options)
    assert isinstance(plan, Plan)
    assert plan.width == 2
    assert [(w.stage, w.replica) for w in plan.placement] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_pipelines_stay_inside_a_server_where_activations_are_what_is_large() -> None:
    blocks = [Cell(output_bytes=8), Cell(output_bytes=8)]
    options = Options(schedule="pipedream-2bw", stages=2, microbatch_size=1, recompute=False)
    plan = answer_for(blocks, cluster((2, 100.0), (2, 0.5)), 4, options)
    assert isinstance(plan, Plan)
    assert plan.width == 2
    assert [(w.stage, w.replica) for w in plan.placement] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_equal_rates_go_to_fewer_devices_then_less_depth() -> None:
    # One sample a batch: no width divides it, 2BW would need m >= d, and naive stages gain nothing.
    plan = answer_for([Cell()] * 2, cluster((4, 1.0)), 1, Options())
    assert isinstance(plan, Plan)
    assert (plan.schedule, plan.width, plan.depth) == ("data-parallel", 1, 1)
    reasons = {(a.schedule, a.width, a.depth): a.reason for a in plan.alternatives}
    assert reasons["naive", 1, 2] == "as fast: 0.1667 samples/s, on no fewer devices"
    assert reasons["pipedream-2bw", 1, 2] == "m=1 < depth 2"
    assert reasons["data-parallel", 2, 1] == "batch: 1 is not divisible by w*b=2"


def test_what_does_not_fit_is_an_alternative_with_its_stage_and_bytes() -> None:
    # Without recomputation stage 0 holds two microbatches of 6 bytes; with it, one and two inputs of no bytes.
    blocks = [Cell(activation_bytes=6), Cell(activation_bytes=6)]
    options = Options(schedule="pipedream-2bw", microbatch_size=1, stages=2)
    plan = answer_for(blocks, cluster((2, 1.0), memory_bytes=6), 4, options)
    assert isinstance(plan, Plan)
    assert plan.recompute
    assert "memory: stage 0 misses 6 B" in [a.reason for a in plan.alternatives if a.depth == 2]


def test_a_batch_that_no_measured_size_divides_is_refused() -> None:
    measured = profile([Cell()], sizes=(2, 4))
    with pytest.raises(InvalidInputError, match=r"batch_size: must be a multiple of .*\[2, 4\].*, got 7"):
        on_paper("pipedream-2bw", PlanningProblem(profile=measured, cluster=cluster((2, 1.0)), batch_size=7))


def test_more_stages_than_blocks_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"stages: must not exceed the number of blocks \(2\), got 3"):
        answer_for([Cell()] * 2, cluster((4, 1.0)), 4, Options(stages=3))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (Options(synchronisation="all-reduce"), "synchronisation"),
        (Options(schedule="pipedream"), "schedule"),
        (Options(schedule="data-parallel", stages=2), "stages"),
    ],
)
def test_options_without_a_use_are_refused(options: Options, field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        answer_for([Cell()] * 2, cluster((2, 1.0)), 2, options)
    assert caught.value.field == field


def test_the_same_problem_gives_the_same_plan_to_the_byte() -> None:
    blocks = [Cell(forward_s=1.0 + i % 3, weight_bytes=i, output_bytes=i % 2) for i in range(8)]
    answers = [answer_for(blocks, cluster((4, 1.0), (2, 0.5)), 16, Options()) for _ in range(2)]
    assert content_id(answers[0]) == content_id(answers[1])


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("pipedream-2bw", False), ("1f1b", False), ("gpipe", False), ("gpipe", True), ("naive", False)],
)
def test_the_streams_of_equal_stages_reach_the_closed_forms_rate(schedule: str, recompute: bool) -> None:
    options = Options(schedule=schedule, stages=4, microbatch_size=1, recompute=recompute)
    plan = answer_for([Cell()] * 4, cluster((4, 1.0)), 16, options)
    assert isinstance(plan, Plan)
    assert plan.simulated is not None
    # Without a flush the first and the last microbatches differ; GPipe may recompute before the gradient arrives.
    tolerance = 0.05 if schedule == "pipedream-2bw" or recompute else 1e-9
    assert plan.simulated.throughput_samples_per_s == pytest.approx(
        plan.closed_form.throughput_samples_per_s, rel=tolerance
    )
    assert max(plan.simulated.peak_memory_bytes) <= max(stage.memory_bytes for stage in plan.stages)


def test_sixty_four_devices_and_a_hundred_blocks_are_searched() -> None:
    blocks = [Cell(forward_s=1.0 + i % 7, weight_bytes=i % 5, output_bytes=1 + i % 3) for i in range(100)]
    plan = answer_for(blocks, cluster((8, 100.0), (8, 1.0)), 512, Options())
    assert isinstance(plan, Plan)
    assert plan.configurations_considered > 1000
    assert len(plan.alternatives) <= 50
    rates = [a.closed_form_samples_per_s for a in plan.alternatives if a.closed_form_samples_per_s is not None]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] <= plan.closed_form.throughput_samples_per_s
