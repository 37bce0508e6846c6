"""Simulation: plays programs with costs, and shows what a timeline holds."""
