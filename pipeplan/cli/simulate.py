"""`pipeplan simulate`: a schedule on stages that all cost the same, as in the papers' pictures."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeplan.cli import completion
from pipeplan.cli.console import working
from pipeplan.documents.files import dump, write_document
from pipeplan.documents.stage_costs import unit_costs
from pipeplan.errors import LEAST_AMOUNT, require, require_amount, require_count, require_one_of
from pipeplan.programs.check import check
from pipeplan.programs.footprint import footprints
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.program import Program
from pipeplan.programs.schedule import Schedule
from pipeplan.programs.text import format_stream
from pipeplan.programs.timeline import Timeline
from pipeplan.programs.timeline_document import timeline_document
from pipeplan.schedules.registry import build, schedule_asked, schedule_named, schedule_names
from pipeplan.simulation.draw import draw
from pipeplan.simulation.picture import draw_svg
from pipeplan.simulation.play import simulate as play
from pipeplan.simulation.split_backward import split_backward
from pipeplan.simulation.trace import chrome_trace

COLUMNS = 200
"""The width of the timeline's picture."""

MAX_INSTRUCTIONS = 2_000_000
"""Minutes and gigabytes at most: larger values are most likely mistakes."""


def simulate(
    schedule: Annotated[
        str,
        typer.Option(
            help="A schedule's name, or package.module:Class of your own.",
            autocompletion=completion.names(schedule_names()),
        ),
    ],
    stages: Annotated[int, typer.Option(help="Stages, one worker each.")],
    microbatches: Annotated[int, typer.Option(help="Microbatches in a batch; minibatches for pipedream.")],
    forward: Annotated[float, typer.Option(help="Seconds of a forward.")] = 1.0,
    backward_input: Annotated[float, typer.Option(help="Seconds of the gradient of a stage's input.")] = 1.0,
    backward_weight: Annotated[float, typer.Option(help="Seconds of the gradient of its weights.")] = 1.0,
    transfer: Annotated[float, typer.Option(help="Seconds of a transfer between two neighbouring stages.")] = 0.0,
    two_bp: Annotated[bool, typer.Option("--two-bp", help="Split the backward in two (2BP).")] = False,
    two_bp_half_way: Annotated[
        bool,
        typer.Option(
            "--two-bp-half-way", help="2BP with less memory: half of the weight gradients half-way through a batch."
        ),
    ] = False,
    chunks: Annotated[int | None, typer.Option(help="1f1b-interleaved: parts of a stage; default: 2.")] = None,
    batches: Annotated[int, typer.Option(help="Batches one after the other.")] = 1,
    trace: Annotated[Path | None, typer.Option(help="Writes a Chrome trace, for Perfetto.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Writes the timeline as a picture.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Plays a schedule with unit costs. Shows bubble, makespan, streams and timeline."""
    if ":" not in schedule:
        names = [name for name in schedule_names() if not schedule_named(name).single_stage]
        require_one_of(names, "schedule", schedule)
    laws = schedule_asked(schedule)
    if laws.chunked:
        chunks = 2 if chunks is None else chunks
        require_count("chunks", chunks)
    else:
        require(chunks is None, "chunks", "is an option of 1f1b-interleaved", chunks)
        chunks = 1
    with working("playing the streams"):
        program = _program(laws, stages, microbatches, batches, chunks)
        given = (forward, backward_input, backward_weight)
        forward_s, backward_input_s, backward_weight_s = (value / chunks for value in given)
        require_amount("forward", forward_s)
        require_amount("backward_input", backward_input_s)
        require_amount("backward_weight", backward_weight_s)
        require_amount("transfer", transfer)
        total_s = forward_s + backward_input_s + backward_weight_s
        require(total_s >= LEAST_AMOUNT, "forward", "must take some time if the backward takes none", total_s)
        cost = unit_costs(forward_s=forward_s, backward_input_s=backward_input_s, backward_weight_s=backward_weight_s)
        costs = [replace(cost, latency_s=transfer)] * stages * chunks
        if two_bp or two_bp_half_way:
            program = split_backward(program, costs, half_way=two_bp_half_way)
        check(program)
        timeline = play(program, costs)
    if trace is not None:
        write_document(trace, chrome_trace({"predicted": timeline}), field="trace")
    if svg is not None:
        write_document(svg, draw_svg(timeline), field="svg")
    if as_json:
        typer.echo(dump(_document(program, timeline, microbatches=microbatches, batches=batches)))
    else:
        typer.echo(draw(timeline, columns=COLUMNS))
        typer.echo(f"bubble {100 * timeline.bubble_fraction:.2f} %, makespan {timeline.makespan_s:g} s")


def _program(schedule: Schedule, stages: int, microbatches: int, batches: int, chunks: int) -> Program:
    """The streams of all workers. Raises InvalidInputError for counts that make too many instructions."""
    counts = {"microbatches": microbatches, "stages": stages, "batches": batches, "chunks": chunks}
    for field, value in counts.items():
        require_count(field, value)
    most = max(counts, key=counts.__getitem__)
    others = ", ".join(name for name in counts if name != most)
    rule = f"must make at most {MAX_INSTRUCTIONS} instructions with {others}"
    require(6 * prod(counts.values()) <= MAX_INSTRUCTIONS, most, rule, counts[most])
    if schedule.update == "minibatch":  # M minibatches a batch over K batches are M K batches of one
        microbatches, batches = 1, microbatches * batches
    pipeline = Pipeline(replicas=(1,) * (stages * chunks), microbatches=microbatches, batches=batches, chunks=chunks)
    return build(schedule, pipeline)


def _document(program: Program, timeline: Timeline, *, microbatches: int, batches: int) -> dict[str, Any]:
    # The most that a stage ever holds; with several chunks, the largest.
    in_flight, weight_versions = [], []
    for stream in program.streams:
        parts = program.stage_streams(stream)
        held = [h for part in parts for h in footprints(part.instructions, recompute=False)]
        in_flight.append(max(h.in_flight for h in held))
        weight_versions.append(max(h.versions for h in held))
    return {
        "schedule": program.schedule.name,
        "stages": program.pipeline.span,
        "chunks": program.pipeline.chunks,
        "microbatches": microbatches,
        "batches": batches,
        "bubble_fraction": timeline.bubble_fraction,
        "makespan_s": timeline.makespan_s,
        "in_flight": in_flight,
        "weight_versions": weight_versions,
        "streams": [format_stream(stream.instructions) for stream in program.streams],
        "timeline": timeline_document(timeline),
    }
