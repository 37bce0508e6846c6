"""The Pareto front against its definition."""

from hypothesis import given
from hypothesis import strategies as st

from pipeplan.planners.auto.proposals import pareto_front

POINTS = st.lists(st.tuples(st.integers(0, 8).map(float), st.integers(0, 8)), max_size=20)


@given(points=POINTS)
def test_the_front_holds_every_point_that_no_other_beats_once(points: list[tuple[float, int]]) -> None:
    front = pareto_front(points, throughput_samples_per_s=lambda p: p[0], memory_bytes=lambda p: p[1])
    unbeaten = {
        point
        for point in points
        if not any(other[0] >= point[0] and other[1] <= point[1] and other != point for other in points)
    }
    assert set(front) == unbeaten
    assert len(front) == len(unbeaten)
    assert front == sorted(front, key=lambda p: (-p[0], -p[1]))
