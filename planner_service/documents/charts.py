"""Charts of profiles and clusters as files: the same figures and pictures as on their pages."""

from typing import Literal

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError
from planner_service.documents.chart_files import Format, csv_text, legend_of_parts, svg_text
from planner_service.documents.drawings import (
    HEIGHT,
    cluster_drawing,
    memory_chart,
    memory_columns,
    size_of,
    time_chart,
    time_columns,
)

ProfileChart = Literal["times", "memory"]


def profile_file(chart: ProfileChart, kind: Format, wanted: str, content: str) -> str:
    """A chart of the profile in the text, at a microbatch size; the parser's process imports this function."""
    profile = parse(Profile, content)
    size = size_of(profile, wanted)
    columns = time_columns(profile, size) if chart == "times" else memory_columns(profile, size)
    if kind == "csv":
        unit = "s" if chart == "times" else "bytes"
        heads = (*(f"{name}_{unit}" for name, _ in columns[0].parts), *(("spread_s",) if chart == "times" else ()))
        rows = (
            (index, column.name, *(value for _, value in column.parts), *((column.spread,) if unit == "s" else ()))
            for index, column in enumerate(columns)
        )
        return csv_text([("block", "name", *heads), *rows])
    drawn = time_chart(columns) if chart == "times" else memory_chart(columns)
    if drawn is None:
        raise InvalidInputError("chart", "cannot be drawn: it is 0 for every block", chart)
    title = f"{chart} of {profile.model.name}, microbatches of {size}"
    legend = legend_of_parts(name for name, _ in columns[0].parts)
    return svg_text("documents/chart.svg", title=title, height=HEIGHT, legend=legend, name=chart, chart=drawn)


def cluster_file(kind: Format, content: str) -> str:
    """The levels of the cluster that the text holds."""
    cluster = parse(Cluster, content)
    if kind == "csv":
        rows = (
            (index, level.size, level.bandwidth_bytes_per_s, level.latency_s)
            for index, level in enumerate(cluster.levels)
        )
        return csv_text([("level", "size", "bandwidth_bytes_per_s", "latency_s"), *rows])
    drawing = cluster_drawing(cluster)
    title = f"The levels of {cluster.devices} devices"
    return svg_text("documents/chart.svg", title=title, height=drawing.height, name="levels", chart=drawing)
