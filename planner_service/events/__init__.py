"""Events: what happened to jobs and runs, and the streams that follow it."""
