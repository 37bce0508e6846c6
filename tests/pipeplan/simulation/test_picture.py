"""The picture of a timeline: a box for all that computes, as long as it takes, in its worker's row."""

from xml.etree import ElementTree

import pytest

from pipeplan.documents.stage_costs import unit_costs
from pipeplan.programs.instructions import is_compute
from pipeplan.programs.pipeline import Pipeline
from pipeplan.schedules.registry import build, schedule_named
from pipeplan.simulation.picture import draw_svg
from pipeplan.simulation.play import simulate

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("name", "replicas"), [("1f1b", (1, 1, 1)), ("gpipe", (2, 2)), ("pipedream", (2, 1))])
def test_boxes_are_what_the_workers_compute_and_as_long_as_it_takes(name: str, replicas: tuple[int, ...]) -> None:
    program = build(schedule_named(name), Pipeline(replicas=replicas, microbatches=4, batches=2))
    cost = unit_costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    timeline = simulate(program, [cost] * len(replicas))
    drawn = ElementTree.fromstring(draw_svg(timeline, width=2000))
    rows: dict[str, float] = {}
    for box in drawn.iter(f"{SVG}g"):
        rect = box.find(f"{SVG}rect")
        assert rect is not None
        rows[rect.attrib["y"]] = rows.get(rect.attrib["y"], 0.0) + float(rect.attrib["width"]) + 0.8
    scale = (2000 - 74 - 16) / timeline.makespan_s
    assert list(rows.values()) == pytest.approx([scale * lane.busy_s for lane in timeline.lanes], abs=2.0)
    names = [text for title in drawn.iter(f"{SVG}title") if (text := title.text)]
    computed = [one for lane in timeline.lanes for one in lane.instructions if is_compute(one)]
    assert len(names) == len(computed)
