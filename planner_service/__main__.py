"""`python -m planner_service`: the same as `pipeplan`."""

from planner_service.cli import main

main()
