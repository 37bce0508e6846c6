"""Runs: what executions of plans came to."""
