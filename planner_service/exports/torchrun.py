"""torchrun: a script that executes the plan, to be started once on every node."""

from planner_service.exports.node_script import commented, node_script, notes_of
from planner_service.exports.source import Source


def write(source: Source) -> str:
    """The script. Raises InvalidInputError where the plan cannot be executed so."""
    return "#!/usr/bin/env bash\n" + commented([source.title, *notes_of(source)]) + node_script(source)
