"""What stages can compute together within their memory: no split's longest stage computes for less."""

from hypothesis import assume, given
from hypothesis import strategies as st

from pipeplan.documents.profile import Profile
from pipeplan.planners.problem import ACCOUNTINGS, Options, PlanningProblem
from pipeplan.planners.two_bw.candidate import Evaluator
from pipeplan.planners.two_bw.chain import profiled
from pipeplan.planners.two_bw.terms import PipelineShape
from tests.pipeplan.builders import Cell, cells, cluster, profile
from tests.properties import examples


def evaluator_for(measured: Profile, memory_bytes: int, options: Options, devices: int = 8) -> Evaluator:
    machines = cluster((devices, 1e12), memory_bytes=memory_bytes)
    problem = PlanningProblem(profile=measured, cluster=machines, batch_size=64, options=options)
    return Evaluator(problem=problem, measured=profiled(problem))


def pipeline(schedule: str, depth: int, recompute: bool | None) -> PipelineShape:
    return PipelineShape(
        schedule=schedule, width=1, depth=depth, microbatch_size=1, microbatches=64, recompute=recompute
    )


@examples(300)
@given(
    st.lists(cells(), min_size=1, max_size=7),
    st.integers(1, 8),
    st.integers(1, 200),
    st.sampled_from(["pipedream-2bw", "1f1b"]),
    st.sampled_from([None, True, False]),
    st.sampled_from(ACCOUNTINGS),
    st.sampled_from([None, 1.0, 4 / 3]),
)
def test_no_split_that_fits_computes_for_less(
    blocks: list[Cell],
    depth: int,
    memory_bytes: int,
    schedule: str,
    recompute: bool | None,
    memory: str,
    factor: float | None,
) -> None:
    assume(depth <= len(blocks))
    assume(memory == "training" or factor is None or recompute is not False)
    evaluator = evaluator_for(profile(blocks), memory_bytes, Options(memory=memory, recompute_factor=factor))
    shape = pipeline(schedule, depth, recompute)
    found = evaluator.fastest(shape)
    least_s = evaluator.capacity(shape).least_s
    assert len(least_s) == len(blocks) + 1
    if found is not None:
        assert least_s[depth] <= found.time_per_microbatch_s / shape.slots


def test_stages_that_must_recompute_take_longer() -> None:
    # 16 blocks of 3 s, 4 s with recomputation, that keep 10 bytes of 90. Without recomputation four stages hold 2, 3, 4
    # and 9 blocks. In 14.4 s the first two recompute 3.6 blocks each, the others compute 4 and 4.8.
    blocks = [Cell(activation_bytes=10)] * 16
    evaluator = evaluator_for(profile(blocks), 90, Options())
    for depth, most in ((1, 48.0), (4, 12.0)):
        free = evaluator_for(profile(blocks), 10**9, Options()).capacity(pipeline("pipedream-2bw", depth, None))
        assert 0.99 * most <= free.least_s[depth] <= most
    tight = evaluator.capacity(pipeline("pipedream-2bw", 4, None)).least_s[4]
    found = evaluator.fastest(pipeline("pipedream-2bw", 4, None))
    assert found is not None
    assert 0.99 * 14.4 <= tight <= 14.4 <= found.time_per_microbatch_s


def test_what_no_stages_can_hold_takes_for_ever() -> None:
    evaluator = evaluator_for(profile([Cell(weight_bytes=10)] * 4), 45, Options())
    least_s = evaluator.capacity(pipeline("pipedream-2bw", 1, None)).least_s
    assert least_s[1] == least_s[2] == float("inf")
    assert least_s[4] < float("inf")
