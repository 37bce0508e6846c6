"""`python -m worker_agent`: the same as `pipeplan-agent`."""

from worker_agent.cli import main

main()
