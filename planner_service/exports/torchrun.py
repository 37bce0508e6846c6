"""torchrun: a script that executes the plan through torchrun, to be started once on every node."""

from planner_service.exports.comments import commented
from planner_service.exports.node_script import notes_of, plan_file, require_chain, run_lines, settings_of
from planner_service.exports.source import Source


def write(source: Source) -> str:
    """The script. Raises InvalidInputError where the plan cannot be executed so."""
    require_chain(source)
    notes = commented([*source.heading, *notes_of(source, "The script's arguments")])
    body = "set -euo pipefail\n" + settings_of(source) + 'PLAN_FILE="$(mktemp)"\n' + plan_file(source)
    return "#!/usr/bin/env bash\n" + notes + body + run_lines(source)
