"""Events: what happened to jobs and runs, and who follows it."""
