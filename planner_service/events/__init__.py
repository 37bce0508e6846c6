"""Events: changes of jobs and runs, and the streams that follow it."""
