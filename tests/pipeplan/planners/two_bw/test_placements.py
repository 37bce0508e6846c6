"""Placements: each worker has a device, and every level of a cluster may hold replicas and stages as it likes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.costs.transfer import ranks_by_stage
from pipeplan.planners.two_bw.placements import mixtures, orientations
from tests.pipeplan.builders import cluster
from tests.properties import examples


def test_a_server_and_a_rack_choose_for_themselves() -> None:
    """Eight stages of two replicas, on two racks of four servers of two."""
    machines = cluster((2, 1e9), (4, 1e8), (2, 1e7))
    one = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]  # a server has a replica of two stages
    one += [(stage + 4, replica) for stage, replica in one]  # and a rack has two of four stages
    found = [[(worker.stage, worker.replica) for worker in links.place((2,) * 8)] for links in mixtures(machines, 2, 8)]
    assert one in found


def test_mixtures_on_two_levels_are_those_of_a_server() -> None:
    machines = cluster((8, 1e9), (4, 1e8))
    found = [links.ranks.tolist() for links in mixtures(machines, 4, 8)]
    assert len(found) == 1
    assert found[0][0] == [0, 1, 16, 17]  # two replicas of four stages in a server


@examples(60)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), width=st.integers(1, 12), depth=st.integers(1, 12))
def test_every_placement_has_each_worker_once(sizes: list[int], width: int, depth: int) -> None:
    machines = cluster(*((size, 1e9 / 10**level) for level, size in enumerate(sizes)))
    if width * depth > machines.devices:
        return
    placed = [*orientations(machines, width, depth), *mixtures(machines, width, depth)]
    for links in placed:
        workers = links.place((width,) * depth)
        assert {(each.stage, each.replica) for each in workers} == set(np.ndindex(depth, width))
        assert [list(ranks) for ranks in ranks_by_stage(workers)] == links.ranks.tolist()
    assert len({links.ranks.tobytes() for links in placed}) == len(placed)
