"""Price process: plays stored plans, one after another, at a lower priority than everything else on this machine.

python -m planner_service.plans.price_process MEMORY_BYTES CPU_S     0: no limit
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace

from pipeplan.documents.files import parse_plan, plan_document
from pipeplan.documents.identity import canonical_json
from pipeplan.planners.complete import play_later
from planner_service.plans.questions import Price, PriceQuestion
from planner_service.platform.processes.child import serve

NICE = 10
"""The niceness: plans that somebody waits for come first."""


def priced(question: PriceQuestion, _tell: Callable[[None], None]) -> Price | None:
    """The plan with its play, under its id; None if the play is too long, or gives no finite numbers."""
    plan = parse_plan(question.content)
    simulated = play_later(plan, instructions=question.instructions)
    if simulated is None:
        return None
    document = plan_document(replace(plan, simulated=simulated)) | {"id": question.plan_id}
    try:
        content = canonical_json(document)
    except ValueError:
        return None
    return Price(
        content=content,
        throughput_samples_per_s=simulated.throughput_samples_per_s,
        bubble_fraction=simulated.bubble_fraction,
    )


def main() -> None:
    """Answers until standard input ends."""
    if sys.platform != "win32":
        os.nice(NICE)
    serve(priced, memory_bytes=int(sys.argv[1]), cpu_s=float(sys.argv[2]))


if __name__ == "__main__":
    main()
