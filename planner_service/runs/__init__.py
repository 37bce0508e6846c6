"""Runs: executions of plans, and their results."""
