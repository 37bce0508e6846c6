"""`python -m planner_service`: the same as `pipeplan`."""

from pipeplan.cli.app import main

main()
