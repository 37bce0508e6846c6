"""The command `pipeplan`: planning from files, and queries against a service."""
