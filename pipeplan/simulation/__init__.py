"""Simulation: programs played with costs, and what a timeline shows."""
